"""The weight of each class in the training loss: none, from how often it occurs, or given by name."""

from __future__ import annotations

import math
from collections.abc import Sequence

from training.errors import UserError, nearest, shown

USAGE = "none, balanced, or CLASS=WEIGHT,... (1 for the classes left out)"
HEAVIEST = 10**6


def given_weights(value: str) -> dict[str, float]:
    """Return the weights that a value of `--class-weights` gives by name; none for "none" and "balanced".

    Raises:
        UserError: for anything else, and for weights that are not from 0 to a million.
    """
    if value in ("none", "balanced"):
        return {}
    weights: dict[str, float] = {}
    for part in value.split(","):
        name, _, number = part.rpartition("=")
        if name in weights:
            raise UserError(f"--class-weights {shown(value)}: class {shown(name)} has two weights: give one.")
        try:
            weights[name] = float(number)
        except ValueError:
            weights[name] = math.nan
        if not (name and 0 <= weights[name] <= HEAVIEST):  # nan is in no range
            raise UserError(f"--class-weights {shown(value)}: expected {USAGE}; a weight is from 0 to {HEAVIEST}.")
    return weights


def class_weights(value: str, class_names: Sequence[str], counts: Sequence[int]) -> list[float] | None:
    """Return the weight of each class, on average 1 over the training samples; None for "none".

    So the mean of the weighted losses over a step's own samples, which depends on no other step and no rank, is an
    unbiased estimate of PyTorch's weighted mean over the whole set: sum of weight x loss / sum of weights.

    "balanced" is scikit-learn's: samples / (classes that occur x samples of the class).

    Args:
        value: of `--class-weights`.
        class_names: the name of each class.
        counts: training samples of each class.

    Raises:
        UserError: for a class that the data lacks, and if no sample has a weight.
    """
    if value == "none":
        return None
    given = given_weights(value)
    for name in given:
        if name not in class_names:
            some = ", ".join([*class_names[:10], *["..."] * (len(class_names) > 10)])
            hint = f"{nearest(name, class_names)} It has {some}."
            raise UserError(f"--class-weights: the data has no class {shown(name)}.{hint}")
    if value == "balanced":
        weights = [1 / count if count else 0.0 for count in counts]
    else:
        weights = [given.get(name, 1.0) for name in class_names]
    total = sum(weight * count for weight, count in zip(weights, counts, strict=True))
    if not total:
        raise UserError(f"--class-weights {shown(value)}: all training images have weight 0.")
    return [weight * sum(counts) / total for weight in weights]
