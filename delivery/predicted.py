"""What was predicted of a run before its first step, beside what was measured."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from training.observe.run_folder import METRICS, PREDICTION
from training.observe.units import format_bytes, format_duration

STEP_SPANS = ("forward", "backward", "communication", "optimizer")


class Comparison(NamedTuple):
    """A predicted and a measured value as text, and the first over the second."""

    name: str
    predicted: str
    measured: str
    ratio: float


def compare_prediction(prediction: Mapping[str, Any], end: Mapping[str, Any], global_batch: int) -> list[Comparison]:
    """Return step time, training time and memory, as far as they were predicted and measured.

    Args:
        prediction: content of `PREDICTION`.
        end: the `end` line of metrics.jsonl, of one start of the run.
        global_batch: images of a step.
    """
    rows: list[tuple[str, float, float, Callable[[float], str]]] = []
    if speed := end.get("images_per_second"):
        busy = sum(end["time_shares"].get(name, 0.0) for name in STEP_SPANS)
        rows.append(("step", prediction["seconds"]["step"], busy * global_batch / speed, _milliseconds))
        steps = end["seconds"] * speed / global_batch
        if round(steps) == prediction["steps"]:
            rows.append(("training", 3600 * prediction["hours"], end["seconds"], format_duration))
    times = [
        Comparison(name, show(predicted), show(measured), predicted / measured)
        for name, predicted, measured, show in rows
        if measured
    ]
    memory = _compare_memory(prediction, end)
    return [*times, memory] if memory else times


def _compare_memory(prediction: Mapping[str, Any], end: Mapping[str, Any]) -> Comparison | None:
    peaks = end.get("memory_bytes_per_rank")
    if not peaks:
        return None
    predicted, measured = prediction["memory_bytes"]["peak"], max(peaks)
    return Comparison("memory of a rank", format_bytes(predicted), format_bytes(measured), predicted / measured)


def prediction_line(folder: Path) -> str | None:
    """Return the line for a run's log, None if it has no prediction or no `end` line.

    It has the memory alone: how long a step takes depends on who else computes on the machine.
    """
    prediction, metrics = read_prediction(folder), folder / METRICS
    lines = metrics.read_bytes().splitlines() if metrics.is_file() else []
    end = json.loads(lines[-1]) if lines else {}
    one = _compare_memory(prediction, end) if prediction and end.get("kind") == "end" else None
    return f"predicted    {one.name} {one.predicted} ({one.measured} measured, ratio {one.ratio:.2f})" if one else None


def read_prediction(folder: Path) -> dict[str, Any] | None:
    """Return what was predicted of a run, None if nothing was."""
    try:
        content = json.loads((folder / PREDICTION).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) and "memory_bytes" in content else None


def _milliseconds(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms" if seconds >= 0.1 else f"{1000 * seconds:.3g} ms"
