"""Observers of a training: what watches its steps, in a list that is built once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch

from zerovision.training.base.timing import SpanClock
from zerovision.training.data.reader import Batch
from zerovision.training.engines.engine import StepResult


class Seen(NamedTuple):
    """What a micro-batch has given.

    Attributes:
        batch: the micro-batch.
        losses: [B].
        logits: [B, classes], or [B, classes, members].
        evidence: [B], not finite where a sample is to blame.
    """

    batch: Batch
    losses: torch.Tensor
    logits: torch.Tensor
    evidence: torch.Tensor


class StepDone(NamedTuple):
    """An optimizer step that has ended.

    Attributes:
        position: optimizer steps of the run before it.
        result: what the engine returned after the last micro-batch.
    """

    position: int
    result: StepResult | None

    @property
    def applied(self) -> bool | torch.Tensor:
        """Whether the weights were updated, see `StepResult`."""
        return True if self.result is None else self.result.applied


class Observer:
    """Watches the steps of a training; a subclass has what it needs of these. All ranks have the same ones.

    Attributes:
        span: of the clock, in which the time counts that it takes after the steps.
    """

    span = "other"

    def before_step(self, position: int) -> None:
        """Prepare for the step after `position` steps of the run."""

    def seen(self, seen: Seen) -> None:
        """Take a micro-batch of the step; nothing may wait for the device."""

    def after_step(self, done: StepDone) -> None:
        """Take a step that has ended; a collective."""

    def between_steps(self, *, save_due: bool, failed: bool) -> None:
        """Use the time before the next step of the epoch; a collective.

        Args:
            save_due: whether a rank has asked for a checkpoint.
            failed: whether this rank cannot go on: its micro-batches were empty, and all stop after the next step.
        """

    def after_steps(self) -> None:
        """Settle what is pending, after the last step of an epoch or of what a signal left of it; a collective."""

    def after_epoch(self, write_best: Callable[[], None] | None) -> None:
        """Take the end of an epoch, evaluated or stopped; a collective.

        Args:
            write_best: writes its weights, if they are the best so far; for rank 0 alone.
        """


class Observers(Observer):
    """Passes every call on to each observer, in their order."""

    def __init__(self, observers: Sequence[Observer], clock: SpanClock) -> None:
        self._observers, self._clock = observers, clock

    def before_step(self, position: int) -> None:
        for one in self._observers:
            one.before_step(position)

    def seen(self, seen: Seen) -> None:
        for one in self._observers:
            one.seen(seen)

    def after_step(self, done: StepDone) -> None:
        for one in self._observers:
            with self._span_of(one):
                one.after_step(done)

    def between_steps(self, *, save_due: bool, failed: bool) -> None:
        for one in self._observers:
            with self._span_of(one):
                one.between_steps(save_due=save_due, failed=failed)

    def after_steps(self) -> None:
        for one in self._observers:
            with self._span_of(one):
                one.after_steps()

    def after_epoch(self, write_best: Callable[[], None] | None) -> None:
        for one in self._observers:
            with self._span_of(one):
                one.after_epoch(write_best)

    def _span_of(self, observer: Observer) -> AbstractContextManager[None]:
        return nullcontext() if observer.span == "other" else getattr(self._clock, observer.span)
