"""Reads a run's folder: its JSON files, and metrics.jsonl as curves without repeated steps."""

from __future__ import annotations

import bisect
import json
import math
from array import array
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from zerovision.delivery.calibration import Calibration, read_calibration
from zerovision.delivery.trained_model import read_json
from zerovision.training.base.errors import UserError
from zerovision.training.base.points import best_epoch, has_top5
from zerovision.training.base.run_folder import (
    BATCH_SIZE,
    CONFIG,
    ENVIRONMENT,
    EVALUATION,
    LEARNING_RATE,
    METRICS,
    SCORES,
    TEST_EVALUATION,
    WEIGHTS,
)
from zerovision.training.engines.settings import WAYS

CURVES = ("loss", "learning_rate", "images_per_second", "gradient_norm")
# Measured on rank 0; logged only by some versions and on some devices.
SYSTEM = ("memory_bytes", "memory_allocated_bytes", "gpu_utilization", "data_wait_share", "disk_free_bytes")
CPUS = ("lowest_cpu_utilization", "highest_cpu_utilization")  # the extremes among the machines
EVENTS = ("skipped_step", "wrong_gradient", "checkpoint_failed", "slow_rank", "diverged", "gave_up")
EPOCH_NUMBERS = ("train_loss", "train_top1", "val_loss", "val_top1", "val_top5")


@dataclass
class Process:
    """One start of a run; its `logged_seconds` include the evaluations and saves between the logged intervals."""

    logged_seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))  # of each span
    end: dict[str, Any] | None = None  # the `end` line; None if the process did not log one
    gap_seconds: float = 0.0  # from the last line of the previous process to the first line of this process
    follows_failure: bool = False  # whether the previous process has no `end` line

    def spans(self) -> dict[str, float]:
        """Return the seconds of each span, taken from the `end` line if the process logged one."""
        if self.end is None:
            return dict(self.logged_seconds)
        spans = {name: share * self.end["seconds"] for name, share in self.end["time_shares"].items()}
        return spans | {"evaluation": self.end["evaluation_seconds"]}


class History:
    """The lines of metrics.jsonl: curves use the latest line of each step, and times are summed over all lines.

    `columns` contains the values at `steps`, or NaN, for each name in `CURVES`, `SYSTEM` and `CPUS`; also the numbers
    of steps and seconds in the interval before each step in `steps`.
    """

    def __init__(self) -> None:
        self.steps = array("q")  # the optimizer step of each logging point, in ascending order
        self.columns = {name: array("d") for name in (*CURVES, *SYSTEM, *CPUS, "interval_steps", "interval_seconds")}
        self.epochs: dict[int, dict[str, Any]] = {}  # the line of each epoch, by epoch number
        self.events: list[dict[str, Any]] = []  # of the kinds in `EVENTS` and `resume`, in the order they were written
        self.checkpoints: list[dict[str, Any]] = []  # lines about saved checkpoints
        self.pipeline: dict[str, Any] | None = None  # the latest line about the stages of a pipeline
        self.rounds: dict[int, dict[str, Any]] = {}  # lines about outer steps of islands, by round number
        self.processes = [Process()]  # one for each start of the run
        self.repeated_steps = 0  # logged steps that were repeated after restarts
        self.repeated_seconds = self.logged_seconds = self.logged_images = 0.0  # `logged_` includes what was repeated
        self.memory_bytes_per_rank: list[int] = []  # peaks; before the first epoch ends, only rank 0's
        self.first_time: float | None = None  # Unix time of the first line in seconds; None if nothing was logged
        self.last_time: float | None = None  # of the last line
        self.last_kind = ""  # of the last line; '' if nothing was logged
        self.steps_per_epoch = self.total_steps = 0  # in the latest `step` line; 0 before the first one
        self._last_step = 0
        self._gap_seconds: float | None = None  # before a start that has logged only `resume`

    def add(self, line: dict[str, Any]) -> None:
        """Add the next line, ignoring unknown kinds; `read_history` catches what a missing or wrong value raises."""
        when, kind = float(line["time"]), line["kind"]
        if self._gap_seconds is not None and kind in ("step", "epoch", "end"):
            self._start_process(self._gap_seconds)
        match kind:
            case "step":
                self._add_step(line)
            case "epoch":
                self._add_epoch(line)
            case "resume":
                self._forget_after(int(line["step"]))
                # A process that finds nothing left to train logs only this line, and does not count as a start.
                if self.last_time is not None:
                    self._gap_seconds = (self._gap_seconds or 0.0) + max(when - self.last_time, 0.0)
                self.events.append(line)
            case "checkpoint":
                self.checkpoints.append(line)
                # Within an epoch, the stall is part of a logged interval.
                if self.steps_per_epoch and int(line["step"]) % self.steps_per_epoch == 0:
                    self.processes[-1].logged_seconds["saving"] += float(line["stall_seconds"])
            case "pipeline":
                stages = [float(share) for share in line["stage_shares"]]
                self.pipeline = line | {"stage_shares": stages, "wait_share": float(line["wait_share"])}
            case "outer_step":
                counts = {name: int(line.get(name, 0)) for name in ("islands", "sent_bytes")}
                self.rounds[int(line["round"])] = line | counts
            case "end":
                numbers = {name: float(line[name]) for name in ("seconds", "evaluation_seconds")}
                shares = {name: float(share) for name, share in line["time_shares"].items()}
                self.processes[-1].end = line | numbers | {"step": int(line["step"]), "time_shares": shares}
                self._add_memory(line["memory_bytes_per_rank"])
            case _ if kind in EVENTS:
                self.events.append(line)
        self.first_time = when if self.first_time is None else self.first_time
        self.last_time, self.last_kind = when, kind

    @property
    def last_step(self) -> int:
        """The step of the last logging point; 0 before the first logging point."""
        return self.steps[-1] if self.steps else 0

    @property
    def best_epoch(self) -> Mapping[str, Any] | None:
        """The line of the best epoch; None if there is no best epoch."""
        return best_epoch(self.epochs.values())

    def _add_step(self, line: dict[str, Any]) -> None:
        step, seconds = int(line["step"]), float(line["seconds"])
        values = {name: float(line[name]) for name in CURVES}
        values |= {name: math.nan if line.get(name) is None else float(line[name]) for name in SYSTEM}
        cpus = sorted(map(float, line.get("cpu_utilization", {}).values())) or [math.nan]
        values |= dict(zip(CPUS, (cpus[0], cpus[-1]), strict=True))
        self.steps_per_epoch, self.total_steps = int(line["steps_per_epoch"]), int(line["total_steps"])
        went_back = step <= self._last_step
        if went_back:  # restarted without a checkpoint, so there was no `resume` line with the step
            self._forget_after((int(line["epoch"]) - 1) * self.steps_per_epoch)
        steps = max(step - self._last_step, 1)
        if went_back and self.last_time is not None:
            self._start_process(max(float(line["time"]) - seconds - self.last_time, 0.0))
        for name, share in line["time_shares"].items():
            self.processes[-1].logged_seconds[name] += seconds * float(share)
        self.logged_images += float(line["images_per_second"]) * seconds
        self.logged_seconds += seconds
        self.steps.append(step)
        for name, value in (values | {"interval_steps": steps, "interval_seconds": seconds}).items():
            self.columns[name].append(value)
        self._last_step = step
        if len(self.memory_bytes_per_rank) < 2:
            self._add_memory([line["memory_bytes"]])

    def _add_epoch(self, line: dict[str, Any]) -> None:
        numbers = {name: math.nan if line[name] is None else float(line[name]) for name in EPOCH_NUMBERS}
        counts = {name: int(float(line[name])) for name in ("epoch", "step")}
        self.epochs[counts["epoch"]] = line | numbers | counts
        self.processes[-1].logged_seconds["evaluation"] += float(line["evaluation_seconds"])
        self._add_memory(line["memory_bytes_per_rank"])

    def _start_process(self, gap_seconds: float) -> None:
        self.processes.append(Process(gap_seconds=gap_seconds, follows_failure=self.processes[-1].end is None))
        self._gap_seconds = None

    def _forget_after(self, step: int) -> None:
        """Drop the logging points and epochs after a step, because training is repeated from there."""
        keep = bisect.bisect_right(self.steps, step)
        for place in range(keep, len(self.steps)):
            steps = self.columns["interval_steps"][place]
            again = min(self.steps[place] - step, int(steps))
            self.repeated_steps += again
            self.repeated_seconds += self.columns["interval_seconds"][place] * again / steps
        del self.steps[keep:]
        for column in self.columns.values():
            del column[keep:]
        self.epochs = {epoch: line for epoch, line in self.epochs.items() if line["step"] <= step}
        self._last_step = step

    def _add_memory(self, peaks: Iterable[float]) -> None:
        """Keep the highest peak of each rank, or the latest peaks if the number of ranks changed."""
        new = [int(peak) for peak in peaks]
        if len(new) == len(self.memory_bytes_per_rank):
            new = [max(pair) for pair in zip(new, self.memory_bytes_per_rank, strict=True)]
        self.memory_bytes_per_rank = new or self.memory_bytes_per_rank


def read_history(path: Path) -> History:
    """Read metrics.jsonl, ignoring an unfinished last line, or raise a UserError if it is damaged or cannot be read."""
    history = History()
    try:
        with path.open("rb") as stream:
            for number, line in enumerate(stream, start=1):  # noqa: B007
                if line.endswith(b"\n") and line.strip():
                    content = json.loads(line)
                    if not isinstance(content, dict):
                        raise ValueError("it is not a JSON object")
                    history.add(content)
    except OSError as error:
        raise UserError(f"'{path}' cannot be read: {error.strerror}.") from None
    except (KeyError, ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        reason = f"{error} is missing" if isinstance(error, KeyError) else error
        raise UserError(
            f"{path}, line {number}, is damaged ({reason}). Remove the line, or restore the file."
        ) from None
    return history


@dataclass(frozen=True)
class RunFiles:
    """The contents of a run's folder."""

    folder: Path
    config: dict[str, Any]  # of config.json; empty if the file is missing
    environment: dict[str, Any]  # of environment.json; empty if the file is missing
    history: History  # of metrics.jsonl
    scores: dict[str, Any] | None  # of evaluation/scores.json; None if the file is missing
    rate_search: dict[str, Any] | None  # of learning_rate.json; None if there was no search
    parameters: int | None  # number of values in the weights file, including BatchNorm buffers; None if it is missing
    notes: list[str]  # a sentence for each missing file
    batch_search: dict[str, Any] | None = None  # of batch_size.json; None if there was no search
    test_scores: dict[str, Any] | None = None  # None if the test part was not evaluated
    calibration: Calibration | None = None  # None if the weights are not calibrated


def names_of(folders: Sequence[Path]) -> list[str]:
    """Return the name of each run, or its folder if several runs have the same name."""
    names = [folder.name for folder in folders]
    return [str(folder) if names.count(name) > 1 else name for name, folder in zip(names, folders, strict=True)]


def read_run(folder: Path) -> RunFiles:
    """Read a run's folder, or raise a UserError if a file is damaged."""
    config, environment, scores, test, rates, batch = (
        read_json(folder / name) if (folder / name).exists() else None
        for name in (
            CONFIG,
            ENVIRONMENT,
            f"{EVALUATION}/{SCORES}",
            f"{TEST_EVALUATION}/{SCORES}",
            LEARNING_RATE,
            BATCH_SIZE,
        )
    )
    metrics, parameters = folder / METRICS, _count_parameters(folder / WEIGHTS)
    history = read_history(metrics) if metrics.is_file() else History()
    known = scores if isinstance(scores, dict) and isinstance(scores.get("classes"), list) else None
    if known and not has_top5(known):
        for line in history.epochs.values():
            line.pop("val_top5", None)
    notes = []
    if environment is None:
        notes.append("environment.json is missing: command, versions and hardware are unknown.")
    if not metrics.is_file():
        notes.append("metrics.jsonl is missing: there are no curves and no timings.")
    if scores is None and history.epochs:
        notes.append(
            "evaluation/scores.json is missing: there are no scores per class. scripts/evaluate.py computes them."
        )
    calibration = read_calibration(folder / WEIGHTS) if parameters is not None else None
    found = (rates, parameters, notes, batch, test, calibration)
    return RunFiles(folder, config or {}, environment or {}, history, scores, *found)


def count_global_batch(config: Mapping[str, Any], environment: Mapping[str, Any]) -> int | None:
    """Return the number of images per optimizer step over all ranks; None if a factor is unknown."""
    factors = (config.get("batch_size"), config.get("gradient_accumulation_steps", 1), environment.get("ranks"))
    shared_by = [config.get(way.flag, 1) for way in WAYS if way.division]
    if not all(isinstance(factor, int) and factor > 0 for factor in (*factors, *shared_by)):
        return None
    return math.prod(factors) // math.prod(shared_by)


def _count_parameters(path: Path) -> int | None:
    try:
        with safe_open(path, framework="numpy") as weights:
            return sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118
    except (OSError, SafetensorError):
        return None
