"""The usual step, which accumulates the gradients of micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

from zerovision.training.engines.engine import Loss, StepInput, StepResult, TimedEngine


@dataclass(frozen=True)
class Accumulate:
    """Computes the loss of each micro-batch separately, and accumulates the gradients."""

    loss: Loss

    def __call__(self, engine: TimedEngine, given: StepInput) -> StepResult | None:
        """See `zerovision.training.engines.engine.Step`."""
        result = None
        for micro_step, batch in enumerate(given.batches):
            given.seed_leaf(micro_step)
            logits = engine.forward(batch.images)
            losses = self.loss(logits, batch)
            engine.backward((losses * batch.weights).sum() * given.loss_scale)
            result = engine.step()
            given.note(batch, losses, logits)
        return result
