"""What metrics.jsonl tells of a run: the curves that hold, and where all of its time went."""

from __future__ import annotations

import bisect
import json
import math
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from training.errors import UserError

CURVES = ("loss", "learning_rate", "images_per_second", "gradient_norm")
EVENTS = ("skipped_step", "checkpoint_failed", "slow_rank", "slow_link", "diverged", "gave_up")
EPOCH_NUMBERS = ("train_loss", "train_top1", "val_loss", "val_top1", "val_top5", "evaluation_seconds")


@dataclass
class Process:
    """The time of a run from one start to the next.

    Attributes:
        seconds: of each span in the logged intervals, and of evaluations and saves between them.
        end: the `end` line, None where there is none.
        gap_seconds: from the last sign of the process before to the first of this one.
        after_a_failure: whether the process before has no `end` line.
    """

    seconds: dict[str, float] = field(default_factory=dict)
    end: dict[str, Any] | None = None
    gap_seconds: float = 0.0
    after_a_failure: bool = False

    def add(self, span: str, seconds: float) -> None:
        """Add time to a span."""
        self.seconds[span] = self.seconds.get(span, 0.0) + seconds

    def spans(self) -> dict[str, float]:
        """Return the seconds of each span: those of the `end` line, which leave nothing out, where there is one."""
        if self.end is None:
            return dict(self.seconds)
        spans = {name: share * self.end["seconds"] for name, share in self.end["time_shares"].items()}
        return spans | {"evaluation": self.end["evaluation_seconds"]}


class History:
    """A run's numbers; the later line of a step holds, and every line counts for the time.

    Attributes:
        steps: the optimizer step of each logging point that holds, ascending.
        columns: of each name in `CURVES`, the values at `steps`.
        epochs: the line of each epoch.
        events: lines of the kinds in `EVENTS` and `resume`, in the order they were written.
        checkpoints: the lines of saved checkpoints.
        processes: one for each start of the run.
        repeated_steps, repeated_seconds: what was trained again after restarts, as far as it was logged.
        logged_images, logged_seconds: of all logged intervals, repeated ones too.
        memory_bytes_per_rank: the peak of each rank; of rank 0 alone in runs before zerovision kept them all.
        first_time, last_time: Unix seconds of the first and the last line, None where there is none.
        last_kind: of the last line, empty where there is none.
        steps_per_epoch, total_steps: as the latest line says, 0 where none does.
    """

    def __init__(self, global_batch: int | None) -> None:
        """Begin with no line.

        Args:
            global_batch: images of an optimizer step over all ranks; None where it is not known: no interval then
                has a length.
        """
        self.steps = array("q")
        self.columns = {name: array("d") for name in CURVES}
        self.epochs: dict[int, dict[str, Any]] = {}
        self.events: list[dict[str, Any]] = []
        self.checkpoints: list[dict[str, Any]] = []
        self.processes = [Process()]
        self.repeated_steps = 0
        self.repeated_seconds = 0.0
        self.logged_images = 0
        self.logged_seconds = 0.0
        self.memory_bytes_per_rank: list[int] = []
        self.first_time: float | None = None
        self.last_time: float | None = None
        self.last_kind = ""
        self.steps_per_epoch = self.total_steps = 0
        self._global_batch = global_batch
        self._interval_seconds = array("d")
        self._interval_steps = array("q")
        self._last_step = 0
        self._readers: dict[str, Callable[[dict[str, Any]], None]] = {
            "step": self._add_step,
            "epoch": self._add_epoch,
            "resume": self._add_resume,
            "checkpoint": self._add_checkpoint,
            "end": self._add_end,
            **dict.fromkeys(EVENTS, self.events.append),
        }

    def add(self, line: dict[str, Any]) -> None:
        """Take the next line; kinds that are not known are passed over.

        Raises:
            KeyError, TypeError, ValueError: for a line that lacks something, or holds what is no number.
        """
        when = float(line["time"])
        if line["kind"] in self._readers:
            self._readers[line["kind"]](line)
        self.first_time = when if self.first_time is None else self.first_time
        self.last_time, self.last_kind = when, line["kind"]

    @property
    def last_step(self) -> int:
        """The step of the last logging point that holds, 0 before the first."""
        return self.steps[-1] if self.steps else 0

    @property
    def best_epoch(self) -> dict[str, Any] | None:
        """The first of the sound epochs with the highest validation top-1, None before the first."""
        sound = (epoch for epoch in self.epochs.values() if not epoch.get("diverged"))
        return max(sound, key=lambda epoch: (epoch["val_top1"], -epoch["epoch"]), default=None)

    @property
    def divergence(self) -> str:
        """Why the last epoch counts as diverged, empty if it does not."""
        return str(self.epochs[max(self.epochs)].get("diverged") or "") if self.epochs else ""

    def _add_step(self, line: dict[str, Any]) -> None:
        step = int(line["step"])
        self.steps_per_epoch, self.total_steps = int(line["steps_per_epoch"]), int(line["total_steps"])
        speed, values = float(line["images_per_second"]), [float(line[name]) for name in CURVES]
        went_back = step <= self._last_step
        if went_back:  # the run began anew without a checkpoint: no `resume` line tells where
            self._forget_after((int(line["epoch"]) - 1) * self.steps_per_epoch)
        steps = max(step - self._last_step, 1)
        seconds = steps * self._global_batch / speed if self._global_batch and speed > 0 else 0.0
        if went_back:
            self._begin_process(float(line["time"]) - seconds)
        for name, share in line.get("time_shares", {}).items():
            self.processes[-1].add(name, seconds * float(share))
        if seconds:
            self.logged_images += steps * (self._global_batch or 0)
            self.logged_seconds += seconds
        self.steps.append(step)
        for name, value in zip(CURVES, values, strict=True):
            self.columns[name].append(value)
        self._interval_seconds.append(seconds)
        self._interval_steps.append(steps)
        self._last_step = step
        if "memory_bytes" in line and len(self.memory_bytes_per_rank) < 2:
            self._note_memory([line["memory_bytes"]])

    def _add_epoch(self, line: dict[str, Any]) -> None:
        numbers = {name: float(line[name]) for name in EPOCH_NUMBERS if name in line}
        if missing := [name for name in EPOCH_NUMBERS[:-1] if name not in numbers]:
            raise KeyError(missing[0])
        counts = {name: int(line[name]) for name in ("epoch", "step")}
        self.epochs[counts["epoch"]] = line | numbers | counts
        self.processes[-1].add("evaluation", numbers.get("evaluation_seconds", 0.0))
        self._note_memory(line.get("memory_bytes_per_rank", []))

    def _add_resume(self, line: dict[str, Any]) -> None:
        self._forget_after(int(line["step"]))
        self._begin_process(float(line["time"]))
        self.events.append(line)

    def _add_checkpoint(self, line: dict[str, Any]) -> None:
        self.checkpoints.append(line)
        if self.steps_per_epoch and int(line["step"]) % self.steps_per_epoch == 0:
            # Within an epoch the interval has it already.
            self.processes[-1].add("saving", float(line["stall_seconds"]))

    def _add_end(self, line: dict[str, Any]) -> None:
        numbers = {name: float(line[name]) for name in ("seconds", "evaluation_seconds")}
        shares = {name: float(share) for name, share in line["time_shares"].items()}
        self.processes[-1].end = line | numbers | {"step": int(line["step"]), "time_shares": shares}
        self._note_memory(line.get("memory_bytes_per_rank", []))

    def _begin_process(self, when: float) -> None:
        if self.last_time is not None:
            gap, failed = max(when - self.last_time, 0.0), self.processes[-1].end is None
            self.processes.append(Process(gap_seconds=gap, after_a_failure=failed))

    def _forget_after(self, step: int) -> None:
        """Drop the logging points and epochs after a step: they were, or will be, trained again."""
        keep = bisect.bisect_right(self.steps, step)
        for place in range(keep, len(self.steps)):
            steps, seconds = self._interval_steps[place], self._interval_seconds[place]
            again = min(self.steps[place] - step, steps)
            self.repeated_steps += again
            self.repeated_seconds += seconds * again / steps
        columns: list[array] = [self.steps, self._interval_seconds, self._interval_steps, *self.columns.values()]
        for column in columns:
            del column[keep:]
        for epoch in [number for number, line in self.epochs.items() if int(line["step"]) > step]:
            del self.epochs[epoch]
        self._last_step = step

    def _note_memory(self, peaks: Iterable[float]) -> None:
        """Keep the highest of each rank's peaks; all of one number of ranks, the latest."""
        new = [int(peak) for peak in peaks]
        if len(new) == len(self.memory_bytes_per_rank):
            new = [max(pair) for pair in zip(new, self.memory_bytes_per_rank, strict=True)]
        self.memory_bytes_per_rank = new or self.memory_bytes_per_rank


def read_history(path: Path, global_batch: int | None) -> History:
    """Read metrics.jsonl; a last line that is not finished is passed over.

    Raises:
        UserError: where a line is damaged, or the file cannot be read.
    """
    history = History(global_batch)
    try:
        with path.open("rb") as stream:
            for number, line in enumerate(stream, start=1):
                if line.endswith(b"\n") and line.strip():
                    _take_in(history, line, f"{path}, line {number}")
    except OSError as error:
        raise UserError(f"'{path}' cannot be read: {error.strerror}.") from None
    return history


def _take_in(history: History, line: bytes, where: str) -> None:
    try:
        content = json.loads(line)
        if not isinstance(content, dict):
            raise ValueError("it is no JSON object")
        history.add(content)
    except KeyError as error:
        raise UserError(f"{where}: is damaged, {error} is missing. Remove the line, or restore the file.") from None
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise UserError(f"{where}: is damaged ({error}). Remove the line, or restore the file.") from None


def finite(values: Iterable[float | None]) -> list[float]:
    """Return those of the values that are finite numbers."""
    return [value for value in values if value is not None and math.isfinite(value)]
