"""The weight of each class in the training loss: no weights, weights by frequency, or weights given by name."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Sequence

from zerovision.training.base.errors import UserError, nearest, shown

USAGE = 'none, balanced, CLASS=WEIGHT,... ("a, b"=2 for names with commas), or FILE.csv of CLASS,WEIGHT (default: 1)'
HEAVIEST = 10**6


def given_weights(value: str) -> dict[str, float]:
    """Return the weights by class name from `--class-weights`, {} for "none" and "balanced", or raise a UserError."""
    if value in ("none", "balanced"):
        return {}
    weights: dict[str, float] = {}
    for name, number in _pairs(value):
        if name in weights:
            raise UserError(f"--class-weights {shown(value)}: class {shown(name)} has more than one weight: keep one.")
        try:
            weights[name] = float(number)
        except ValueError:
            weights[name] = math.nan
        if not (name and 0 <= weights[name] <= HEAVIEST):  # NaN is in no range
            raise UserError(f"--class-weights {shown(value)}: expected {USAGE}; weights are from 0 to {HEAVIEST}.")
    return weights


def _pairs(value: str) -> list[tuple[str, str]]:
    """Return the name and the weight, as text, of each class in a value of the flag or in the file that it names."""
    if not value.lower().endswith(".csv"):
        try:
            parts = next(csv.reader([value], skipinitialspace=True), [])
        except csv.Error:  # a line break outside quotes
            parts = []
        return [(name, number) for name, _, number in (part.rpartition("=") for part in parts)] or [("", "")]
    try:
        with open(os.path.expanduser(value), encoding="utf-8", errors="surrogateescape", newline="") as stream:
            rows = [row for row in csv.reader(stream, skipinitialspace=True) if row]
    except (OSError, csv.Error) as error:
        reason = getattr(error, "strerror", None) or error
        raise UserError(f"--class-weights {shown(value)}: the file cannot be read ({reason}).") from None
    if rows and rows[0][1:] == ["weight"]:
        del rows[0]
    return [(row[0], row[1] if len(row) == 2 else "") for row in rows] or [("", "")]


def class_weights(value: str, class_names: Sequence[str], counts: Sequence[int]) -> list[float] | None:
    """Return each class's weight, with a mean of 1 over the training samples (None for "none"), or raise a UserError.

    The mean of the weighted losses over a step's samples, which depends on no other step or rank, is therefore an
    unbiased estimate of PyTorch's weighted mean over the whole set: sum of weight x loss / sum of weights.

    With "balanced", a weight is computed as in scikit-learn: samples / (classes that occur x samples of the class).
    """
    if value == "none":
        return None
    given = given_weights(value)
    for name in given:
        if name not in class_names:
            some = ", ".join([*class_names[:10], *["..."] * (len(class_names) > 10)])
            hint = f"{nearest(name, class_names)} Its classes are {some}."
            raise UserError(f"--class-weights: the data has no class {shown(name)}.{hint}")
    weights = [given.get(name, 1.0) for name in class_names]
    if value == "balanced":
        weights = [1 / count if count else 0.0 for count in counts]
    total = sum(weight * count for weight, count in zip(weights, counts, strict=True))
    if not total:
        raise UserError(f"--class-weights {shown(value)}: all training images have weight 0.")
    return [weight * sum(counts) / total for weight in weights]
