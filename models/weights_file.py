"""Loads a local weights file into a network, with a clear error for a file that does not fit."""

from __future__ import annotations

import argparse
import os
import pickle
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerovision.models.class_order import classes_beside, head_by_name
from zerovision.models.weights_metadata import Description, WrongMetadata, open_weights, read_facts
from zerovision.training.base.errors import UserError, shown
from zerovision.training.base.units import plural


def load_weights_file(
    module: nn.Module,
    path: str,
    *,
    description: Description,  # of `module`
    heads: Iterable[str],  # names of the classifier's submodules
    adapt: Callable[[StateDict], StateDict],  # to `module`'s images; returns tensors of another network unchanged
    class_names: Sequence[str],  # of the data; empty to keep a head with the same number of classes
) -> list[str]:
    """Load a safetensors or `weights_only` file into `module`, and return messages for the log, one line each.

    The network's head is not changed if the head in the file is of a different kind or has different classes. A
    UserError is raised for a file that is missing, broken, unsafe, contradictory, or from another model, or that
    contains NaN or infinity.
    """
    expected = module.state_dict()
    tensors, facts, read_notes = read_weights_file(path, expected)
    prefixes = tuple(f"{head}." for head in heads)
    head_keys = {key for key in expected if key.startswith(prefixes)}
    counts = {(len(expected[key]), len(tensors[key])) for key in head_keys & tensors.keys() if tensors[key].ndim}
    found_keys = {key for key in tensors if key.startswith(prefixes)}
    theirs: Description | None = facts.get("description")
    has_projection = bool(description.embedding or (theirs and theirs.embedding))
    is_other_head = has_projection and found_keys != head_keys
    has_none = bool(head_keys) and not found_keys  # such as a feature extractor from timm
    if is_other_head or has_none:
        tensors = {key: tensor for key, tensor in tensors.items() if key not in found_keys}
        tensors |= {key: expected[key] for key in head_keys}
        counts = set()
    elif not has_projection:
        _check_class_names(path, facts, {found for _, found in counts})
    replaced = sorted((found, wanted) for wanted, found in counts if found != wanted)
    head_notes: list[str] = []
    if counts and not replaced and class_names and not has_projection:
        known = [facts["class_names"]] if facts else classes_beside(path)
        head, fresh = ({key: of[key] for key in head_keys & tensors.keys()} for of in (tensors, expected))
        head, head_notes = head_by_name(head, fresh, class_names, known)
        tensors |= head
    shapes = {key: (expected[key].shape, tensors[key].shape) for key in head_keys & tensors.keys()}
    left_out = {key for key, (ours, found) in shapes.items() if ours and found[1:] == ours[1:] and found != ours}
    check_finite(path, tensors)
    tensors |= {key: expected[key] for key in left_out}
    resized = _other_shapes(expected, tensors)
    if resized and tensors.keys() == expected.keys():
        tensors = adapt(tensors)
    _check_same_network(path, description, theirs, expected, tensors)
    module.load_state_dict(tensors)
    notes = [f"weights loaded from {path}", *read_notes, *_other_strides(theirs or description, description)]
    notes += head_notes
    if has_none:
        notes.append("head added: the file has none, so it starts from random weights")
    elif is_other_head:
        notes.append("head replaced: between a classifier and a projection; it starts from random weights")
    if replaced:
        found, wanted = replaced[0]
        notes.append(f"head replaced: {found} -> {wanted} classes; it starts from random weights")
    if resized:
        key, shape = next(iter(resized.items()))
        more = f" and {len(resized) - 1} more" if len(resized) > 1 else ""
        notes.append(f"adapted to this model's input: {key} {shape} -> {list(expected[key].shape)}{more}")
    return notes


def check_finite(path: str | os.PathLike[str], tensors: Mapping[str, torch.Tensor]) -> None:
    """Check that no weight is NaN or infinite; reads every value.

    Raises:
        UserError: if a tensor contains NaN or infinity; the message names that tensor.
    """
    if name := not_finite(tensors):
        raise UserError(
            f"weights file '{path}' contains NaN or infinity in {name!r}: the training run that wrote it had diverged"
        )


def not_finite(tensors: Mapping[str, torch.Tensor]) -> str | None:
    """Return the name of the first tensor that contains NaN or infinity; None if all tensors are finite."""
    return next((name for name, tensor in tensors.items() if not bool(torch.isfinite(tensor).all())), None)


def read_weights_file(path: str, names: Collection[str]) -> tuple[StateDict, dict[str, Any], list[str]]:
    """Read a file's tensors into CPU memory without executing anything in it, or raise a UserError.

    Return the tensors by name; the metadata, or {} for a file that is not from zerovision; and notes about how the file
    was used. A prefix before the network's names of tensors, `names`, is removed.
    """
    file = Path(path)
    if not os.path.isfile(file):
        raise UserError(f"weights file '{path}' does not exist or is not a file: use --weights FILE")
    try:
        with file.open("rb") as stream:
            is_safetensors = stream.read(9)[8:] == b"{"  # 8 bytes of header length, then JSON
        if is_safetensors:
            with open_weights(path) as reader:
                tensors, facts = {key: reader.get_tensor(key) for key in reader.keys()}, read_facts(reader)  # noqa: SIM118
            found: tuple[StateDict, list[str]] | None = (tensors, [])
        else:
            # timm and torchvision store their arguments in a Namespace, which has no code that a pickle could misuse.
            # PyTorch warns about pickles that it then refuses.
            with warnings.catch_warnings(action="ignore"), torch.serialization.safe_globals([argparse.Namespace]):
                content = torch.load(path, map_location="cpu", weights_only=True)
            found, facts = find_state_dict(content), {}
    except pickle.UnpicklingError as error:
        asked = re.search(r"GLOBAL (\S+)", str(error))
        cause = f"asks for {asked[1]}; a" if asked else "a"
        raise UserError(
            f"weights file '{path}' is neither safetensors nor a PyTorch file with only tensors ({cause} file that "
            "could run code is refused): save the state_dict with safetensors.torch.save_file"
        ) from error
    except WrongMetadata as error:
        raise UserError(f"weights file '{path}' {error}") from None
    except Exception as error:  # the unpickler may raise anything on a damaged file
        reason = str(error).partition("\n")[0] or "nothing in it"
        raise UserError(f"weights file '{path}' cannot be read: {type(error).__name__}: {reason}") from error
    if found is None:
        raise UserError(f"weights file '{path}' has no state_dict: save it with torch.save(model.state_dict(), FILE)")
    tensors, notes = found
    if not facts:
        tensors, prefix_notes = without_prefix(path, tensors, names)
        notes += prefix_notes
    return tensors, facts, notes


def _check_class_names(path: str, facts: dict[str, Any], counts: set[int]) -> None:
    """Raise an error if the number of class names differs from the head's width."""
    if "class_names" not in facts:
        return
    named = len(facts["class_names"])
    if counts and counts != {named}:
        names = plural(named, "class name")
        raise UserError(f"weights file '{path}' contradicts itself: {names}, but a head of {max(counts)} classes")


def _check_same_network(
    path: str, ours: Description, theirs: Description | None, expected: StateDict, tensors: StateDict
) -> None:
    """Raise a UserError if tensors do not fit the network; `theirs` describes the file's network if that is known."""
    model_type = ours.model_type
    missing = [key for key in expected if key not in tensors]
    unexpected = [key for key in tensors if key not in expected]
    if missing or unexpected:
        firsts = [f"{kind} {keys[0]!r}" for kind, keys in (("missing", missing), ("unexpected", unexpected)) if keys]
        raise UserError(
            f"weights file '{path}' belongs to a different model than '{model_type}': "
            f"{plural(len(missing), 'tensor')} missing, {len(unexpected)} unexpected (first {', first '.join(firsts)})"
        )
    for key, shape in _other_shapes(expected, tensors).items():
        differs = f"{key!r} is {shape} there, {list(expected[key].shape)} here"
        if theirs and (theirs.model_type, theirs.members) == (model_type, ours.members):
            is_size = theirs.image_size != ours.image_size
            cure = f"--image-size {theirs.image_size}" if is_size else f"--image-channels {theirs.image_channels}"
            raise UserError(f"weights file '{path}' cannot be adapted to such images: {differs}; use {cure}")
        raise UserError(f"weights file '{path}' belongs to a different model than '{model_type}', or size: {differs}")


def _other_strides(theirs: Description, ours: Description) -> list[str]:
    """Return a note for each stem layer whose stride differs from the stride with which the weights were trained."""
    there, here = theirs.stem_stride_changed, ours.stem_stride_changed
    notes = []
    for name, (usual, _) in {**there, **here}.items():
        old, new = (changed.get(name, (usual, usual))[1] for changed in (there, here))
        if old != new:
            notes.append(
                f"{name} has a stride of {new}, but had {old} when these weights were trained, for another "
                "--image-size or --stem"
            )
    return notes


def _other_shapes(expected: StateDict, tensors: StateDict) -> dict[str, list[int]]:
    """Return the shapes in a file, by name, that differ from the network's."""
    return {
        key: list(tensor.shape)
        for key, tensor in tensors.items()
        if key in expected and tensor.shape != expected[key].shape
    }


StateDict = dict[str, torch.Tensor]

# Keys of weights averaged over steps, which timm's `load_state_dict` prefers: in files from timm's train.py and
# torchvision's references.
AVERAGES = ("state_dict_ema", "model_ema")
# Keys of plain weights: in files from timm and Lightning, torchvision, PyTorch's tutorial, DeepSpeed and pytorch-cifar.
RAW = ("state_dict", "model", "model_state_dict", "module", "net")


def find_state_dict(content: object) -> tuple[StateDict, list[str]] | None:
    """Return the tensors in a file's contents by name, and a note if they are an average; None if there are none."""
    notes = []
    if isinstance(content, dict):
        averages, raw = ([key for key in keys if isinstance(content.get(key), dict)] for keys in (AVERAGES, RAW))
        if averages:
            cure = f"; to start from the raw weights, save its '{raw[0]}' alone" if raw else ""
            notes = [f"its '{averages[0]}', the average of the weights over the steps, is used, as in timm{cure}"]
        content = next((content[key] for key in (*averages, *raw)), content)
    tensors = content.items() if isinstance(content, dict) else ()
    if not tensors or not all(isinstance(key, str) and isinstance(value, torch.Tensor) for key, value in tensors):
        return None
    return dict(tensors), notes


def without_prefix(path: str, tensors: Mapping[str, Any], names: Collection[str]) -> tuple[StateDict, list[str]]:
    """Return the tensors, renamed to match a network's names, and notes about a removed prefix.

    Wrappers add a prefix to each name (DDP `module.`, torch.compile `_orig_mod.`), as does a module that contains the
    network (`model.`, `backbone.`). Other tensors, such as a loss's class weights, are left out and reported. A
    UserError is raised if the file contains several such networks.
    """
    first = next(iter(names))
    ends = [key.removesuffix(first) for key in tensors if key.endswith(first)]
    prefixes = [end for end in ends if end[-1:] in ("", ".") and all(end + name in tensors for name in names)]
    if "" in prefixes:
        return dict(tensors), []
    if len(prefixes) > 1:
        raise UserError(
            f"weights file '{path}' contains {len(prefixes)} such networks ({', '.join(map(repr, prefixes))}): "
            "save the state_dict of one"
        )
    # For another network, a prefix that all tensors share is not reported as a difference.
    columns = zip(*(key.split(".") for key in tensors), strict=False)
    shared = "".join(f"{column[0]}." for column in takewhile(lambda column: len({*column}) == 1, columns))
    prefix = prefixes[0] if prefixes else shared
    inside = {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
    if not prefix or not inside.keys() & set(names):
        return dict(tensors), []
    notes = [f"prefix '{prefix}' removed from the names of its tensors"]
    if outside := [key for key in tensors if not key.startswith(prefix)]:
        more = f" and {len(outside) - 1} more" if len(outside) > 1 else ""
        notes.append(f"its tensors outside of the network are not used: {shown(outside[0])}{more}")
    return inside, notes
