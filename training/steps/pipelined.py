"""A step of a model that is cut into stages: the schedule decides which micro-batch goes through which stage when."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from training.engines.engine import StepResult
from training.engines.pipeline.engine import PipelineEngine
from training.recipe.loss import Loss
from training.steps.accumulate import StepInput, TimedEngine


@dataclass(frozen=True)
class Pipelined:
    """Each micro-batch has a loss of its own, which the last stage computes; all ranks learn of it afterwards."""

    loss: Loss

    def __call__(self, engine: TimedEngine, given: StepInput) -> StepResult | None:
        """See `training.steps.accumulate.Step`."""
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
