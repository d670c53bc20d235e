"""Samples that are a part of an image: a box of a table, cut out before anything else is done to it."""

from __future__ import annotations

import math
from functools import partial

import numpy as np
from PIL import Image

from zerovision.training.data.augment import Box, BoxChooser
from zerovision.training.data.reading.decode import Decoder, crop, decode_shrunk, scale_numerator
from zerovision.training.data.reading.images import ImageError

Edges = tuple[float, ...]  # x0, y0, x1, y1 in pixels of the upright image, x1 and y1 outside; empty for all of it


def decode_box(
    decoder: Decoder,
    box: Edges,
    reduced_to: int,
    path: str,
    choose: BoxChooser | None = None,
    data: bytes | None = None,
) -> np.ndarray:
    """Return the part of an image that is in a box, or what `choose` takes of that: uint8 [h, w, C].

    The image is decoded at full size, of most JPEG files no more than the box, and the box then reduced as the module
    `decode` does it with an image of its own size: what is kept in a cache is the same as what is decoded without.

    Args:
        decoder: Of whole images.
        box: May reach beyond the image.
        reduced_to: Size of the model's images, in pixels; 0 reduces nothing.
        path: As for `decoder`.
        choose: As for `decoder`.
        data: As for `decoder`.

    Raises:
        ImageError: The image cannot be used, or nothing of the box is in it.
    """
    if isinstance(decoder, partial) and decoder.func is decode_shrunk:
        decoder = partial(decoder, image_size=math.inf)  # of which no image is twice as large: none is shrunk
    pixels = decoder(path, partial(_inside, path, box), data)
    height, width = pixels.shape[:2]
    numerator = scale_numerator(height, width, reduced_to) if reduced_to else 8
    if numerator < 8:
        image = Image.fromarray(pixels if pixels.shape[2] > 1 else pixels[..., 0])
        pixels = np.atleast_3d(np.array(image.reduce(8 // numerator)))
    return crop(pixels, choose)


def _inside(path: str, box: Edges, height: int, width: int) -> Box:
    """Return the pixels of an image that a box touches."""
    left, top = (max(0, math.floor(value)) for value in box[:2])
    right, bottom = min(width, math.ceil(box[2])), min(height, math.ceil(box[3]))
    if left >= right or top >= bottom:
        shown = ", ".join(f"{value:g}" for value in box)
        raise ImageError(path, f"its box {shown} lies outside of its {width}x{height} pixels")
    return Box(top, left, bottom - top, right - left)
