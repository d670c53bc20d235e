"""The trained weights: a self-describing safetensors file that can be loaded in plain PyTorch.

The file's metadata (safetensors stores only text) contains one JSON object with `description` (enough to rebuild the
network), `class_names`, `preprocessing` and `extra`. Tensor names are the network's own, so that timm can load a
`timm:` model.
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from zerovision.models.build import PROJECTED_BY, rebuild_model, tensor_mismatch
from zerovision.models.dry_run import forward_failure
from zerovision.models.weights_file import check_finite
from zerovision.models.weights_metadata import (
    METADATA_KEY,
    METADATA_KEYS,
    Description,
    Preprocessing,
    WrongMetadata,
    open_weights,
    read_facts,
)
from zerovision.training.base.errors import UserError
from zerovision.training.base.files import replacing, replacing_by_library, sync_to_disk
from zerovision.training.base.plugins import IN_FILES, require_plugins
from zerovision.training.data.reading.image_numbers import BYTES, ModelInput
from zerovision.training.world.preserved_process import preserved_generators

CLASS_MAP = "class_map.txt"  # the classes in the order of the logits, one name per line, for timm's --class-map


def save_weights(
    path: str | os.PathLike[str],
    state_dict: dict[str, torch.Tensor],
    *,
    description: Description,
    class_names: list[str],
    preprocessing: Preprocessing,
    extra: dict[str, Any] | None = None,
) -> None:
    """Write weights with their description into one safetensors file; a crash leaves either the old or the new file.

    Args:
        path: the file; its folder must exist.
        state_dict: the full tensors on any device; each keeps its dtype.
        description: `BuiltModel.description`.
        class_names: the class of each logit, in order.
        preprocessing: how an image becomes the network's input; see `preprocess`.
        extra: any other JSON value.
    """
    values = (description.to_dict(), class_names, preprocessing.to_dict(), extra or {})
    metadata = {METADATA_KEY: json.dumps(dict(zip(METADATA_KEYS, values, strict=True)))}
    tensors = _unshared({name: tensor.detach().cpu() for name, tensor in state_dict.items()})
    path = Path(path)
    with replacing_by_library(path) as temporary:
        save_file(tensors, temporary, metadata=metadata)
    sync_to_disk(path.parent)


def _unshared(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors, with copies of those that safetensors rejects.

    These share memory, as views into a flat buffer do, or are not contiguous. The others are not copied, because memory
    may not suffice for a copy of the whole network.
    """
    uses = Counter(tensor.untyped_storage().data_ptr() for tensor in tensors.values())

    def is_alone(tensor: torch.Tensor) -> bool:
        storage = tensor.untyped_storage()
        return tensor.is_contiguous() and storage.nbytes() == tensor.nbytes and uses[storage.data_ptr()] == 1

    return {
        name: tensor if is_alone(tensor) else torch.clone(tensor, memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
    }


def read_metadata(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return a file's description, class_names, preprocessing and extra; the tensors are not read.

    Raises:
        UserError: for a file that is missing or that `save_weights` did not write.
    """
    if not os.path.isfile(path):
        raise UserError(f"weights file '{path}' does not exist or is not a file")
    try:
        with open_weights(path) as reader:
            facts = read_facts(reader)
    except WrongMetadata as error:
        raise UserError(f"weights file '{path}' {error}") from None
    except (SafetensorError, OSError, ValueError) as error:
        raise UserError(f"weights file '{path}' cannot be read as safetensors: {error}") from error
    if not facts:
        raise UserError(f"weights file '{path}' has no metadata: it is not the model.safetensors of a run")
    return facts


def load_model(path: str | os.PathLike[str]) -> tuple[nn.Module, dict[str, Any]]:
    """Rebuild the network of a file and load its weights: float32, on the CPU, in evaluation mode.

    Returns:
        The network (images `[B, C, H, W]` to logits `[B, classes]`) and the metadata of `read_metadata`.

    Raises:
        UserError: for a file that is missing, broken or self-contradictory, has no classifier, contains NaN or
            infinity, or was made with plug-ins that are not loaded.
    """
    metadata = read_metadata(path)
    if isinstance(needed := metadata["extra"].get(IN_FILES), list):
        for changed in require_plugins(f"weights file '{path}'", needed):
            note = f"note: '{path}' was made with another version of {changed.rpartition('@')[0]}: results may differ"
            print(note, file=sys.stderr, flush=True)
    if metadata["description"].embedding:
        raise UserError(
            f"weights file '{path}' was trained with {PROJECTED_BY} and has no classifier yet: train a head with "
            f"--weights {path} --tune head."
        )
    try:
        with preserved_generators():  # the initial weights are random
            module = _empty_network(path, metadata)
    except UserError as error:
        raise UserError(f"weights file '{path}' does not fit its own description: {error}") from error
    tensors = load_file(path)
    check_finite(path, tensors)
    module.load_state_dict(tensors)
    return module.eval(), metadata


def _empty_network(path: str | os.PathLike[str], metadata: dict[str, Any]) -> nn.Module:
    """Build a file's network, or raise a UserError if description, tensors and image size contradict each other."""
    description, image_size = metadata["description"], metadata["preprocessing"].image_size
    with open_weights(path) as reader:
        shapes = {name: reader.get_slice(name).get_shape() for name in reader.keys()}  # noqa: SIM118 - no mapping
    mismatch = tensor_mismatch(description, shapes)
    if mismatch is None:
        module = rebuild_model(description)
        mismatch = forward_failure(module, image_size, 2, description.image_channels)
    if mismatch is not None:
        raise UserError(mismatch)
    return module


def preprocess(metadata: dict[str, Any]) -> Callable[[Image.Image], torch.Tensor]:
    """Return a function that converts a PIL image to the network's input, float32 `[1, 3 or 4, H, W]`, as in `predict`.

    The image is rotated upright (EXIF), converted to gray, RGB or RGBA, resized (the shorter side to resize_size, then
    a center crop of image_size; or directly to image_size if resize_size is null), and normalized with mean and std. An
    image from `Image.open` that Pillow has not decoded yet yields the pixels that `predict` reads from the file; a JPEG
    that is already decoded is reduced from full size by averaging.

    Args:
        metadata: the result of `read_metadata` or `load_model`.

    Raises:
        UserError: if the network was trained on images that are not 8-bit.
    """
    preprocessing = metadata["preprocessing"]
    if preprocessing.values != BYTES:
        raise UserError(
            f"the model was trained on arrays of {preprocessing.values}, not on pictures: prepare such arrays "
            "[C, H, W] with zerovision.training.data.augment.evaluation_transform."
        )
    return ModelInput(preprocessing).read_picture


def class_map(class_names: Sequence[str]) -> bytes | None:
    """Return the contents of `CLASS_MAP`, or None if timm would read different names from it.

    timm strips each line, and accepts only UTF-8.
    """
    content = "".join(f"{name}\n" for name in class_names)
    if [line.strip() for line in io.StringIO(content, newline=None)] != [*class_names]:
        return None
    try:
        return content.encode()
    except UnicodeEncodeError:  # a folder's name with bytes that are not text
        return None


def write_class_map(folder: Path, class_names: Sequence[str]) -> None:
    """Write `CLASS_MAP` into a folder, or remove an old one if the names cannot be written.

    Without this file, timm numbers folders in natural order (1, 2, 10); zerovision sorts them as text (1, 10, 2).
    """
    content, path = class_map(class_names), folder / CLASS_MAP
    if content is None:
        path.unlink(missing_ok=True)
        return
    with replacing(path) as temporary:
        temporary.write_bytes(content)
