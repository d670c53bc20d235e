"""A logger of your own: `--plugin examples/own_logger.py --loggers tensorboard,csv` writes epochs.csv."""

from __future__ import annotations

import csv
from typing import Any

from zerovision import LOGGERS, EpochPoint, RunFolder, RunLogger


class CsvLogger(RunLogger):
    """Writes a line for each epoch into the run's folder; rank 0 alone has one."""

    def __init__(self, folder: RunFolder, settings: dict[str, Any], facts: dict[str, Any], first_step: int) -> None:
        """Open the file; a run that goes on from a step has its lines already."""
        self._file = (folder.path / "epochs.csv").open("a" if first_step else "w", newline="", encoding="utf-8")

    def epoch(self, point: EpochPoint) -> None:
        """Write what an epoch has given."""
        csv.writer(self._file).writerow([point.epoch, point.train_loss, point.validation.loss, point.validation.top1])
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


LOGGERS["csv"] = CsvLogger
