"""The calibration of a trained model: a file beside its weights, which `delivery.fit_calibration` makes."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING

from delivery.trained_model import read_json
from training.base.atomic_write import write_json
from training.base.errors import UserError

if TYPE_CHECKING:
    from delivery.views import Views

NONE_OF_THESE = "none of these"
LOWEST_TEMPERATURE, HIGHEST_TEMPERATURE = 0.05, 20.0


@dataclasses.dataclass(frozen=True)
class Calibration:
    """How a model's logits become probabilities, and from which one on they count; a JSON file beside its weights.

    Attributes:
        weights_sha256: of the weights' file.
        temperature: by which logits are divided.
        threshold: images whose highest probability is below it are of none of the classes; 0 to 1.
        reject: what the user asked for.
        flip, shift_pixels: the views that were averaged.
        data, split, samples: what it was fitted on.
        ece_before, ece: expected calibration error on these images, 0 to 1.
        coverage: share of these images that are not rejected.
        accuracy: share of the right ones among them; None of none.
    """

    weights_sha256: str
    temperature: float
    threshold: float
    reject: str
    flip: bool
    shift_pixels: int
    data: str
    split: str
    samples: int
    ece_before: float
    ece: float
    coverage: float
    accuracy: float | None

    @property
    def views(self) -> Views:
        """The views that were averaged."""
        from delivery.views import Views  # imported late: a page needs no torch

        return Views(self.flip, self.shift_pixels)


def calibration_file(weights: Path) -> Path:
    """Return the file of the calibration of a weights' file."""
    return weights.with_suffix(".calibration.json")


def digest_of(weights: Path) -> str:
    """Return what tells a weights' file from another."""
    with weights.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def read_calibration(weights: Path) -> Calibration | None:
    """Return the calibration of a weights' file, None if it has none; one of weights that were there before is none.

    Raises:
        UserError: if the file is damaged.
    """
    file = calibration_file(weights)
    if not file.is_file():
        return None
    content = read_json(file)
    try:
        found = Calibration(**{field.name: content[field.name] for field in dataclasses.fields(Calibration)})
        is_sound = LOWEST_TEMPERATURE <= found.temperature <= HIGHEST_TEMPERATURE and 0 <= found.threshold <= 1
    except (KeyError, TypeError):
        is_sound = False
    if not is_sound:
        raise UserError(f"'{file}' is damaged: write it again with scripts/evaluate.py --reject, or remove it.")
    return found if found.weights_sha256 == digest_of(weights) else None


def write_calibration(weights: Path, calibration: Calibration) -> None:
    """Write the calibration beside the weights."""
    try:
        write_json(calibration_file(weights), dataclasses.asdict(calibration))
    except OSError as error:
        raise UserError(f"'{calibration_file(weights)}' cannot be written: {error.strerror or error}.") from None
