"""Defines which views of an image are averaged, and reads the calibration file next to the weights, without torch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

from zerovision.delivery.trained_model import read_json
from zerovision.training.base.errors import UserError
from zerovision.training.base.files import sha256_of

NONE_OF_THESE = "none of these"
LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 0.05, 20.0


class Views(NamedTuple):
    """Which views of each image are averaged; `flip` adds the mirror image of each view, with an equal weight.

    With `shift_pixels`, two views are added, one shifted up and to the left, the other down and to the right, with
    reflected edges. Each has a weight of one quarter, and the original image one half (Jordan 2024,
    https://arxiv.org/abs/2404.00498, section 3.5).
    """

    flip: bool = False
    shift_pixels: int = 0

    @property
    def are_several(self) -> bool:
        """Whether there are views besides the image itself."""
        return self.flip or self.shift_pixels > 0

    def __str__(self) -> str:
        mirrored = ["mirrored images (--flip)"] if self.flip else []
        shifted = [f"images shifted by {self.shift_pixels} (--shift-pixels)"] if self.shift_pixels else []
        return " and ".join(["plain", *shifted, *mirrored])


PLAIN = Views()


class Calibration(NamedTuple):
    """How a model's logits become probabilities, and the threshold below which an image is rejected."""

    temperature: float  # by which logits are divided
    threshold: float  # probability below which the most probable class is rejected as "none of these"
    views: Views  # whose probabilities were averaged
    facts: dict[str, Any]  # full contents of the calibration file, including the result of `rejection_scores`


def calibration_file(weights: Path) -> Path:
    """Return the calibration file of a weights file."""
    return weights.with_suffix(".calibration.json")


def read_calibration(weights: Path) -> Calibration | None:
    """Return a weights file's calibration; None if there is none, or if it was made for other weights.

    A UserError is raised if the calibration file is damaged.
    """
    file = calibration_file(weights)
    if not file.is_file():
        return None
    facts = read_json(file)
    try:
        temperature, threshold = float(facts["temperature"]), float(facts["threshold"])
        views, digest = Views(bool(facts["flip"]), int(facts["shift_pixels"])), facts["weights_sha256"]
    except (KeyError, TypeError, ValueError):
        temperature = threshold = math.nan
    if not (LOWEST_TEMPERATURE <= temperature <= HIGHEST_TEMPERATURE and 0 <= threshold <= 1):
        raise UserError(f"'{file}' is damaged: write it again with scripts/evaluate.py --reject, or remove it.")
    return Calibration(temperature, threshold, views, facts) if digest == sha256_of(weights) else None
