"""Read a run's folder."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from delivery.report.history import History, read_history
from training.errors import UserError
from training.observe.run_folder import CONFIG, ENVIRONMENT, EVALUATION, METRICS, SCORES, WEIGHTS, WORST


@dataclass(frozen=True)
class RunFiles:
    """The contents of a run's folder.

    Attributes:
        folder: the run's own.
        config, environment: the JSON objects; empty if the file is missing.
        history: of metrics.jsonl.
        scores: evaluation/scores.json, None if it is missing.
        parameters: the count of numbers in the weights file, BatchNorm buffers included; None if it is missing.
        notes: a sentence for each missing file.
    """

    folder: Path
    config: dict[str, Any]
    environment: dict[str, Any]
    history: History
    scores: dict[str, Any] | None
    parameters: int | None
    notes: list[str]

    @property
    def worst_images(self) -> Path:
        """The folder with the images of `scores["worst"]`, from 000.png on."""
        return self.folder / EVALUATION / WORST


def read_run(folder: Path) -> RunFiles:
    """Read a run's folder.

    Raises:
        UserError: if a file is damaged.
    """
    config = _read_json(folder / CONFIG) or {}
    environment = _read_json(folder / ENVIRONMENT)
    scores = _read_json(folder / EVALUATION / SCORES)
    metrics = folder / METRICS
    global_batch = count_global_batch(config, environment or {})
    history = read_history(metrics, global_batch) if metrics.is_file() else History(global_batch)
    notes = []
    if environment is None:
        notes.append("environment.json is missing: command, versions and hardware are unknown.")
    if not metrics.is_file():
        notes.append("metrics.jsonl is missing: there are no curves and no timings.")
    elif global_batch is None:
        notes.append("The global batch size is unknown, and so are the times of the logged intervals.")
    if scores is None and history.epochs:
        notes.append(
            "evaluation/scores.json is missing: there are no scores of single classes. "
            "scripts/evaluate.py writes such files from the weights."
        )
    return RunFiles(folder, config, environment or {}, history, scores, _count_parameters(folder / WEIGHTS), notes)


def count_global_batch(config: Mapping[str, Any], environment: Mapping[str, Any]) -> int | None:
    """Return the number of images of an optimizer step over all ranks, None if a factor of it is unknown."""
    factors = (config.get("batch_size"), config.get("gradient_accumulation_steps", 1), environment.get("ranks"))
    if not all(isinstance(factor, int) and factor > 0 for factor in factors):
        return None
    return math.prod(factors)


def _read_json(path: Path) -> dict[str, Any] | None:
    """Return a file's JSON object, None if there is no file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"'{path}' cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"'{path}' is damaged: {error}. Restore it, or remove it.") from None
    if not isinstance(content, dict):
        raise UserError(f"'{path}' is damaged: it is not a JSON object. Restore it, or remove it.")
    return content


def _count_parameters(path: Path) -> int | None:
    try:
        with safe_open(path, framework="numpy") as weights:
            return sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118
    except (OSError, SafetensorError):
        return None
