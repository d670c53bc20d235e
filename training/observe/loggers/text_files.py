"""The files for people and for programs: logs/training.log and the run's metrics.jsonl."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch

from training.observe.loggers import EpochPoint, RunPoint, StepPoint, epoch_line, flat, run_lines, step_line
from training.observe.run_folder import RunFolder


class TextLogger:
    """Appends to logs/training.log, which all runs share, with time and run name before each line."""

    def __init__(self, folder: RunFolder) -> None:
        self._file = folder.text_log.open("a", encoding="utf-8", buffering=1)
        self._run_name = folder.name

    def on_message(self, message: str) -> None:
        """Write the line."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S")
        self._file.write(f"{stamp} {self._run_name} {message}\n")

    def on_event(self, kind: str, values: dict[str, Any]) -> None:
        """Events have messages of their own."""

    def on_images(self, images: torch.Tensor) -> None:
        """Images have no place in a text file."""

    def on_steps(self, point: StepPoint) -> None:
        """Write the logging point's line."""
        self.on_message(step_line(point))

    def on_epoch(self, point: EpochPoint) -> None:
        """Write the epoch's line."""
        self.on_message(epoch_line(point))

    def on_end(self, point: RunPoint) -> None:
        """Write where the time went."""
        for line in run_lines(point):
            self.on_message(line)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class JsonLinesLogger:
    """Writes metrics.jsonl: one JSON object per logging point ('kind': 'step'), epoch ('epoch'), event and run ('end').

    After a resume steps appear again: the later line of a step holds.
    """

    def __init__(self, folder: RunFolder) -> None:
        _cut_unfinished_line(folder.metrics)
        self._file = folder.metrics.open("a", encoding="utf-8", buffering=1)

    def on_message(self, message: str) -> None:
        """Text goes to training.log."""

    def on_event(self, kind: str, values: dict[str, Any]) -> None:
        """Write what happened."""
        self._write(kind, values)

    def on_images(self, images: torch.Tensor) -> None:
        """Images go to TensorBoard."""

    def on_steps(self, point: StepPoint) -> None:
        """Write the logging point with units in its names."""
        self._write("step", flat(point))

    def on_epoch(self, point: EpochPoint) -> None:
        """Write the epoch's exact numbers."""
        scores = point.validation
        values = {key: value for key, value in vars(point).items() if key not in ("validation", "class_names")}
        values |= {"val_loss": scores.loss, "val_top1": scores.top1, "val_top5": scores.top5}
        self._write("epoch", values | {"val_samples": scores.samples})

    def on_end(self, point: RunPoint) -> None:
        """Write the run's numbers."""
        self._write("end", flat(point))

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _write(self, kind: str, values: dict[str, Any]) -> None:
        self._file.write(json.dumps({"kind": kind, "time": round(time.time(), 3), **values}) + "\n")


def _cut_unfinished_line(path: Path) -> None:
    """Remove the half line that a killed run may have left: the next one would be glued to it."""
    if path.exists():
        content = path.read_bytes()
        end = content.rfind(b"\n") + 1
        if end < len(content):
            os.truncate(path, end)
