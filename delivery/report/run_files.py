"""Reads what a run has left in its folder; what is missing is said in words."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from delivery.report.history import History, read_history
from training.errors import UserError
from training.observe.run_folder import CONFIG, ENVIRONMENT, EVALUATION, METRICS, SCORES, WEIGHTS, WORST

HEADER_LENGTH_BYTES = 8  # of a safetensors file
LONGEST_HEADER_BYTES = 100_000_000  # as in the safetensors library


@dataclass(frozen=True)
class RunFiles:
    """A run's folder as it was read.

    Attributes:
        folder: the run's own.
        config, environment: the JSON objects; empty where the file is missing.
        history: of metrics.jsonl.
        scores: evaluation/scores.json, None where it is missing.
        parameters: numbers in the weights file, those of BatchNorm among them; None where it is missing.
        notes: a sentence for each file that is missing.
    """

    folder: Path
    config: dict[str, Any]
    environment: dict[str, Any]
    history: History
    scores: dict[str, Any] | None
    parameters: int | None
    notes: list[str]

    @property
    def worst_pictures(self) -> Path:
        """The folder of the pictures of `scores["worst"]`, 000.png and on."""
        return self.folder / EVALUATION / WORST


def read_run(folder: Path) -> RunFiles:
    """Read a run's folder.

    Raises:
        UserError: where a file that is there is damaged.
    """
    config = _read_json(folder / CONFIG)
    environment = _read_json(folder / ENVIRONMENT)
    scores = _read_json(folder / EVALUATION / SCORES)
    metrics = folder / METRICS
    global_batch = count_global_batch(config or {}, environment or {})
    history = read_history(metrics, global_batch) if metrics.is_file() else History(global_batch)
    notes = []
    if environment is None:
        notes.append("environment.json is missing: the command, the versions and the hardware are not known.")
    if not metrics.is_file():
        notes.append("metrics.jsonl is missing: there are no curves, and it is not known where the time went.")
    elif global_batch is None:
        notes.append("The global batch is not known, so the times of the intervals are not either.")
    if scores is None and history.epochs:
        notes.append(
            "evaluation/scores.json is missing: there is nothing about single classes. "
            "scripts/evaluate.py writes such files from the weights."
        )
    parameters = _count_parameters(folder / WEIGHTS)
    return RunFiles(folder, config or {}, environment or {}, history, scores, parameters, notes)


def count_global_batch(config: Mapping[str, Any], environment: Mapping[str, Any]) -> int | None:
    """Return the images of one optimizer step over all ranks, None where something of it is not known."""
    factors = (config.get("batch_size"), config.get("gradient_accumulation_steps", 1), environment.get("ranks"))
    if not all(isinstance(factor, int) and factor > 0 for factor in factors):
        return None
    batch_size, accumulation_steps, ranks = factors
    return batch_size * accumulation_steps * ranks


def _read_json(path: Path) -> dict[str, Any] | None:
    """Return a file's JSON object, None where there is no file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"'{path}' cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"'{path}' is damaged: {error}. Restore it, or remove it.") from None
    if not isinstance(content, dict):
        raise UserError(f"'{path}' is damaged: it holds no JSON object. Restore it, or remove it.")
    return content


def _count_parameters(path: Path) -> int | None:
    """Count the numbers in a safetensors file by its header; None where there is no such file."""
    try:
        with path.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(HEADER_LENGTH_BYTES))
            header = json.loads(stream.read(min(length, LONGEST_HEADER_BYTES)))
        return sum(_product(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error, RecursionError):
        return None


def _product(shape: list[int]) -> int:
    result = 1
    for length in shape:
        result *= length
    return result
