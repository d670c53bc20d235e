"""Observers of training steps."""

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
        losses: [B], the loss of each sample.
        logits: [B, classes], or [B, classes, members].
        evidence: [B], a number for each sample, which is non-finite for a bad sample.
    """

    batch: Batch
    losses: torch.Tensor
    logits: torch.Tensor
    evidence: torch.Tensor


class StepDone(NamedTuple):
    """A completed optimizer step.

    Attributes:
        position: number of the run's optimizer steps before this one.
        result: the engine's result after the last micro-batch.
    """

    position: int
    result: StepResult | None

    @property
    def applied(self) -> bool | torch.Tensor:
        """Whether the weights were updated; see `StepResult`."""
        return True if self.result is None else self.result.applied


class Observer:
    """Observes training steps; a subclass overrides the methods that it needs.

    All ranks have the same observers, except for the profiler, which only rank 0 has.

    Attributes:
        span: name of the clock's span that measures the methods called after a step.
    """

    span = "other"

    def before_step(self, position: int) -> None:
        """Prepare for the next step; `position` is the number of the run's earlier steps."""

    def seen(self, seen: Seen) -> None:
        """Process the results of a micro-batch; must not wait for the device."""

    def after_step(self, done: StepDone) -> None:
        """Process a completed step; a collective."""

    def between_steps(self, *, save_due: bool, failed: bool) -> None:
        """Do the work that is due between two steps of an epoch; a collective.

        Args:
            save_due: whether any rank has requested a checkpoint.
            failed: whether this rank has failed; its micro-batches are then empty, and all ranks stop after the next
                step.
        """

    def after_steps(self) -> None:
        """Complete pending work after the last step of an epoch or before a stop; a collective."""

    def after_epoch(self, write_best: Callable[[], None] | None) -> None:
        """Process the end of an epoch, after its evaluation or a stop; a collective.

        Args:
            write_best: function that writes the epoch's weights, to be called only on rank 0; None if they are not the
                best so far.
        """


class Observers(Observer):
    """Passes each call to all observers, in order."""

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
