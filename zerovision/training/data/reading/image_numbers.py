"""Images as the numbers that their files contain: arrays in .npy files, and grey image files of more than 8 bits."""

from __future__ import annotations

import io
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import torch

from zerovision.training.base.errors import UserError, one_line
from zerovision.training.base.units import plural
from zerovision.training.data.augment import BoxChooser
from zerovision.training.data.reading.decode import crop
from zerovision.training.data.reading.formats import ARRAY_EXTENSION
from zerovision.training.data.reading.images import (
    MAX_PIXELS,
    ImageError,
    open_numbers,
    read_file,
    whole_range,
)
from zerovision.training.data.values import FLOATS, to_values

if TYPE_CHECKING:
    from zerovision.training.data.reading.sources import FileSource

IMAGES_LOOKED_AT = 64  # of a set
LITTLE_OF_RANGE = 1 / 8  # below which numbers of 12 bits fill 16


def read_numbers(
    path: str, content: bytes | None, wanted: str, channels: int, max_pixels: int = MAX_PIXELS
) -> torch.Tensor:
    """Return an image for `evaluation_transform`: uint8 or float32 [C, H, W], by the rule of `data.values`.

    Args:
        path: of a .npy file of one image, [H, W] or [H, W, C], or of an image file.
        content: of the file, if it was read before.
        wanted: type of the numbers, of `values.to_values`.
        channels: C; grey ones are read as three equal channels.
        max_pixels: of an image file, see `open_image`.

    Raises:
        ImageError: if it cannot be read, or has other numbers or channels than those that the model was trained on.
    """
    numbers = _numbers_in(path, content, wanted, max_pixels)
    found = numbers.shape[-1] if numbers.ndim else 0
    if numbers.ndim != 3 or not numbers.size or found not in (channels, 1 if channels == 3 else channels):
        raise ImageError(path, f"its numbers are {list(numbers.shape)}, the model sees [height, width, {channels}]")
    try:
        image, kind = to_values(numbers, "it")
    except UserError as error:
        raise ImageError(path, str(error)) from None
    if kind != wanted:
        raise ImageError(path, f"it has {kind} numbers, the model takes {wanted}")
    return image.permute(2, 0, 1).expand(channels, -1, -1)


def kind_of_numbers(path: str, content: bytes, max_pixels: int = MAX_PIXELS) -> tuple[str, int]:
    """Return the type of an image's numbers, as of `to_values`, and its channels.

    Raises:
        ImageError: if it cannot be read.
        UserError: for a type that is not read.
    """
    numbers = _numbers_in(path, content, "uint16", max_pixels)
    return to_values(numbers, path)[1], numbers.shape[-1]


def note_unused_range(source: FileSource, max_pixels: int) -> list[str]:
    """Return a note if the images of more than 8 bits among some of a set fill little of their range, else none."""
    count = len(source.labels)
    chosen = np.linspace(0, count - 1, min(count, IMAGES_LOOKED_AT)).astype(int).tolist()
    source.expect(chosen)
    ranges = []
    for index in chosen:
        with suppress(ImageError):  # the loader reports it
            ranges.append(whole_range(source.name(index), source.images.content(index), max_pixels))
    found = [each for each in ranges if each is not None]
    high, white = max(found, key=lambda each: each[0] / each[1], default=(0, 1))
    if not 0 < high < LITTLE_OF_RANGE * white:
        return []
    return [
        f"the largest value in {plural(len(found), 'image')} of more than 8 bits is {high} of {white}: read as 8 bits "
        f"they have {high * 255 // white + 1} of 256 levels; --decode numbers keeps all (of colours: saved as "
        f"{ARRAY_EXTENSION} files)"
    ]


def decode_numbers(
    path: str,
    choose: BoxChooser | None = None,
    data: bytes | None = None,
    *,
    kind: str,
    channels: int,
    max_pixels: int = MAX_PIXELS,
) -> np.ndarray:
    """Return the numbers of a file, uint8 or float32 [h, w, C]; see `Decoder`."""
    return crop(read_numbers(path, data, kind, channels, max_pixels).permute(1, 2, 0).numpy(), choose)


def _numbers_in(path: str, content: bytes | None, wanted: str, max_pixels: int) -> np.ndarray:
    """Return what a file contains, grey images as [H, W, 1]."""
    is_array = path.lower().endswith(ARRAY_EXTENSION)
    numbers = _read_array(path, content) if is_array else _narrowed(open_numbers(path, content, max_pixels), wanted)
    return numbers[..., None] if numbers.ndim == 2 else numbers


def _read_array(path: str, content: bytes | None) -> np.ndarray:
    content = read_file(path) if content is None else content
    try:
        array = np.load(io.BytesIO(content), allow_pickle=False)
    except Exception as error:  # a damaged file may end in anything, also in a header of a size without limits
        raise ImageError(path, f"no readable .npy file ({one_line(error)})") from None
    if not isinstance(array, np.ndarray):  # an archive of several
        raise ImageError(path, "it is an archive: give a .npy file of one image")
    return array


def _narrowed(numbers: np.ndarray, wanted: str) -> np.ndarray:
    """Return int32 numbers, which Pillow makes of some files of 16 bits, as the type that is wanted if all fit."""
    if numbers.dtype != np.int32 or wanted == FLOATS or not numbers.size:
        return numbers
    limits = np.iinfo(wanted)
    fits = limits.min <= numbers.min() and numbers.max() <= limits.max
    return numbers.astype(wanted) if fits else numbers
