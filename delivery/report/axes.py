"""Axes of a chart: what they span, and round ticks."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from delivery.report.formatting import number


@dataclass(frozen=True)
class Axis:
    """Which values an axis spans, and its ticks: (place in percent, text)."""

    low: float
    high: float
    ticks: list[tuple[float, str]]
    is_log: bool = False

    def place(self, value: float) -> float:
        """Return where a value lies, 0 to 1."""
        low, high = (math.log(self.low), math.log(self.high)) if self.is_log else (self.low, self.high)
        return ((math.log(value) if self.is_log else value) - low) / (high - low)


def linear_axis(
    low: float,
    high: float,
    write: Callable[[float], str],
    *,
    highest: float | None = None,
    is_tight: bool = False,
) -> Axis:
    """Return an axis over the values with ticks at 1, 2 or 5 times a power of ten; a tight one ends with the values."""
    if high <= low:
        spread = abs(high) * 0.1 or 1.0
        low, high = (low, high + spread) if is_tight else (low - spread, high + spread)
    step = _round_step((high - low) / 4)
    if not is_tight:
        low = math.floor(low / step + 1e-9) * step
        high = math.ceil(high / step - 1e-9) * step
        high = min(high, highest) if highest is not None else high
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    ticks = [(100 * (place * step - low) / (high - low), write(place * step)) for place in range(first, last + 1)]
    return Axis(low, high, ticks)


def log_axis(low: float, high: float) -> Axis:
    """Return a logarithmic axis over whole powers of ten, at most seven of them named."""
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    every = max(1, math.ceil((last - first) / 6))
    powers = range(first, last + 1, every)
    ticks = [(100 * (power - first) / (last - first), number(10.0**power, 1)) for power in powers]
    return Axis(10.0**first, 10.0**last, ticks, is_log=True)


def _round_step(smallest: float) -> float:
    """Return the next of 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(smallest))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= smallest * (1 - 1e-9))
