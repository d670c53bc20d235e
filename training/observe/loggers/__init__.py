"""Where a run's numbers go: console, text log, JSON lines and TensorBoard, behind one small interface.

A new logger is one subclass of `RunLogger` and one line in `open_loggers`. Only rank 0 builds any.
"""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from training.checkpoint.atomic_write import write_json
from training.config import TrainConfig, save_config
from training.errors import printable
from training.observe.loggers.points import EpochPoint, RunPoint, StepPoint
from training.observe.run_folder import CONFIG, ENVIRONMENT, RunFolder

if TYPE_CHECKING:
    import torch


class RunLogger:
    """One destination of a run's numbers; a subclass overrides what it writes."""

    def message(self, message: str) -> None:
        """Log a line of text for people."""

    def event(self, kind: str, values: dict[str, Any]) -> None:
        """Log something that happened (a checkpoint, a skipped step, a resume) as numbers for programs."""

    def images(self, images: torch.Tensor) -> None:
        """Log a sample of augmented training images, float32 [N, 1 or 3, H, W] in 0..1."""

    def steps(self, point: StepPoint) -> None:
        """Log a logging point."""

    def epoch(self, point: EpochPoint) -> None:
        """Log the end of an epoch."""

    def end(self, point: RunPoint) -> None:
        """Log the end of the run."""

    def close(self) -> None:
        """Flush and release files."""


class Loggers(RunLogger):
    """Passes every call on to each logger in turn; on ranks other than 0 there are none.

    If a logger cannot write (a full disk), one line goes to stderr, and training continues.
    """

    def __init__(self, loggers: Sequence[RunLogger]) -> None:
        self._loggers = loggers
        self._failed: set[int] = set()

    def message(self, message: str) -> None:
        """Log a line of text; control characters in it (from names of files and classes) are escaped."""
        self._each("message", printable(message))

    def event(self, kind: str, values: dict[str, Any]) -> None:
        self._each("event", kind, values)

    def images(self, images: torch.Tensor) -> None:
        self._each("images", images)

    def steps(self, point: StepPoint) -> None:
        self._each("steps", point)

    def epoch(self, point: EpochPoint) -> None:
        self._each("epoch", point)

    def end(self, point: RunPoint) -> None:
        self._each("end", point)

    def close(self) -> None:
        self._each("close")

    def _each(self, method: str, *values: Any) -> None:
        for number, logger in enumerate(self._loggers):
            try:
                getattr(logger, method)(*values)
            except OSError as error:
                if number not in self._failed:
                    self._failed.add(number)
                    _warn_cannot_write(type(logger).__name__, error)


def open_loggers(
    config: TrainConfig, folder: RunFolder, facts: dict[str, Any], sharding: dict[str, Any], first_step: int
) -> Loggers:
    """Build rank 0's loggers and write the files that describe the run.

    Args:
        config: the run's configuration.
        folder: where the files go.
        facts: of `training.observe.environment.describe_run`.
        sharding: DeepSpeed's configuration of the run.
        first_step: the run's first step, 0 unless it resumes: steps from there on that were logged before are void.
    """
    from training.observe.loggers.text import ConsoleLogger, JsonLinesLogger, TextLogger

    destinations: list[RunLogger] = [TextLogger(folder), JsonLinesLogger(folder), ConsoleLogger(config.progress)]
    if config.tensorboard:
        from training.observe.loggers.tensorboard import TensorBoardLogger

        try:
            destinations.append(TensorBoardLogger(folder, dataclasses.asdict(config), facts, first_step))
        except OSError as error:
            _warn_cannot_write("TensorBoardLogger", error)
    loggers = Loggers(destinations)
    try:
        save_config(config, folder.path / CONFIG)
        write_json(folder.path / ENVIRONMENT, facts)
        write_json(folder.path / "deepspeed_config.json", sharding)
    except OSError as error:
        loggers.message(f"note: the run's description cannot be written: {error}")
    return loggers


def _warn_cannot_write(name: str, error: OSError) -> None:
    print(f"{name} cannot write ({error}): training continues without it", file=sys.stderr, flush=True)
