"""Converts the numbers of images in arrays: bytes stay bytes, all others become float32.

Whole numbers are divided by the largest value of their type, as in torchvision's `ToDtype(scale=True)`: uint16 ranges
from 0 to 1, int16 from -1 to 1. Floating-point numbers are not changed, and must be from 0 to 1.
"""

from __future__ import annotations

import numpy as np
import torch
from torchvision.transforms.v2.functional import to_dtype

from zerovision.models.weights_metadata import BYTES, VALUE_TYPES
from zerovision.training.base.errors import UserError

FLOATS = "float32"
SMALLEST_STD = 1e-6  # of a channel of one value; weights files have no smaller one
SMALLEST_BYTE_STD = 1e-4  # the same of bytes: the last decimal of its mean
VALUES_AT_A_TIME = 2**22
SMALLEST_RANGE = 1e-12  # of an image of one value


def to_values(numbers: np.ndarray, name: str) -> tuple[torch.Tensor, str]:
    """Return the numbers of images, uint8 as given or float32, and the name of their type.

    Args:
        numbers: the numbers, in any shape and byte order.
        name: name of the array, for messages.

    Raises:
        UserError: for another type, and for floating-point numbers that are not from 0 to 1.
    """
    kind = FLOATS if numbers.dtype.kind == "f" else numbers.dtype.name
    if kind not in VALUE_TYPES:
        raise UserError(f"{name} has {numbers.dtype} numbers: give uint8, uint16, int16, or floats from 0 to 1.")
    if kind == FLOATS:
        numbers = numbers.astype(np.float32)
        low, high = numbers.min(initial=0), numbers.max(initial=0)
        if not (low >= 0 and high <= 1):  # also for nan
            raise UserError(
                f"{name} has floats from {low:g} to {high:g}, whose scale is unknown: give (x - LOW) / (HIGH - LOW) "
                "with fixed LOW and HIGH, so that all, also of later images, are from 0 to 1."
            )
    tensor = torch.from_numpy(np.ascontiguousarray(numbers, numbers.dtype.newbyteorder("=")))
    return (tensor if kind == BYTES else to_dtype(tensor, torch.float32, scale=True)), kind


def stretched(images: torch.Tensor) -> torch.Tensor:
    """Return float32 images for display: the smallest value of all becomes 0, the largest 1."""
    low, high = images.min(), images.max()
    return (images - low) / (high - low).clamp_min(SMALLEST_RANGE)


def pieces(channel: torch.Tensor) -> list[np.ndarray]:
    """Return a channel [N, H, W] in arrays of about `VALUES_AT_A_TIME` values, to keep copies small."""
    return [part.numpy() for part in channel.split(max(1, VALUES_AT_A_TIME // channel[0].numel()))]


def statistics(images: torch.Tensor) -> tuple[list[float], list[float]]:
    """Return mean and standard deviation per channel of uint8 or float32 [N, C, H, W], as values in 0..1.

    They are the same with any number of threads: 4 decimals for bytes, 6 digits for floats. The deviation is at least
    the rounding of the mean, even for a constant channel.
    """
    is_bytes = images.dtype == torch.uint8
    means, stds = [], []
    for channel in images.unbind(1):
        parts = pieces(channel)
        mean = sum(part.sum(dtype=np.float64) for part in parts) / channel.numel()
        squares = sum(np.square(np.subtract(part, mean, dtype=np.float64)).sum() for part in parts)
        std = (squares / channel.numel()) ** 0.5
        if is_bytes:
            means.append(round(float(mean / 255), 4))
            stds.append(max(round(float(std / 255), 4), SMALLEST_BYTE_STD))
        else:
            means.append(float(f"{mean:.6g}"))
            stds.append(max(float(f"{std:.6g}"), SMALLEST_STD, 1e-5 * abs(means[-1])))
    return means, stds
