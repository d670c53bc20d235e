"""Detects a rank that is slower than the others.

All ranks finish a step together, because each waits for the slowest in the collectives. So the detector compares a
rank's work: its time outside of collectives, without possible waiting.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

SLOW_FACTOR = 1.3
CONSECUTIVE_POINTS = 2
SECONDS_BETWEEN_REPORTS = 600.0  # of the same rank
SHORTEST_INTERVAL_STEPS = 5  # the time of a single step varies too much


class SlowRank(NamedTuple):
    """A rank with its seconds of work per step, and the median of the other ranks."""

    rank: int
    step_seconds: float
    others_step_seconds: float


def work_seconds(ranks: Sequence[Mapping[str, float]]) -> list[float]:
    """Return each rank's own work from the seconds of its spans: the part that all ranks do in every step.

    This excludes waiting for the others, and logging, which only rank 0 does. A rank may also wait where the clock sees
    no collective: inside backward or the optimizer, if gradients are reduced from C++ (as in DDP) or on the engine's
    own stream. So time there beyond the fastest rank's counts only to the extent that other ranks waited for it in
    measured collectives.
    """
    exchanging = [rank["backward"] + rank["optimizer"] for rank in ranks]
    work = []
    for number, rank in enumerate(ranks):
        others = [other["communication"] for other in [*ranks[:number], *ranks[number + 1 :]]]
        waited_for = max(0.0, statistics.median(others) - rank["communication"]) if others else 0.0
        beyond = min(exchanging[number] - min(exchanging), waited_for)
        work.append(rank["data"] + rank["forward"] + rank["other"] + min(exchanging) + beyond)
    return work


class SlowRankDetector:
    """Compares the ranks' work at each logging point."""

    def __init__(self) -> None:
        self._work: list[float] = []
        self._steps = 0
        self._slow_points: dict[int, int] = {}  # consecutive ones, by rank
        self._reported_at: dict[int, float] = {}

    def update(self, work: Sequence[float], steps: int) -> list[SlowRank]:
        """Return the ranks that were slow at consecutive logging points and were not reported recently.

        Args:
            work: seconds of work of each rank since the last call.
            steps: optimizer steps since the last call.
        """
        self._work = [old + new for old, new in zip(self._work or [0.0] * len(work), work, strict=True)]
        self._steps += steps
        if self._steps < SHORTEST_INTERVAL_STEPS or len(work) < 2:
            return []
        found, now = [], time.monotonic()
        for rank, own in enumerate(self._work):
            others = statistics.median(self._work[:rank] + self._work[rank + 1 :])
            self._slow_points[rank] = self._slow_points.get(rank, 0) + 1 if own > SLOW_FACTOR * others else 0
            is_new = now - self._reported_at.get(rank, -SECONDS_BETWEEN_REPORTS) >= SECONDS_BETWEEN_REPORTS
            if self._slow_points[rank] >= CONSECUTIVE_POINTS and is_new:
                self._reported_at[rank] = now
                found.append(SlowRank(rank, own / self._steps, others / self._steps))
        self._work, self._steps = [], 0
        return found
