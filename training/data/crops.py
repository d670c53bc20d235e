"""Random crops of torchvision's `RandomResizedCrop`, from draws that are given."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

SCALE = (0.08, 1.0)
RATIO = (3 / 4, 4 / 3)
TRIES = 10
CROP_DRAWS = 2 * TRIES + 2


class Box(NamedTuple):
    """A part of an image, in whole pixels."""

    top: int
    left: int
    height: int
    width: int


BoxChooser = Callable[[int, int], Box]  # from height and width of an image to a part of it


def random_box(height: int, width: int, draws: Sequence[float]) -> Box:
    """Choose a part of 8 to 100 % of the area, of sides 3:4 to 4:3, anywhere in the image.

    Area and shape (uniform in its logarithm) are drawn until they fit, at most 10 times; then the largest central part
    of an allowed shape is taken. The same distribution as torchvision's `RandomResizedCrop.make_params`.

    Args:
        height: Height of the image in pixels.
        width: Width of the image in pixels.
        draws: `CROP_DRAWS` numbers, uniform in [0, 1).
    """
    across, down = draws[0], draws[1]
    log_ratio = (math.log(RATIO[0]), math.log(RATIO[1]))
    for attempt in range(1, TRIES + 1):
        area = height * width * _between(*SCALE, draws[2 * attempt])
        ratio = math.exp(_between(*log_ratio, draws[2 * attempt + 1]))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return Box(int(down * (height - h + 1)), int(across * (width - w + 1)), h, w)
    w = min(width, round(height * RATIO[1]))
    h = min(height, round(width / RATIO[0]))
    return Box((height - h) // 2, (width - w) // 2, h, w)


def _between(low: float, high: float, share: float) -> float:
    return low + (high - low) * share
