"""Finds a network's tensors in what timm, torchvision, Lightning and others save: which entry, which prefix."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from itertools import takewhile
from typing import Any

import torch

from models.errors import UserError, shown

StateDict = dict[str, torch.Tensor]

# The average over the steps, which timm's `load_state_dict` prefers: of timm's train.py; of torchvision's references.
AVERAGES = ("state_dict_ema", "model_ema")
# timm and Lightning; torchvision; PyTorch's tutorial; DeepSpeed; pytorch-cifar.
RAW = ("state_dict", "model", "model_state_dict", "module", "net")


def find_state_dict(content: object) -> tuple[StateDict, list[str]] | None:
    """Return the tensors by name in what a file contains, and a note if they are an average; None if there are none.

    Args:
        content: what `torch.load` returned.
    """
    notes = []
    if isinstance(content, dict):
        averages, raw = ([key for key in keys if isinstance(content.get(key), dict)] for keys in (AVERAGES, RAW))
        if averages:
            cure = f"; to start from the raw weights, save its '{raw[0]}' alone" if raw else ""
            notes = [f"its '{averages[0]}', the average of the weights over the steps, is taken, as timm does{cure}"]
        content = next((content[key] for key in (*averages, *raw)), content)
    tensors = content.items() if isinstance(content, dict) else ()
    if not tensors or not all(isinstance(key, str) and isinstance(value, torch.Tensor) for key, value in tensors):
        return None
    return dict(tensors), notes


def without_prefix(path: str, tensors: Mapping[str, Any], names: Collection[str]) -> tuple[StateDict, list[str]]:
    """Return the tensors under the names of a network, and notes about the prefix that they had.

    Wrappers put one before each name (DDP `module.`, torch.compile `_orig_mod.`), and so does a module that contains
    the network (`model.`, `backbone.`). What is beside it, such as a loss's class weights, is left out and named.

    Args:
        path: of the file, for the error.
        tensors: of the file.
        names: of the network's tensors.

    Raises:
        UserError: if the file contains several such networks.
    """
    first = next(iter(names))
    ends = [key.removesuffix(first) for key in tensors if key.endswith(first)]
    prefixes = [end for end in ends if end[-1:] in ("", ".") and all(end + name in tensors for name in names)]
    if "" in prefixes:
        return dict(tensors), []
    if len(prefixes) > 1:
        raise UserError(
            f"weights file '{path}' holds {len(prefixes)} such networks ({', '.join(map(repr, prefixes))}): "
            "save the state_dict of one"
        )
    # Of another network, the prefix that all share is none of the differences.
    columns = zip(*(key.split(".") for key in tensors), strict=False)
    shared = "".join(f"{column[0]}." for column in takewhile(lambda column: len({*column}) == 1, columns))
    prefix = prefixes[0] if prefixes else shared
    inside = {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}
    if not prefix or not inside.keys() & set(names):
        return dict(tensors), []
    notes = [f"prefix '{prefix}' taken off the names of its tensors"]
    if outside := [key for key in tensors if not key.startswith(prefix)]:
        more = f" and {len(outside) - 1} more" if len(outside) > 1 else ""
        notes.append(f"not taken from it: {shown(outside[0])}{more}")
    return inside, notes
