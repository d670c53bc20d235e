"""How the time and the memory of a run divide."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from delivery.report.formatting import plural
from delivery.report.history import History
from training.observe.units import format_bytes, format_duration

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
MEANINGS = SPANS | {"restarting": "from the last line to the resume"}
MOST_RANKS = 64
RANKS_SHOWN_OF_MANY = 8


class ShareRow(NamedTuple):
    """A span of time, or a rank: its value as text, its shares of the sum and of the largest value."""

    name: str
    meaning: str
    text: str
    share_of_total: float
    share_of_largest: float


class Breakdown(NamedTuple):
    """Rows that add up to a total, and remarks on them."""

    rows: list[ShareRow]
    total: str
    remarks: list[str]


def time_breakdown(history: History) -> Breakdown | None:
    """Return the time of each span over all starts of a run; None if nothing was logged."""
    spans: dict[str, float] = dict.fromkeys(SPANS, 0.0)
    for process in history.processes:
        for name, value in process.spans().items():
            spans[name] = spans.get(name, 0.0) + value
    if any(process.follows_failure for process in history.processes):
        spans["restarting"] = sum(process.gap_seconds for process in history.processes if process.follows_failure)
    if not spans["evaluation"]:
        del spans["evaluation"]
    remarks = []
    if history.repeated_steps:
        remarks.append(
            f"{plural(history.repeated_steps, 'step')} of these, {format_duration(history.repeated_seconds)}, were "
            "trained again after restarts, as far as they had been logged."
        )
    if any(process.end is None for process in history.processes):
        remarks.append("A start without an end line counts with its logged intervals, evaluations and saves.")
        if history.epochs and not any("evaluation_seconds" in epoch for epoch in history.epochs.values()):
            remarks.append("The duration of the evaluations was not recorded.")
    return _breakdown(spans, format_duration, remarks) if sum(spans.values()) else None


def memory_breakdown(peaks: Sequence[int]) -> Breakdown | None:
    """Return the peak memory of each rank in bytes; of more than `MOST_RANKS`, the highest."""
    if not peaks:
        return None
    ranks, remarks = list(range(len(peaks))), []
    if len(peaks) > MOST_RANKS:
        ranks = sorted(ranks, key=lambda rank: -peaks[rank])[:RANKS_SHOWN_OF_MANY]
        low, median, high = map(format_bytes, (min(peaks), statistics.median(peaks), max(peaks)))
        remarks = [
            f"{len(peaks)} ranks: the lowest peak is {low}, the median {median}, the highest {high}. "
            f"The {RANKS_SHOWN_OF_MANY} highest are shown."
        ]
    return _breakdown({f"rank {rank}": peaks[rank] for rank in ranks}, format_bytes, remarks)


def _breakdown(values: Mapping[str, float], text: Callable[[float], str], remarks: list[str]) -> Breakdown:
    total, largest = sum(values.values()) or 1, max(values.values()) or 1
    rows = [
        ShareRow(name, MEANINGS.get(name, ""), text(one), one / total, one / largest) for name, one in values.items()
    ]
    return Breakdown(rows, text(total), remarks)
