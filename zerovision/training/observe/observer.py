"""Observers of a training's steps, in a list that is built once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partialmethod
from typing import Any, NamedTuple

import torch

from zerovision.training.base.timing import SpanClock
from zerovision.training.data.reader import Batch
from zerovision.training.engines.engine import StepResult


class Seen(NamedTuple):
    """The results of a micro-batch.

    Attributes:
        batch: the micro-batch.
        losses: [B].
        logits: [B, classes], or [B, classes, members].
        evidence: [B], not finite for a bad sample.
    """

    batch: Batch
    losses: torch.Tensor
    logits: torch.Tensor
    evidence: torch.Tensor


class StepDone(NamedTuple):
    """A completed optimizer step.

    Attributes:
        position: number of optimizer steps of the run before it.
        result: the engine's result after the last micro-batch.
    """

    position: int
    result: StepResult | None

    @property
    def applied(self) -> bool | torch.Tensor:
        """Whether the weights were updated; see `StepResult`."""
        return True if self.result is None else self.result.applied


class Observer:
    """Watches the steps of a training; a subclass overrides the methods it needs. All ranks have the same observers.

    Attributes:
        span: the clock's span to which its time after the steps is attributed.
    """

    span = "other"

    def before_step(self, position: int) -> None:
        """Prepare for the step after `position` steps of the run."""

    def seen(self, seen: Seen) -> None:
        """Take a micro-batch of the step; must not wait for the device."""

    def after_step(self, done: StepDone) -> None:
        """Take a completed step; a collective."""

    def between_steps(self, *, save_due: bool, failed: bool) -> None:
        """Use the time before the next step of the epoch; a collective.

        Args:
            save_due: whether a rank has requested a checkpoint.
            failed: whether this rank cannot continue: its micro-batches were empty, and all ranks stop after the next
                step.
        """

    def after_steps(self) -> None:
        """Complete pending work after the last step of an epoch, or before a stop; a collective."""

    def after_epoch(self, write_best: Callable[[], None] | None) -> None:
        """Take the end of an epoch, evaluated or stopped; a collective.

        Args:
            write_best: writes the epoch's weights if they are the best so far; only for rank 0.
        """


class Observers(Observer):
    """Passes every call to each observer, in order."""

    def __init__(self, observers: Sequence[Observer], clock: SpanClock) -> None:
        self._observers, self._clock = observers, clock

    def before_step(self, position: int) -> None:
        for one in self._observers:
            one.before_step(position)

    def seen(self, seen: Seen) -> None:
        for one in self._observers:
            one.seen(seen)

    def _each(self, method: str, *values: Any, **named: Any) -> None:
        for one in self._observers:
            with nullcontext() if one.span == "other" else getattr(self._clock, one.span):
                getattr(one, method)(*values, **named)


for _method in ("after_step", "between_steps", "after_steps", "after_epoch"):
    setattr(Observers, _method, partialmethod(Observers._each, _method))
