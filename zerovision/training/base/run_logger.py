"""The interface for a run's output: each destination is a subclass of `RunLogger`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partialmethod
from typing import TYPE_CHECKING, Any

from zerovision.training.base.errors import printable
from zerovision.training.base.places import as_typed
from zerovision.training.base.points import EpochPoint, RunPoint, StepPoint

if TYPE_CHECKING:
    import torch


class RunLogger:
    """One destination of a run's numbers; a subclass overrides what it writes."""

    def message(self, message: str) -> None:
        """Log a line of text for people."""

    def event(self, kind: str, values: dict[str, Any]) -> None:
        """Log an event (a checkpoint, a skipped step, a resume) as numbers for programs."""

    def images(self, images: torch.Tensor) -> None:
        """Log a sample of augmented training images, float32 [N, 1 or 3, H, W] in 0..1."""

    def steps(self, point: StepPoint) -> None:
        """Log a logging point."""

    def epoch(self, point: EpochPoint) -> None:
        """Log the end of an epoch."""

    def end(self, point: RunPoint) -> None:
        """Log the end of the run."""

    def delivered(self) -> None:
        """Take the complete run folder; called last, after report, evaluation and weights are written."""

    def close(self) -> None:
        """Flush and release files."""


class Loggers(RunLogger):
    """Passes every call to each logger in turn; only rank 0 has loggers.

    If a logger cannot write (a full disk), one line goes to stderr, and training continues.
    """

    def __init__(self, loggers: Sequence[RunLogger]) -> None:
        self._loggers = loggers
        self._failed: set[int] = set()

    def message(self, message: str) -> None:
        """Log a line of text; control characters from file and class names are escaped."""
        self._each("message", printable(as_typed(message)))

    def _each(self, method: str, *values: Any) -> None:
        for number, logger in enumerate(self._loggers):
            try:
                getattr(logger, method)(*values)
            except OSError as error:
                if number not in self._failed:
                    self._failed.add(number)
                    warn_cannot_write(type(logger).__name__, error)


for _method in ("event", "images", "steps", "epoch", "end", "delivered", "close"):
    setattr(Loggers, _method, partialmethod(Loggers._each, _method))


def warn_cannot_write(name: str, error: OSError) -> None:
    """Print that a destination of the run's numbers is lost."""
    print(f"{name} cannot write ({error}): training continues without it", file=sys.stderr, flush=True)
