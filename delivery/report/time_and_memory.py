"""How the time and the memory of a run divide."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from delivery.report.formatting import plural, seconds, size
from delivery.report.history import History

SPANS = {
    "data": "waiting for images",
    "forward": "the model and its loss",
    "backward": "gradients",
    "communication": "collectives, and waiting for late ranks",
    "optimizer": "the update",
    "logging": "scores, log files, console",
    "saving": "waiting for checkpoints",
    "other": "the rest of the loop",
    "evaluation": "the validation images",
}
RESTARTING = "restarting"
MOST_RANKS = 64
RANKS_SHOWN_OF_MANY = 8


class Row(NamedTuple):
    """A span of time or a rank: its share of the total, and of the largest row."""

    name: str
    meaning: str
    text: str
    share_of_total: float
    share_of_largest: float


class Breakdown(NamedTuple):
    """Rows that add up to a total, and remarks on them."""

    rows: list[Row]
    total: str
    remarks: list[str]


def time_breakdown(history: History) -> Breakdown | None:
    """Return the time of each span over all starts of a run; None if nothing was logged."""
    spans: dict[str, float] = dict.fromkeys(SPANS, 0.0)
    for process in history.processes:
        for name, value in process.spans().items():
            spans[name] = spans.get(name, 0.0) + value
    failed = [process.gap_seconds for process in history.processes if process.follows_failure]
    if failed:
        spans[RESTARTING] = sum(failed)
    total = sum(spans.values())
    if not total:
        return None
    remarks = []
    if history.repeated_steps:
        remarks.append(
            f"{plural(history.repeated_steps, 'step')} of these, {seconds(history.repeated_seconds)}, were trained "
            f"again after restarts, as far as they had been logged."
        )
    if any(process.end is None for process in history.processes):
        remarks.append("A start without an end line counts with its logged intervals, evaluations and saves.")
        if history.epochs and not any("evaluation_seconds" in epoch for epoch in history.epochs.values()):
            remarks.append("The duration of the evaluations was not recorded.")
    if not spans["evaluation"]:
        del spans["evaluation"]
    meanings, largest = SPANS | {RESTARTING: "from the last line to the resume"}, max(spans.values())
    rows = [
        Row(name, meanings.get(name, ""), seconds(value), value / total, value / largest)
        for name, value in spans.items()
    ]
    return Breakdown(rows, seconds(total), remarks)


def memory_breakdown(peaks: Sequence[int]) -> Breakdown | None:
    """Return the peak memory of each rank in bytes; of more than `MOST_RANKS`, the highest."""
    if not peaks:
        return None
    ranks, remarks = list(range(len(peaks))), []
    if len(peaks) > MOST_RANKS:
        ranks = sorted(ranks, key=lambda rank: -peaks[rank])[:RANKS_SHOWN_OF_MANY]
        remarks = [
            f"{len(peaks)} ranks: the lowest peak is {size(min(peaks))}, the median {size(statistics.median(peaks))}, "
            f"the highest {size(max(peaks))}. The {RANKS_SHOWN_OF_MANY} highest are shown."
        ]
    total = sum(peaks)
    rows = [
        Row(f"rank {rank}", "", size(peaks[rank]), peaks[rank] / max(total, 1), peaks[rank] / max(*peaks, 1))
        for rank in ranks
    ]
    return Breakdown(rows, size(total), remarks)
