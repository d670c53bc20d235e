"""The usual step, which accumulates the gradients of micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zerovision.training.data.reader import Batch
from zerovision.training.engines.engine import Engine, Loss, StepInput, StepResult, TimedEngine


@dataclass(frozen=True)
class Accumulate:
    """Computes the loss of each micro-batch separately, and accumulates the gradients."""

    loss: Loss

    def losses(
        self, engine: Engine | TimedEngine, batch: Batch, loss_scale: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the losses [B] of a micro-batch, its logits [B, classes], and the scalar [] to differentiate."""
        logits = engine.forward(batch.images)
        losses = self.loss(logits, batch)
        return losses, logits, (losses * batch.weights).sum() * loss_scale

    def __call__(self, engine: TimedEngine, given: StepInput) -> StepResult | None:
        """See `zerovision.training.engines.engine.Step`."""
        result = None
        for micro_step, batch in enumerate(given.batches):
            given.seed_leaf(micro_step)
            losses, logits, total = self.losses(engine, batch, given.loss_scale)
            engine.backward(total)
            result = engine.step()
            given.note(batch, losses, logits)
        return result
