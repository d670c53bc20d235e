"""The metadata of a weights file: read in this one place, and checked before anything is built from it.

A file may come from anywhere and contain anything. What `read_facts` returns has the right types, is bounded, and has
no other keys than those asked for; `zerovision.models.build.tensor_mismatch` checks whether it fits the file's tensors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from typing import Any

from safetensors import safe_open

from zerovision.models import LARGEST_IMAGE_SIZE, MOST_IMAGE_CHANNELS, MOST_MEMBERS
from zerovision.models.sides import read_size, sides
from zerovision.training.base.errors import shown

# One key for everything: safetensors writes several keys in an order that changes from run to run, and equal runs
# shall write equal files.
METADATA_KEY = "zerovision"
METADATA_KEYS = ("description", "class_names", "preprocessing", "extra")
DESCRIPTION_KEYS = ("model_type", "timm_name", "num_classes", "image_size", "members", "stem_stride_changed")
PREPROCESSING_KEYS = ("image_size", "resize_size", "mean", "std", "interpolation")

LARGEST_HEADER = 16 * 2**20  # bytes; the names of the 21,841 classes of the whole ImageNet take half a million
LONGEST_NAME = 1000  # characters
DEEPEST_EXTRA = 8  # levels
LARGEST_STRIDE = 16
LARGEST_EMBEDDING = 2**16
LARGEST_RESIZE = 2 * LARGEST_IMAGE_SIZE
LARGEST_MEAN, SMALLEST_STD, LARGEST_STD = 1e6, 1e-6, 1e6  # of pixels in 0..1
INTERPOLATIONS = ("bilinear", "bicubic", "nearest")
# Types of the numbers of an image that are named in its preprocessing; without a name they are bytes.
VALUE_TYPES = ("uint16", "int16", "float32")


class WrongMetadata(ValueError):
    """Metadata that cannot be used; the message continues "weights file '...'"."""


def open_weights(path: str | os.PathLike[str]) -> safe_open:
    """Open a safetensors file, unless its header is too large: 100 MB of names take gigabytes and a minute to read.

    Raises:
        WrongMetadata: if the header is too large.
        SafetensorError, OSError: if the file cannot be read.
    """
    with open(path, "rb") as stream:
        header_bytes = int.from_bytes(stream.read(8), "little")
    if LARGEST_HEADER < header_bytes <= os.path.getsize(path):
        raise WrongMetadata(f"has a header of {header_bytes} bytes: at most {LARGEST_HEADER} are read")
    return safe_open(path, framework="pt")


def read_facts(reader: safe_open) -> dict[str, Any]:
    """Return description, class_names, preprocessing and extra of an open file; {} of one that is not ours.

    Raises:
        WrongMetadata: if they are not what `zerovision.training.checkpoint.weights.save_weights` writes.
    """
    text = (reader.metadata() or {}).get(METADATA_KEY)
    if text is None:
        return {}
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WrongMetadata(f"has metadata that is no JSON: {error}") from None
    if not isinstance(content, dict):
        raise WrongMetadata(f"has metadata that is no JSON object: {shown(content)}")
    facts = _entries(content, METADATA_KEYS)
    class_names = facts["class_names"]
    _check(isinstance(class_names, list) and len(class_names) > 0, "class_names", class_names, "a list of names")
    _check_names("class_names", class_names)
    facts["description"] = _checked_description(facts["description"], len(class_names))
    channels = facts["description"].get("image_channels", 3)
    facts["preprocessing"] = _checked_preprocessing(facts["preprocessing"], channels)
    _check_extra(facts["extra"])
    return facts


def _entries(section: dict[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    for key in keys:
        if key not in section:
            raise WrongMetadata(f"lacks the metadata '{key}': it is not the model.safetensors of a run")
    return {key: section[key] for key in keys}


def _checked_description(value: Any, named: int) -> dict[str, Any]:
    """Return a `BuiltModel.description` of a model with as many classes as are named."""
    _check(isinstance(value, dict), "description", value, "an object")
    found = _entries(value, DESCRIPTION_KEYS)
    classes, members, strides = found["num_classes"], found["members"], found["stem_stride_changed"]
    _check(type(classes) is int, "num_classes", classes, "a whole number")
    if classes != named:
        raise WrongMetadata(f"contradicts itself: {named} class names, but {shown(classes)} classes")
    _check(
        isinstance(members, list) and len(members) <= MOST_MEMBERS, "members", members, f"at most {MOST_MEMBERS} names"
    )
    _check(isinstance(strides, dict), "stem_stride_changed", strides, "an object")
    _check_names("members", members)
    _check_names("stem_stride_changed", strides)
    _check_names("model_type", [found["model_type"]])
    _check_names("timm_name", [] if found["timm_name"] is None else [found["timm_name"]])
    _check_size("image_size", found["image_size"], LARGEST_IMAGE_SIZE)
    for pair in strides.values():
        _check(isinstance(pair, list) and len(pair) == 2, "stem_stride_changed", pair, "[old, new]")
        for stride in pair:
            _check_whole("stem_stride_changed", stride, LARGEST_STRIDE)
    for name, largest in (("image_channels", MOST_IMAGE_CHANNELS), ("embedding", LARGEST_EMBEDDING)):
        if name in value:
            _check_whole(name, value[name], largest)
            found[name] = value[name]
    return found


def _checked_preprocessing(value: Any, image_channels: int) -> dict[str, Any]:
    _check(isinstance(value, dict), "preprocessing", value, "an object")
    found = _entries(value, PREPROCESSING_KEYS)
    _check(found["interpolation"] in INTERPOLATIONS, "interpolation", found["interpolation"], ", ".join(INTERPOLATIONS))
    _check_size("image_size", found["image_size"], LARGEST_IMAGE_SIZE)
    if found["resize_size"] is not None:
        _check_size("resize_size", found["resize_size"], LARGEST_RESIZE)
    for name, low, high in (("mean", -LARGEST_MEAN, LARGEST_MEAN), ("std", SMALLEST_STD, LARGEST_STD)):
        channels = found[name] if isinstance(found[name], list) else []
        # nan is in no range
        is_right = [type(x) in (int, float) and low <= x <= high for x in channels] == [True] * image_channels
        _check(is_right, name, found[name], f"{image_channels} number(s) from {low:g} to {high:g}")
    for name, allowed in (("fit", ("pad",)), ("values", VALUE_TYPES), ("decode", ("exact", "numbers"))):
        if name in value:
            _check(value[name] in allowed, name, value[name], ", ".join(allowed))
            found[name] = value[name]
    return found


def _check_extra(value: Any) -> None:
    _check(isinstance(value, dict), "extra", value, "an object")
    if _is_deeper(value, DEEPEST_EXTRA):
        raise WrongMetadata(f"has the metadata 'extra' with more than {DEEPEST_EXTRA} levels")
    if value.get("epoch") is not None:
        _check_whole("epoch", value["epoch"], 2**53)


def _is_deeper(value: Any, levels: int) -> bool:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels < 0 or any(_is_deeper(child, levels - 1) for child in children)


def _check_whole(name: str, value: Any, largest: int) -> None:
    _check(type(value) is int and 1 <= value <= largest, name, value, f"a whole number from 1 to {largest}")


def _check_size(name: str, value: Any, largest: int) -> None:
    """Check an `ImageSize`."""
    try:
        is_right = type(value) is int or (isinstance(value, str) and read_size(value) == value)
    except ValueError:
        is_right = False
    for side in sides(value) if is_right else [value]:
        _check_whole(name, side, largest)


def _check_names(name: str, values: Iterable[Any]) -> None:
    """Check texts that can be printed and written: of bounded length, without halves of characters."""
    for value in values:
        is_text = isinstance(value, str) and len(value) <= LONGEST_NAME
        _check(is_text, name, value, f"text of at most {LONGEST_NAME} letters")
        try:
            os.fsencode(value)  # names of folders may contain bytes that are no text
        except UnicodeEncodeError:
            _check(False, name, value, "text")


def _check(right: bool, name: str, value: Any, expected: str) -> None:
    if not right:
        raise WrongMetadata(f"has the metadata {name} {shown(value)}: expected {expected}")
