"""The search for a learning rate: short trainings that differ in nothing but the rate, up or down from a first one.

Not a range test (Smith 2017, https://arxiv.org/abs/1506.01186, section 3.3), in which the rate grows with every step of
one training: its loss says as much of how many steps there were as of the rates, and a network that has to be trained
for a while before its loss falls gets a rate far too low.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

LOWEST, HIGHEST = 1e-6, 1.0  # rates, unless others are asked for
FACTOR = math.sqrt(10)  # between a rate and the next
PATIENCE = 2  # rates one way that are not better, as long as none has lowered the loss below that of a guess
FEWEST_STEPS = 20
CLEARLY = 2.5  # standard errors
BETTER = 0.02  # share of the loss that another rate must save

Losses = Sequence[float | None]  # nats, of each step; None or NaN of one that had none


def find_rate(
    first: float, lowest: float, highest: float, guess: float, measure: Callable[[float], Losses]
) -> tuple[float | None, dict[float, Losses]]:
    """Return the best rate, None if not even that lowers the loss, and the losses of each that was tried.

    From the first rate it goes up as long as each is better than the one before, or else down.

    Args:
        first: a rate that is known to be usual.
        lowest: no rate below this is tried.
        highest: no rate above this is tried.
        guess: loss (nats) of a uniform guess. A higher one says nothing: it is also that of a network that learns to
            answer the same to every image.
        measure: trains with a rate, from the same weights and with the same images each time.
    """
    best, tried = first, {first: measure(first)}
    for factor in (FACTOR, 1 / FACTOR):
        rate, in_vain = best, 0
        while in_vain < (1 if final_loss(tried[best]) < guess else PATIENCE):
            rate = float(f"{rate * factor:.2g}")
            if not lowest <= rate <= highest or rate in tried:
                break
            tried[rate] = measure(rate)
            if is_better(tried[rate], tried[best], guess):
                best, in_vain = rate, 0
            else:
                in_vain += 1
    return best if has_fallen(tried[best], [guess, *map(first_loss, tried.values())]) else None, tried


def final_loss(losses: Losses) -> float:
    """Return the mean of the last losses; infinity if half of them are missing, as of a rate that is too high."""
    last = _finite(losses[-_few(losses) :])
    return statistics.fmean(last) if 2 * len(last) > _few(losses) else math.inf


def first_loss(losses: Losses) -> float:
    """Return the mean of the first losses; infinity if there is none."""
    first = _finite(losses[: _few(losses)])
    return statistics.fmean(first) if first else math.inf


def is_better(losses: Losses, others: Losses, guess: float) -> bool:
    """Return whether the final loss is clearly lower, by the differences at the same steps, of the same images."""
    ours, theirs = final_loss(losses), final_loss(others)
    if math.isinf(ours) or math.isinf(theirs):
        return ours < theirs
    pairs = zip(losses[-_few(losses) :], others[-_few(others) :], strict=True)
    saved = _finite([other - own for own, other in pairs if own is not None and other is not None])
    error = statistics.stdev(saved) / math.sqrt(len(saved)) if len(saved) > 1 else 0.0
    return min(theirs, guess) - ours > max(CLEARLY * error, BETTER * theirs)


def has_fallen(losses: Losses, before: Iterable[float]) -> bool:
    """Return whether the final loss is clearly below each of those before, as losses scatter from step to step.

    Those before are of all rates: with one that is too high the first losses are higher than that of the weights.
    """
    steps = _finite(losses)
    if math.isinf(final_loss(losses)) or len(steps) < FEWEST_STEPS // 2:
        return False
    variance = statistics.fmean((after - before) ** 2 for before, after in pairwise(steps)) / 2
    return min(before) - final_loss(losses) > CLEARLY * math.sqrt(2 * variance / _few(losses))


def _few(losses: Losses) -> int:
    return max(len(losses) // 5, 1)


def _finite(losses: Losses) -> list[float]:
    return [loss for loss in losses if loss is not None and math.isfinite(loss)]


def describe_search(rate: float | None, tried: Mapping[float, Losses]) -> dict[str, Any]:
    """Return what was found, as `learning_rate.json` has it; the final loss of a rate that is too high is null."""
    rows = []
    for tried_rate, losses in sorted(tried.items()):
        numbers = [loss if loss is not None and math.isfinite(loss) else None for loss in (final_loss(losses), *losses)]
        rows.append([tried_rate, numbers[0], numbers[1:]])
    return {"suggested": rate, "columns": ["learning_rate", "final_loss", "losses"], "tried": rows}


def in_words(tried: Mapping[float, Losses]) -> str:
    """Return the final loss of each rate, in ascending order."""
    return ", ".join(f"{rate:g}: {final_loss(losses):.3f}" for rate, losses in sorted(tried.items()))
