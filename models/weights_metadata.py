"""Reads and validates the metadata of a weights file before anything is built from it.

A file may come from anywhere and contain anything. The result of `read_facts` has the right types, bounded size, and
only the expected keys; `zerovision.models.build.tensor_mismatch` checks whether the result fits the file's tensors.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

from safetensors import safe_open

from zerovision.models import LARGEST_IMAGE_SIZE, MOST_IMAGE_CHANNELS, MOST_MEMBERS, ImageSize, read_size, sides
from zerovision.training.base.errors import shown
from zerovision.training.base.units import plural

# A single key for all metadata: safetensors writes several keys in an order that varies from run to run, and equal runs
# must write equal files.
METADATA_KEY = "zerovision"
METADATA_KEYS = ("description", "class_names", "preprocessing", "extra")
LEFT_OUT = ("image_channels", "embedding", "fit", "values", "decode")  # at their defaults

LARGEST_HEADER = 16 * 2**20  # bytes; the names of the 21,841 classes of the full ImageNet take half a million
LONGEST_NAME = 1000  # characters
DEEPEST_EXTRA = 8  # levels
LARGEST_STRIDE = 16
LARGEST_EMBEDDING = 2**16
LARGEST_RESIZE = 2 * LARGEST_IMAGE_SIZE
LARGEST_MEAN, SMALLEST_STD, LARGEST_STD = 1e6, 1e-6, 1e6  # of pixels in 0..1
INTERPOLATIONS = ("bilinear", "bicubic", "nearest")
BYTES = "uint8"
VALUE_TYPES = (BYTES, "uint16", "int16", "float32")
PICTURE_CHANNELS = (1, 3, 4)  # gray, RGB, RGBA


class WrongMetadata(ValueError):
    """Raised for invalid metadata; the message continues a sentence that starts with "weights file '...'"."""


class _Section:
    """A self-validating part of the metadata; fields in `LEFT_OUT` are written only if they differ from the default."""

    @classmethod
    def from_dict(cls, value: Any) -> Self:
        """Create the section from the JSON of `to_dict`, ignoring other keys.

        WrongMetadata is raised if a value is missing, has the wrong type, or is out of bounds.
        """
        _check(isinstance(value, dict), cls.__name__.lower(), value, "an object")
        names = [each.name for each in fields(cls) if each.name in value or each.name not in LEFT_OUT]  # type: ignore[arg-type]
        found = _entries(value, names)
        return cls(**{name: tuple(one) if isinstance(one, list) else one for name, one in found.items()})

    def to_dict(self) -> dict[str, Any]:
        """Return the section as a dictionary for JSON."""
        usual = {name: getattr(type(self), name, None) for name in LEFT_OUT}
        values = {name: [*one] if isinstance(one, tuple) else one for name, one in vars(self).items()}
        return {name: one for name, one in values.items() if name not in usual or one != usual[name]}


@dataclass(frozen=True)
class Description(_Section):
    """The description of a network for `zerovision.models.build.rebuild_model`.

    Attributes:
        model_type: A name in `MODELS`, or `timm:<name>`.
        timm_name: The network's name in timm; None for zerovision's own networks and for an ensemble.
        num_classes: Width of the head.
        image_size: Size of the images, in pixels.
        members: Model names of an ensemble's members.
        stem_stride_changed: Strides that were changed, as [old, new] by the name of the convolution.
        image_channels: Number of channels of the images.
        embedding: Width of the projection that replaces the classifier; 0 for a classifier.
    """

    model_type: str
    timm_name: str | None
    num_classes: int
    image_size: ImageSize
    members: tuple[str, ...] = ()
    stem_stride_changed: Mapping[str, Sequence[int]] = field(default_factory=dict)
    image_channels: int = 3
    embedding: int = 0

    def __post_init__(self) -> None:
        strides = self.stem_stride_changed
        _check(type(self.num_classes) is int, "num_classes", self.num_classes, "a whole number")
        _check(isinstance(self.members, tuple), "members", self.members, "a list of names")
        _check(len(self.members) <= MOST_MEMBERS, "members", self.members, f"at most {MOST_MEMBERS} names")
        _check(isinstance(strides, dict), "stem_stride_changed", strides, "an object")
        _check_names("members", self.members)
        _check_names("stem_stride_changed", strides)
        _check_names("model_type", [self.model_type])
        _check_names("timm_name", [] if self.timm_name is None else [self.timm_name])
        _check_size("image_size", self.image_size, LARGEST_IMAGE_SIZE)
        for pair in strides.values():
            _check(isinstance(pair, list) and len(pair) == 2, "stem_stride_changed", pair, "[old, new]")
            for stride in pair:
                _check_whole("stem_stride_changed", stride, LARGEST_STRIDE)
        _check_whole("image_channels", self.image_channels, MOST_IMAGE_CHANNELS)
        _check_whole("embedding", self.embedding, LARGEST_EMBEDDING, least=0)


@dataclass(frozen=True)
class Preprocessing(_Section):
    """How an image becomes a network's input: decoded, resized, cropped or padded, and normalized.

    Attributes:
        image_size: Size of the network's input, in pixels.
        resize_size: Size that the resized image covers (for a number, its shorter side) before the center crop; None to
            resize to `image_size`.
        mean: Mean per channel of values in 0..1.
        std: Standard deviation per channel of values in 0..1.
        interpolation: A name in torchvision's `InterpolationMode`.
        fit: "pad" if the image keeps its shape between bars of the mean color; otherwise, "".
        values: Type of the numbers, one of `VALUE_TYPES`; integers are scaled as in torchvision's `ToDtype`.
        decode: "exact" or "numbers" if files are not shrunk while decoding; otherwise, "".
    """

    image_size: ImageSize
    resize_size: ImageSize | None
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bilinear"
    fit: str = ""
    values: str = BYTES
    decode: str = ""

    def __post_init__(self) -> None:
        _check_choice("interpolation", self.interpolation, INTERPOLATIONS)
        _check_size("image_size", self.image_size, LARGEST_IMAGE_SIZE)
        if self.resize_size is not None:
            _check_size("resize_size", self.resize_size, LARGEST_RESIZE)
        for name, low, high in (("mean", -LARGEST_MEAN, LARGEST_MEAN), ("std", SMALLEST_STD, LARGEST_STD)):
            numbers = getattr(self, name)
            # NaN is in no range
            is_right = isinstance(numbers, tuple) and 1 <= len(numbers) == self.channels
            is_right = is_right and all(type(x) in (int, float) and low <= x <= high for x in numbers)
            _check(is_right, name, numbers, f"{self.channels} number(s) from {low:g} to {high:g}")
        _check_choice("fit", self.fit, ("", "pad"))
        _check_choice("values", self.values, VALUE_TYPES)
        _check_choice("decode", self.decode, ("", "exact", "numbers"))

    @property
    def channels(self) -> int:
        """Number of channels of the images."""
        return len(self.mean) if isinstance(self.mean, tuple) else 0

    @property
    def sides(self) -> tuple[int, int]:
        """Height and width of the network's input, in pixels."""
        return sides(self.image_size)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Number of channels, height and width of the network's input."""
        return self.channels, *self.sides

    @property
    def takes_numbers(self) -> bool:
        """Whether the network takes arrays that are not 8-bit pictures."""
        return self.values != BYTES or self.channels not in PICTURE_CHANNELS

    def at_size(self, size: ImageSize) -> Preprocessing:
        """Return the preprocessing for square images of another size, keeping the same share of each image."""
        resize_size = self.resize_size and int(size) * int(self.resize_size) // int(self.image_size)
        return replace(self, image_size=size, resize_size=resize_size)


def open_weights(path: str | os.PathLike[str]) -> safe_open:
    """Open a safetensors file, unless its header is too large: 100 MB of names take gigabytes of memory and a minute.

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
    """Return the description, class_names, preprocessing and extra of an open file; {} if it is not from zerovision.

    Raises:
        WrongMetadata: if the metadata is not in the format of `zerovision.training.checkpoint.weights.save_weights`.
    """
    text = (reader.metadata() or {}).get(METADATA_KEY)
    if text is None:
        return {}
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WrongMetadata(f"has metadata that is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise WrongMetadata(f"has metadata that is not a JSON object: {shown(content)}")
    facts = _entries(content, METADATA_KEYS)
    class_names = facts["class_names"]
    _check(isinstance(class_names, list) and len(class_names) > 0, "class_names", class_names, "a list of names")
    _check_names("class_names", class_names)
    facts["description"] = description = Description.from_dict(facts["description"])
    if description.num_classes != len(class_names):
        classes = shown(description.num_classes)
        raise WrongMetadata(f"contradicts itself: {plural(len(class_names), 'class name')}, but {classes} classes")
    facts["preprocessing"] = preprocessing = Preprocessing.from_dict(facts["preprocessing"])
    channels = description.image_channels
    _check(preprocessing.channels == channels, "mean", [*preprocessing.mean], f"{channels} number(s)")
    extra = facts["extra"]
    _check(isinstance(extra, dict), "extra", extra, "an object")
    if _is_deeper(extra, DEEPEST_EXTRA):
        raise WrongMetadata(f"has the metadata 'extra' with more than {DEEPEST_EXTRA} levels")
    if extra.get("epoch") is not None:
        _check_whole("epoch", extra["epoch"], 2**53)
    return facts


def _entries(section: dict[str, Any], keys: Iterable[str]) -> dict[str, Any]:
    for key in keys:
        if key not in section:
            raise WrongMetadata(f"has no metadata '{key}': it is not the model.safetensors of a run")
    return {key: section[key] for key in keys}


def _is_deeper(value: Any, levels: int) -> bool:
    children = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return levels < 0 or any(_is_deeper(child, levels - 1) for child in children)


def _check_whole(name: str, value: Any, largest: int, least: int = 1) -> None:
    is_right = type(value) is int and least <= value <= largest
    _check(is_right, name, value, f"a whole number from {least} to {largest}")


def _check_size(name: str, value: Any, largest: int) -> None:
    """Check an `ImageSize`."""
    try:
        is_right = type(value) is int or (isinstance(value, str) and read_size(value) == value)
    except ValueError:
        is_right = False
    for side in sides(value) if is_right else [value]:
        _check_whole(name, side, largest)


def _check_names(name: str, values: Iterable[Any]) -> None:
    """Check that strings can be printed and written: bounded length, no unpaired surrogates."""
    for value in values:
        is_text = isinstance(value, str) and len(value) <= LONGEST_NAME
        _check(is_text, name, value, f"text of at most {LONGEST_NAME} letters")
        try:
            os.fsencode(value)  # folder names may contain bytes that are not valid text
        except UnicodeEncodeError:
            _check(False, name, value, "text")


def _check_choice(name: str, value: Any, allowed: tuple[str, ...]) -> None:
    _check(value in allowed, name, value, ", ".join(filter(None, allowed)))


def _check(right: bool, name: str, value: Any, expected: str) -> None:
    if not right:
        value = [*value] if isinstance(value, tuple) else value  # as in JSON
        raise WrongMetadata(f"has the metadata {name} {shown(value)}: expected {expected}")
