"""The console: messages, and progress as a bar on a terminal or plain lines elsewhere, unless it is switched off."""

from __future__ import annotations

import time
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from training.observe.loggers import EpochPoint, RunPoint, StepPoint, epoch_line, run_lines, step_line
from training.observe.units import format_duration

SECONDS_BETWEEN_LINES = 10.0


class ConsoleLogger:
    """Writes to standard output; `mode` is 'auto', 'bar', 'lines', or 'off' for messages alone."""

    def __init__(self, mode: str) -> None:
        self._console = Console(highlight=False, soft_wrap=True, force_terminal=True if mode == "bar" else None)
        self._use_bar = self._console.is_terminal and mode != "lines"
        self._is_quiet = mode == "off"
        self._progress: Progress | None = None
        self._last_line_at = time.monotonic()

    def on_message(self, message: str) -> None:
        """Print the line, above the bar where there is one."""
        self._console.print(message, markup=False)

    def on_event(self, kind: str, values: dict[str, Any]) -> None:
        """Events have messages of their own."""

    def on_images(self, images: torch.Tensor) -> None:
        """Images have no place on a console."""

    def on_steps(self, point: StepPoint) -> None:
        """Move the bar, or print a line once in ten seconds."""
        if self._is_quiet:
            return
        if not self._use_bar:
            if time.monotonic() - self._last_line_at >= SECONDS_BETWEEN_LINES:
                self.on_message(step_line(point))
                self._last_line_at = time.monotonic()
            return
        if self._progress is None:
            self._progress = self._start_bar(point.steps_per_epoch)
        done = point.step % point.steps_per_epoch or point.steps_per_epoch
        self._progress.update(
            self._progress.task_ids[0],
            completed=done,
            epoch=point.epoch,
            loss=point.loss,
            rate=point.learning_rate,
            speed=point.images_per_second,
            wait=point.data_wait_share,
            left=format_duration(point.seconds_left),
        )

    def on_epoch(self, point: EpochPoint) -> None:
        """Take the bar away and print the epoch's line."""
        self._stop_bar()
        if not self._is_quiet:
            self.on_message(epoch_line(point))

    def on_end(self, point: RunPoint) -> None:
        """Print where the time went."""
        for line in run_lines(point):
            self.on_message(line)

    def close(self) -> None:
        """Leave the terminal as it was."""
        self._stop_bar()

    def _start_bar(self, steps_per_epoch: int) -> Progress:
        columns = (
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(bar_width=24),
            TextColumn("{task.completed}/{task.total}"),
            TextColumn("loss {task.fields[loss]:.4f}"),
            TextColumn("lr {task.fields[rate]:.3g}"),
            TextColumn("{task.fields[speed]:.0f} images/s"),
            TextColumn("data wait {task.fields[wait]:.1%}"),
            TextColumn("left {task.fields[left]}"),
        )
        progress = Progress(*columns, console=self._console, transient=True, refresh_per_second=4)
        progress.add_task("train", total=steps_per_epoch, epoch=0, loss=0.0, rate=0.0, speed=0.0, wait=0.0, left="?")
        progress.start()
        return progress

    def _stop_bar(self) -> None:
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
