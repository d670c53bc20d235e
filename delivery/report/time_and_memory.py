"""Where a run's time and memory went."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

from delivery.report.formatting import plural, seconds, size
from delivery.report.history import History

SPANS = {
    "data": "waiting for images",
    "forward": "the model and its loss",
    "backward": "gradients",
    "communication": "collectives, and waiting for late ranks",
    "optimizer": "the update",
    "logging": "scores, log files, console",
    "saving": "standing still for checkpoints",
    "other": "the rest of the loop",
    "evaluation": "the validation images",
}
BETWEEN = "restarting"
MOST_RANKS = 64
RANKS_SHOWN_OF_MANY = 8


@dataclass(frozen=True)
class Part:
    """A part of the time, or the memory of a rank: its name, what it is, how much, and its share of the largest."""

    name: str
    meaning: str
    text: str
    share_of_all: float
    share_of_largest: float


@dataclass(frozen=True)
class Spending:
    """Parts of a whole, and sentences about it."""

    parts: list[Part]
    total: str
    remarks: list[str]


def spend_time(history: History) -> Spending | None:
    """Return where the time of all starts of a run went; None where nothing was logged."""
    spans: dict[str, float] = dict.fromkeys(SPANS, 0.0)
    for process in history.processes:
        for name, value in process.spans().items():
            spans[name] = spans.get(name, 0.0) + value
    failed = [process.gap_seconds for process in history.processes if process.after_a_failure]
    if failed:
        spans[BETWEEN] = sum(failed)
    total = sum(spans.values())
    if not total:
        return None
    remarks = _remarks(history)
    if not spans["evaluation"]:
        del spans["evaluation"]
    meanings = SPANS | {BETWEEN: "from the last line to the resume"}
    largest = max(spans.values())
    parts = [
        Part(name, meanings.get(name, ""), seconds(value), value / total, value / largest)
        for name, value in spans.items()
    ]
    return Spending(parts, seconds(total), remarks)


def spend_memory(history: History) -> Spending | None:
    """Return the peak memory of each rank; of many ranks, those with the most."""
    peaks = history.memory_bytes_per_rank
    if not peaks:
        return None
    order = list(range(len(peaks)))
    remarks = []
    if len(peaks) > MOST_RANKS:
        order = sorted(order, key=lambda rank: -peaks[rank])[:RANKS_SHOWN_OF_MANY]
        remarks = [
            f"{len(peaks)} ranks: the lowest peak is {size(min(peaks))}, the median {size(statistics.median(peaks))}, "
            f"the highest {size(max(peaks))}. Shown are the {RANKS_SHOWN_OF_MANY} highest."
        ]
    total = sum(peaks)
    parts = [
        Part(f"rank {rank}", "", size(peaks[rank]), peaks[rank] / max(total, 1), peaks[rank] / max(*peaks, 1))
        for rank in order
    ]
    return Spending(parts, size(total), remarks)


def _remarks(history: History) -> list[str]:
    remarks = []
    if history.repeated_steps:
        remarks.append(
            f"{plural(history.repeated_steps, 'step')} of these, {seconds(history.repeated_seconds)}, were trained "
            f"again after restarts, as far as they had been logged."
        )
    if any(process.end is None for process in history.processes):
        remarks.append("Of a start without an end line, the logged intervals count, the evaluations and the saves.")
        if history.epochs and not any("evaluation_seconds" in epoch for epoch in history.epochs.values()):
            remarks.append("How long the evaluations took was not recorded.")
    return remarks
