"""The learning-rate range test: what the losses of a training say whose rate grows exponentially with every step.

After Smith 2017 (https://arxiv.org/abs/1506.01186, section 3.3), with exponential steps and smoothing as in fastai.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import Any

LOWEST, HIGHEST = 1e-6, 1.0  # rates of the first and of the last step, unless others are asked for
FEWEST_STEPS = 20
SMOOTHING = 0.95  # share of the past in the mean of the losses
SAFETY = 10  # times below the rate of the smallest loss
CLEARLY = 2.5  # standard errors

Curve = Sequence[tuple[float, float]]  # learning rate and loss (nats) of each step that had a finite one


def with_a_loss(points: Iterable[tuple[float, float | None]]) -> list[tuple[float, float]]:
    """Return the points whose loss is finite."""
    return [(rate, loss) for rate, loss in points if loss is not None and math.isfinite(loss)]


def smoothed(losses: Iterable[float]) -> list[float]:
    """Return exponentially weighted means of each value and those before it, whose weights add up to 1."""
    total, weight, means = 0.0, 0.0, []
    for loss in losses:
        total, weight = SMOOTHING * total + loss, SMOOTHING * weight + 1
        means.append(total / weight)
    return means


def step_of_smallest(means: Sequence[float]) -> int:
    """Return the step of the smallest smoothed loss, after the first: a mean of few losses is small by chance."""
    return min(range(_first_steps(means), len(means)), key=means.__getitem__)


def _first_steps(steps: Sequence[Any]) -> int:
    return min(FEWEST_STEPS, len(steps) // 4)


def suggested(curve: Curve) -> float | None:
    """Return a tenth of the rate at which the smoothed loss is smallest, in two digits; None if it did not fall.

    It has fallen if the losses before that rate have a lower mean than as many of the first ones, by `CLEARLY` times
    the standard error of this difference; the losses scatter as they differ from step to step.
    """
    losses = [loss for _, loss in curve]
    count, best = _first_steps(curve), step_of_smallest(smoothed(losses))
    fall = statistics.fmean(losses[:count]) - statistics.fmean(losses[best + 1 - count : best + 1])
    variance = statistics.fmean((after - before) ** 2 for before, after in itertools.pairwise(losses[: best + 1])) / 2
    return float(f"{curve[best][0] / SAFETY:.2g}") if fall > CLEARLY * math.sqrt(2 * variance / count) else None


def describe_range_test(curve: Curve) -> dict[str, Any]:
    """Return the suggested rate, if there is one, and the curve as `learning_rate.json` has them."""
    means = smoothed([loss for _, loss in curve])
    points = [[rate, loss, mean] for (rate, loss), mean in zip(curve, means, strict=True)]
    return {"suggested": suggested(curve), "columns": ["learning_rate", "loss", "smoothed_loss"], "curve": points}
