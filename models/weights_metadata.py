"""What a weights file says about itself: read at this one place, and checked before anything is made of it.

A file may come from anywhere, and say anything. What `read_facts` returns has the right types, is bounded, and holds
no more than what is asked for; whether it fits the file's tensors is checked by `models.build.tensor_mismatch`.
"""

from __future__ import annotations

import json
import os
from typing import Any

from safetensors import safe_open

from models import LARGEST_IMAGE_SIZE, MOST_MEMBERS
from models.errors import shown

# All facts stand under one key: safetensors writes several keys in an order that changes from run to run, and equal
# runs are to give equal files.
METADATA_KEY = "zerovision"
METADATA_KEYS = ("description", "class_names", "preprocessing", "extra")

LARGEST_HEADER = 16 * 2**20  # bytes; the names of the 21,841 classes of the whole ImageNet take half a million
LONGEST_NAME = 1000  # characters
DEEPEST_EXTRA = 8  # levels
LARGEST_STRIDE = 16
LARGEST_RESIZE = 2 * LARGEST_IMAGE_SIZE
LARGEST_MEAN, SMALLEST_STD, LARGEST_STD = 1e6, 1e-6, 1e6  # of pixels in 0..1
INTERPOLATIONS = ("bilinear", "bicubic", "nearest")


class WrongMetadata(ValueError):
    """Metadata that cannot be used; the message goes on from "weights file '...'"."""


def open_weights(path: str | os.PathLike[str]) -> safe_open:
    """Open a safetensors file; one of 100 MB that is all names of empty tensors would take gigabytes and a minute.

    Raises:
        WrongMetadata: where what stands before the tensors is too large.
        SafetensorError, OSError: where it cannot be read.
    """
    with open(path, "rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
    if LARGEST_HEADER < header_bytes <= os.path.getsize(path):
        raise WrongMetadata(f"has a header of {header_bytes} bytes: at most {LARGEST_HEADER} are read")
    return safe_open(path, framework="pt")


def read_facts(reader: safe_open) -> dict[str, Any]:
    """Return description, class_names, preprocessing and extra of an open file; {} of one that is not ours.

    Raises:
        WrongMetadata: where they are not what `training.checkpoint.weights.save_weights` writes of a trained model.
    """
    text = (reader.metadata() or {}).get(METADATA_KEY)
    if text is None:
        return {}
    try:
        facts = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WrongMetadata(f"has metadata that is no JSON: {error}") from None
    if not isinstance(facts, dict):
        raise WrongMetadata(f"has metadata that is no JSON object: {shown(facts)}")
    class_names = _class_names(_entry(facts, "class_names"))
    return {
        "description": _description(_entry(facts, "description"), len(class_names)),
        "class_names": class_names,
        "preprocessing": _preprocessing(_entry(facts, "preprocessing")),
        "extra": _extra(_entry(facts, "extra")),
    }


def _description(value: Any, named: int) -> dict[str, Any]:
    """Check a `BuiltModel.description` of a model with as many classes as are named."""
    _is(isinstance(value, dict), "description", value, "an object")
    classes = _entry(value, "num_classes")
    _is(type(classes) is int, "num_classes", classes, "a whole number")
    if classes != named:
        raise WrongMetadata(f"contradicts itself: {named} class names, but {shown(classes)} classes")
    members = _entry(value, "members")
    _is(isinstance(members, list) and len(members) <= MOST_MEMBERS, "members", members, f"at most {MOST_MEMBERS} names")
    timm_name, strides = _entry(value, "timm_name"), _entry(value, "stem_stride_changed")
    _is(isinstance(strides, dict), "stem_stride_changed", strides, "an object")
    return {
        "model_type": _name(_entry(value, "model_type"), "model_type"),
        "timm_name": None if timm_name is None else _name(timm_name, "timm_name"),
        "num_classes": classes,
        "image_size": _whole(_entry(value, "image_size"), "image_size", LARGEST_IMAGE_SIZE),
        "members": [_name(member, "members") for member in members],
        "stem_stride_changed": {_name(layer, "stem_stride_changed"): _strides(pair) for layer, pair in strides.items()},
    }


def _class_names(value: Any) -> list[str]:
    _is(isinstance(value, list) and len(value) > 0, "class_names", value, "a list of names")
    return [_name(name, "class_names") for name in value]


def _preprocessing(value: Any) -> dict[str, Any]:
    _is(isinstance(value, dict), "preprocessing", value, "an object")
    resize_size, interpolation = _entry(value, "resize_size"), _entry(value, "interpolation")
    _is(interpolation in INTERPOLATIONS, "interpolation", interpolation, ", ".join(INTERPOLATIONS))
    return {
        "image_size": _whole(_entry(value, "image_size"), "image_size", LARGEST_IMAGE_SIZE),
        "resize_size": None if resize_size is None else _whole(resize_size, "resize_size", LARGEST_RESIZE),
        "mean": _channels(_entry(value, "mean"), "mean", -LARGEST_MEAN, LARGEST_MEAN),
        "std": _channels(_entry(value, "std"), "std", SMALLEST_STD, LARGEST_STD),
        "interpolation": interpolation,
    }


def _extra(value: Any) -> dict[str, Any]:
    _is(isinstance(value, dict), "extra", value, "an object")
    if _is_deeper(value, DEEPEST_EXTRA):
        raise WrongMetadata(f"has the metadata 'extra' with more than {DEEPEST_EXTRA} levels")
    epoch = value.get("epoch")
    if epoch is not None:
        _whole(epoch, "epoch", 2**53)
    return value


def _entry(values: dict[str, Any], key: str) -> Any:
    if key not in values:
        raise WrongMetadata(f"lacks the metadata '{key}': it is not the model.safetensors of a run")
    return values[key]


def _whole(value: Any, name: str, largest: int) -> int:
    _is(type(value) is int and 1 <= value <= largest, name, value, f"a whole number from 1 to {largest}")
    return int(value)


def _strides(value: Any) -> list[int]:
    _is(isinstance(value, list) and len(value) == 2, "stem_stride_changed", value, "[old, new]")
    return [_whole(stride, "stem_stride_changed", LARGEST_STRIDE) for stride in value]


def _channels(value: Any, name: str, low: float, high: float) -> list[float]:
    # nan is in no range
    is_right = isinstance(value, list) and [type(x) in (int, float) and low <= x <= high for x in value] == [True] * 3
    _is(is_right, name, value, f"three numbers from {low:g} to {high:g}")
    return list(value)


def _name(value: Any, where: str) -> str:
    """Check text that can be printed and written: of bounded length, without halves of characters."""
    _is(isinstance(value, str) and len(value) <= LONGEST_NAME, where, value, f"text of at most {LONGEST_NAME} letters")
    try:
        os.fsencode(value)  # names of folders may hold bytes that are no text
    except UnicodeEncodeError:
        _is(False, where, value, "text")
    return str(value)


def _is_deeper(value: Any, levels: int) -> bool:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels < 0 or any(_is_deeper(child, levels - 1) for child in children)


def _is(right: bool, name: str, value: Any, expected: str) -> None:
    if not right:
        raise WrongMetadata(f"has the metadata {name} {shown(value)}: expected {expected}")
