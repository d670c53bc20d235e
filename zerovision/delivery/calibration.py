"""The file of a calibration beside the weights that it is of; imports no torch, for pages."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, NamedTuple

from zerovision.delivery.trained_model import read_json
from zerovision.training.base.errors import UserError
from zerovision.training.base.small_files import sha256_of

NONE_OF_THESE = "none of these"
LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 0.05, 20.0


class Calibration(NamedTuple):
    """How a model's logits become probabilities, and from which one on they count.

    Attributes:
        temperature: by which logits are divided.
        threshold: images whose highest probability is below it are of none of the classes.
        flip: as `shift_pixels`.
        shift_pixels: of the views whose probabilities were averaged, see `zerovision.delivery.views`.
        facts: all that the file says: what it is of, and what `rejection_scores` found there.
    """

    temperature: float
    threshold: float
    flip: bool
    shift_pixels: int
    facts: dict[str, Any]


def calibration_file(weights: Path) -> Path:
    """Return the file of the calibration of a weights' file."""
    return weights.with_suffix(".calibration.json")


def read_calibration(weights: Path) -> Calibration | None:
    """Return the calibration of a weights' file, None if it has none; that of weights before these is none.

    Raises:
        UserError: if the file is damaged.
    """
    file = calibration_file(weights)
    if not file.is_file():
        return None
    facts = read_json(file)
    try:
        temperature, threshold = float(facts["temperature"]), float(facts["threshold"])
        flip, shift_pixels, digest = (facts[name] for name in ("flip", "shift_pixels", "weights_sha256"))
    except (KeyError, TypeError, ValueError):
        temperature = threshold = math.nan
    if not (LOWEST_TEMPERATURE <= temperature <= HIGHEST_TEMPERATURE and 0 <= threshold <= 1):
        raise UserError(f"'{file}' is damaged: write it again with scripts/evaluate.py --reject, or remove it.")
    found = Calibration(temperature, threshold, flip, shift_pixels, facts)
    return found if digest == sha256_of(weights) else None
