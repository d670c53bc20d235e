"""The console, and the loggers that write lines to it, to logs/training.log and to the run's metrics.jsonl."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from zerovision.training.base.points import (
    EpochPoint,
    RunLogger,
    RunPoint,
    StepPoint,
    epoch_line,
    flatten,
    run_lines,
    step_numbers,
)
from zerovision.training.base.run_folder import RunFolder


def open_console(*, stderr: bool = False, is_forced: bool = False) -> Console:
    """Return a console that writes plain lines to anything but a terminal.

    By default, rich also draws if FORCE_COLOR is set, as in notebooks and CI, and produces HTML in notebooks.

    Args:
        stderr: whether to write to standard error instead of standard output.
        is_forced: whether to treat the stream as a terminal.
    """
    stream = sys.stderr if stderr else sys.stdout
    is_terminal = stream is not None and stream.isatty()
    force = True if is_forced else None if is_terminal else False  # None: rich examines the terminal
    return Console(stderr=stderr, force_terminal=force, force_jupyter=False, highlight=False, markup=False, emoji=False)


SECONDS_BETWEEN_LINES = 10.0


class LineLogger(RunLogger):
    """Logs everything as lines of text."""

    def steps(self, point: StepPoint) -> None:
        position = f"epoch {point.epoch}  step {point.step_of_epoch}/{point.steps_per_epoch}"
        self.message(f"{position}  {step_numbers(point)}")

    def epoch(self, point: EpochPoint) -> None:
        self.message(epoch_line(point))

    def end(self, point: RunPoint) -> None:
        for line in run_lines(point):
            self.message(line)


class ConsoleLogger(LineLogger):
    """Prints messages, and progress as a bar on a terminal or as plain lines elsewhere."""

    def __init__(self, mode: str) -> None:  # 'auto', 'bar', 'lines', or 'off' for messages only
        self._console = open_console(is_forced=mode == "bar")
        self._use_bar = self._console.is_terminal and mode != "lines"
        self._is_quiet = mode == "off"
        self._bar: Progress | None = None
        self._last_line_at = time.monotonic()

    def message(self, message: str) -> None:
        """Print a message, above the progress bar if one is shown."""
        self._console.print(message, soft_wrap=True)

    def steps(self, point: StepPoint) -> None:
        """Update the progress bar, or print a line every ten seconds."""
        if self._is_quiet:
            return
        if not self._use_bar:
            if time.monotonic() - self._last_line_at >= SECONDS_BETWEEN_LINES:
                super().steps(point)
                self._last_line_at = time.monotonic()
            return
        if self._bar is None:
            columns = (
                TextColumn(f"epoch {point.epoch}"),
                BarColumn(bar_width=24),
                TextColumn("{task.completed}/{task.total}"),
                TextColumn("{task.description}"),
            )
            self._bar = Progress(*columns, console=self._console, transient=True, refresh_per_second=4)
            self._bar.add_task("", total=point.steps_per_epoch)
            self._bar.start()
        (task,) = self._bar.task_ids
        self._bar.update(task, completed=point.step_of_epoch, description=step_numbers(point))

    def epoch(self, point: EpochPoint) -> None:
        """Replace the progress bar with the epoch's line."""
        self.close()
        if not self._is_quiet:
            super().epoch(point)

    def close(self) -> None:
        """Remove the progress bar."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


class TextLogger(LineLogger):
    """Appends lines to logs/training.log, which all runs share; each line starts with the time and the run's name."""

    def __init__(self, folder: RunFolder) -> None:
        self._file = folder.text_log.open("a", encoding="utf-8", buffering=1)
        self._run_name = folder.name

    def message(self, message: str) -> None:
        self._file.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {self._run_name} {message}\n")

    def close(self) -> None:
        self._file.close()


class EventLogger(RunLogger):
    """Logs everything as events, including logging points ('step'), epochs ('epoch') and the run's end ('end')."""

    def steps(self, point: StepPoint) -> None:
        self.event("step", flatten(point))

    def epoch(self, point: EpochPoint) -> None:
        scores, nested = point.validation, ("validation", "summary", "class_names")
        values = {key: value for key, value in vars(point).items() if key not in nested} | point.summary._asdict()
        values |= {"val_loss": scores.loss, "val_top1": scores.top1, "val_top5": scores.top5}
        self.event("epoch", values | {"val_samples": scores.samples})

    def end(self, point: RunPoint) -> None:
        self.event("end", flatten(point))


class JsonLinesLogger(EventLogger):
    """Writes metrics.jsonl, one event per line; if a step appears twice after a resume, the later line is valid."""

    def __init__(self, folder: RunFolder) -> None:
        if folder.metrics.exists():  # a killed run may have left a partial line, which the next line would continue
            content = folder.metrics.read_bytes()
            if (end := content.rfind(b"\n") + 1) < len(content):
                os.truncate(folder.metrics, end)
        self._file = folder.metrics.open("a", encoding="utf-8", buffering=1)

    def event(self, kind: str, values: dict[str, Any]) -> None:
        self._file.write(json.dumps({"kind": kind, "time": round(time.time(), 3), **values}) + "\n")

    def close(self) -> None:
        self._file.close()
