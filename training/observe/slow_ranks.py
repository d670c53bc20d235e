"""Names a rank that is slower than the others.

All ranks finish a step together, since each waits for the slowest in the collectives. So what is compared is a rank's
work: its time outside of collectives, as far as that is known to be no waiting.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

SLOW_FACTOR = 1.3
POINTS_IN_ROW = 2
SECONDS_UNTIL_TOLD_AGAIN = 600.0
SHORTEST_INTERVAL_STEPS = 5  # a single step's time varies too much to judge by


class SlowRank(NamedTuple):
    """A rank and its seconds of work per step, beside the median of the other ranks."""

    rank: int
    step_seconds: float
    others_step_seconds: float


def work_seconds(ranks: Sequence[Mapping[str, float]]) -> list[float]:
    """Return each rank's own work out of the seconds of its spans: what all ranks have to do in every step.

    That leaves out waiting for the others, and logging, which is rank 0's alone. A rank may also wait where the clock
    sees no collective: inside backward or the optimizer, if gradients are reduced from C++ (as DDP does) or on a
    stream of the engine's own. So what a rank takes there beyond the fastest counts as far as the other ranks waited
    for it in collectives that were measured.
    """
    exchanging = [rank["backward"] + rank["optimizer"] for rank in ranks]
    work = []
    for number, rank in enumerate(ranks):
        others = [other["communication"] for other in [*ranks[:number], *ranks[number + 1 :]]]
        waited_for = max(0.0, statistics.median(others) - rank["communication"]) if others else 0.0
        beyond = min(exchanging[number] - min(exchanging), waited_for)
        work.append(rank["data"] + rank["forward"] + rank["other"] + min(exchanging) + beyond)
    return work


class SlowRankWatch:
    """Looks at all ranks' work at each logging point."""

    def __init__(self, told_again_after_s: float = SECONDS_UNTIL_TOLD_AGAIN) -> None:
        self._told_again_after_s = told_again_after_s
        self._work: list[float] = []
        self._steps = 0
        self._points_in_row: dict[int, int] = {}
        self._told_at: dict[int, float] = {}

    def judge(self, work: Sequence[float], steps: int) -> list[SlowRank]:
        """Return the ranks that were slow at several logging points in a row and were not named of late.

        Args:
            work: seconds of work of each rank since the last call.
            steps: optimizer steps since the last call.
        """
        before = self._work or [0.0] * len(work)
        self._work = [old + new for old, new in zip(before, work, strict=True)]
        self._steps += steps
        if self._steps < SHORTEST_INTERVAL_STEPS or len(work) < 2:
            return []
        named = [found for rank in range(len(work)) if (found := self._judge_rank(rank)) is not None]
        self._work, self._steps = [], 0
        return named

    def _judge_rank(self, rank: int) -> SlowRank | None:
        own, others = self._work[rank], statistics.median(self._work[:rank] + self._work[rank + 1 :])
        if own <= SLOW_FACTOR * others:
            self._points_in_row[rank] = 0
            return None
        self._points_in_row[rank] = self._points_in_row.get(rank, 0) + 1
        now = time.monotonic()
        told_of_late = rank in self._told_at and now - self._told_at[rank] < self._told_again_after_s
        if self._points_in_row[rank] < POINTS_IN_ROW or told_of_late:
            return None
        self._told_at[rank] = now
        return SlowRank(rank, own / self._steps, others / self._steps)
