"""Images as the numbers that a model was trained on: arrays in .npy files, and files of more than 8 bits."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import torch

from training.base.errors import UserError, one_line
from training.data.reading.images import ImageError, open_numbers, read_file
from training.data.values import FLOATS, to_values, values_of

ARRAY_EXTENSION = ".npy"


def read_numbers(path: str, content: bytes | None, preprocessing: dict[str, Any]) -> torch.Tensor:
    """Return an image for `evaluation_transform`: uint8 or float32 [C, H, W], by the rule of `training.data.values`.

    Args:
        path: of a .npy file of one image, [H, W] or [H, W, C], or of an image file.
        content: of the image file, if it was read before.
        preprocessing: as `DatasetPair.preprocessing`, of the model.

    Raises:
        ImageError: if it cannot be read, or has other numbers or channels than those that the model was trained on.
    """
    wanted, channels = values_of(preprocessing), len(preprocessing["mean"])
    if content is None and path.lower().endswith(ARRAY_EXTENSION):
        numbers = _read_array(path)
    else:
        numbers = _narrowed(open_numbers(path, content), wanted)
    numbers = numbers[..., None] if numbers.ndim == 2 else numbers
    found = numbers.shape[-1] if numbers.ndim else 0
    if numbers.ndim != 3 or not numbers.size or found not in (channels, 1 if channels == 3 else channels):
        raise ImageError(path, f"its numbers are {list(numbers.shape)}, the model sees [height, width, {channels}]")
    try:
        image, kind = to_values(numbers, "it")
    except UserError as error:
        raise ImageError(path, str(error)) from None
    if kind != wanted:
        raise ImageError(path, f"it has {kind} numbers, the model was trained on {wanted}")
    return image.permute(2, 0, 1).expand(channels, -1, -1)


def _read_array(path: str) -> np.ndarray:
    content = read_file(path)
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
