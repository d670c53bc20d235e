"""What a step is, and the usual one: gradients of micro-batches are added up."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from zerovision.training.base.timing import SpanClock
from zerovision.training.data.reader import Batch
from zerovision.training.engines.engine import Engine, StepResult
from zerovision.training.engines.pipeline.engine import PipelineEngine
from zerovision.training.tasks.labels import Loss


class TimedEngine:
    """The three calls of a step on an engine, each a span of the clock; a step of other calls has both."""

    def __init__(self, engine: Engine, clock: SpanClock) -> None:
        self.engine, self.clock = engine, clock
        self.optimizer, self.buffers = engine.optimizer, engine.buffers

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """See `Engine.forward`."""
        with self.clock.forward:
            return self.engine.forward(images)

    def backward(self, loss: torch.Tensor) -> None:
        """See `Engine.backward`."""
        with self.clock.backward:
            self.engine.backward(loss)

    def step(self) -> StepResult | None:
        """See `Engine.step`."""
        with self.clock.optimizer:
            return self.engine.step()


Note = Callable[..., None]
"""Takes what a micro-batch has given: batch, losses [B], logits [B, classes], and, unless the losses tell, evidence [B]
that is not finite where a sample is to blame."""


class StepInput(NamedTuple):
    """This rank's part of an optimizer step.

    Attributes:
        batches: its micro-batches, on its device.
        seed_leaf: seeds dropout for the micro-batch of a number, from 0.
        loss_scale: a factor on losses, see `BatchPlan.loss_scale_for`.
        note: called with each micro-batch.
    """

    batches: Iterable[Batch]
    seed_leaf: Callable[[int], None]
    loss_scale: float
    note: Note


Step = Callable[[TimedEngine, StepInput], StepResult | None]
"""Trains on this rank's part of a step by the model with its optimizer, and returns what the engine did; a collective.
"""


@dataclass(frozen=True)
class Accumulate:
    """Each micro-batch has a loss of its own, whose gradient is added to that of those before."""

    loss: Loss

    def losses(
        self, engine: Engine | TimedEngine, batch: Batch, loss_scale: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the losses [B] of a micro-batch, its logits [B, classes], and the number [] to be differentiated."""
        logits = engine.forward(batch.images)
        losses = self.loss(logits, batch)
        return losses, logits, (losses * batch.weights).sum() * loss_scale

    def __call__(self, engine: TimedEngine, given: StepInput) -> StepResult | None:
        """See `Step`."""
        result = None
        for micro_step, batch in enumerate(given.batches):
            given.seed_leaf(micro_step)
            losses, logits, total = self.losses(engine, batch, given.loss_scale)
            engine.backward(total)
            result = engine.step()
            given.note(batch, losses, logits)
        return result


@dataclass(frozen=True)
class Pipelined:
    """Each micro-batch has a loss of its own, which the last stage computes; all ranks learn of it afterwards."""

    loss: Loss

    def __call__(self, engine: TimedEngine, given: StepInput) -> StepResult | None:
        """See `zerovision.training.steps.accumulate.Step`."""
        staged, held, found = engine.engine, [*given.batches], list[torch.Tensor]()
        assert isinstance(staged, PipelineEngine)

        def loss_of(logits: torch.Tensor, number: int) -> torch.Tensor:
            batch = held[number]
            losses = self.loss(logits, batch)
            found.append(torch.cat([losses.detach().view(-1), logits.detach().reshape(-1)]))
            return (losses * batch.weights).sum() * given.loss_scale

        result = staged.run_schedule([batch.images for batch in held], loss_of, given.seed_leaf, engine.clock)
        size, shape = len(held[0].labels), staged.output_shape(held[0].images)
        rows = staged.share_outputs(torch.stack(found) if found else None, (len(held), size + shape.numel()))
        for batch, row in zip(held, rows, strict=True):
            given.note(batch, row[:size], row[size:].view(shape))
        return result
