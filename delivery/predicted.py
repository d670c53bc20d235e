"""A run's memory as it was predicted, beside what was measured."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from training.base.run_folder import METRICS, PREDICTION
from training.base.units import format_bytes


class Comparison(NamedTuple):
    """A predicted and a measured value as text, and the first over the second."""

    predicted: str
    measured: str
    ratio: float


def compare_memory(folder: Path, end: Mapping[str, Any]) -> Comparison | None:
    """Return the peak of the largest rank, None if it was not predicted or not measured.

    Args:
        folder: of the run, with `PREDICTION`.
        end: the `end` line of its metrics.
    """
    try:
        predicted = json.loads((folder / PREDICTION).read_text(encoding="utf-8"))["memory_bytes"]["peak"]
    except (OSError, ValueError, LookupError, TypeError):
        return None
    measured = max(end.get("memory_bytes_per_rank") or [0])
    return Comparison(format_bytes(predicted), format_bytes(measured), predicted / measured) if measured else None


def prediction_line(folder: Path) -> str | None:
    """Return the line for a run's log, None if it has no prediction or no `end` line."""
    metrics = folder / METRICS
    lines = metrics.read_bytes().splitlines() if metrics.is_file() else []
    end = json.loads(lines[-1]) if lines else {}
    found = compare_memory(folder, end) if end.get("kind") == "end" else None
    if found is None:
        return None
    return f"predicted    memory of a rank {found.predicted} ({found.measured} measured, ratio {found.ratio:.2f})"
