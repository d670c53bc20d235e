"""Enlarges the center of a thin image without enlarging the rest, which would be cut off.

For example, an image of 3 x 9000 pixels whose shorter side becomes 256 would have 768,000 on the longer one, 590 MB,
for a center of 224.
"""

from __future__ import annotations

import torch
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional

from zerovision.models.sides import ImageSize, sides

THINNEST_SIDES = 20  # longer side, as a multiple of the shorter one, up to which an image is enlarged as a whole
_WEIGHT_BITS = 14  # of PyTorch's fixed-point weights for bytes, if the largest weight is from 1 to 2

# By filter: how far it reaches in pixels, and its weight at a distance; PyTorch's with antialiasing, as Pillow's.
FILTERS = {
    InterpolationMode.BILINEAR: (1, lambda x: (1 - x).clamp(min=0)),
    InterpolationMode.BICUBIC: (
        2,
        lambda x: torch.where(x < 1, (1.5 * x - 2.5) * x * x + 1, (2 - x).clamp(min=0) ** 2 * (x - 1) / -2),
    ),
}


def resized_centre(
    image: torch.Tensor, resize_size: ImageSize, size: ImageSize, mode: InterpolationMode
) -> torch.Tensor:
    """Resize the shorter side, or cover a non-square size, and crop the center.

    For an enlarged image thinner than 1:20, only the part that the center needs is read. The bytes equal those of
    `resize` and `center_crop` where PyTorch resizes bytes as bytes (x86 with AVX2, ARM); elsewhere they differ by at
    most 1, and floats by rounding.

    Args:
        image: uint8 or float32 [C, H, W].
        resize_size: In pixels.
        size: Size of the center, in pixels.
        mode: Bilinear or bicubic, with antialiasing.

    Returns: The center in the dtype of `image`, [C, H, W].
    """
    height, width = image.shape[-2:]
    (rows_there, columns_there), centre = sides(resize_size), sides(size)
    cuts_rows = columns_there * height >= rows_there * width
    if cuts_rows:
        rows_there = int(columns_there * height / width)
    else:
        columns_there = int(rows_there * width / height)
    if max(height, width) <= THINNEST_SIDES * min(height, width) or rows_there <= height:
        image = functional.resize(image, [rows_there, columns_there], mode, antialias=True)
    elif cuts_rows:  # columns first, as PyTorch: it rounds bytes in between
        first, weights = _centre_weights(height, rows_there, centre[0], mode)
        rows = image[:, first : first + weights.shape[1]]
        rows = functional.resize(rows, [rows.shape[1], columns_there], mode, antialias=True)
        image = _weighted(weights, rows)
    else:
        first, weights = _centre_weights(width, columns_there, centre[1], mode)
        columns = image[:, :, first : first + weights.shape[1]]
        columns = _weighted(weights, columns.transpose(1, 2)).transpose(1, 2)
        image = functional.resize(columns, [rows_there, centre[1]], mode, antialias=True)
    return functional.center_crop(image, list(centre))


def _centre_weights(side: int, resized: int, size: int, mode: InterpolationMode) -> tuple[int, torch.Tensor]:
    """Return the first pixel that contributes to the center of an enlarged side, and float64 [size, pixels] weights."""
    centres = side / resized * (round((resized - size) / 2) + torch.arange(size, dtype=torch.float64) + 0.5)
    reach = FILTERS[mode][0]
    first, end = max(int(centres[0] - reach + 0.5), 0), min(int(centres[-1] + reach + 0.5), side)
    return first, resize_weights(torch.arange(first, end, dtype=torch.float64), centres, 1.0, mode)


def resize_weights(
    pixels: torch.Tensor, centres: torch.Tensor, step: torch.Tensor | float, mode: InterpolationMode
) -> torch.Tensor:
    """Return the weight of each pixel of a side in each pixel of the resized side.

    The weights are those of PyTorch's `_compute_indices_min_size_weights_aa`
    (aten/src/ATen/native/cpu/UpSampleKernel.cpp).

    Args:
        pixels: Indices of the available pixels, float64 [P].
        centres: Centers of the resized pixels, in pixels of the side, float64 [S].
        step: Distance between centers, at least 1.
        mode: Bilinear or bicubic, with antialiasing.

    Returns:
        float64 [S, P]; each row sums to 1.
    """
    reach, weight_at = FILTERS[mode]
    centres = centres[:, None]
    lows, ends = ((centres + sign * reach * step + 0.5).trunc() for sign in (-1, 1))
    is_inside = (pixels >= lows) & (pixels < ends)
    weights = weight_at(((pixels - centres + 0.5) / step).abs()) * is_inside
    return weights / weights.sum(1, keepdim=True)


def _weighted(weights: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
    """Return the rows of `image` [C, h, w], weighted by [S, h]: [C, S, w]; bytes are rounded as in PyTorch."""
    exact = image.dtype != torch.uint8
    one = 2**_WEIGHT_BITS
    factors = weights if exact else (weights * one + torch.where(weights < 0, -0.5, 0.5)).trunc()
    summed = factors.to(image.device) @ image.double()
    return (summed if exact else ((summed + one / 2) / one).floor().clamp(0, 255)).to(image.dtype)
