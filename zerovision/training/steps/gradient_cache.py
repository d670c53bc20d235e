"""A step whose loss compares all images of all ranks, in the memory of one micro-batch.

Gao et al. 2021 (https://arxiv.org/abs/2101.06983): the embeddings of all micro-batches are computed without a graph,
the loss over all of them gives the gradient of each embedding, and a second pass takes it through the network, one
micro-batch at a time. Dropout and augmentation are functions of the leaf, so that both passes compute the same.
BatchNorm takes its statistics over a micro-batch in both, and its running ones are updated once, by the second.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zerovision.training.base.leaves import Leaves
from zerovision.training.engines.engine import StepResult
from zerovision.training.recipe.loss import contrast
from zerovision.training.steps.accumulate import StepInput, TimedEngine
from zerovision.training.world.collectives import gather_rows
from zerovision.training.world.world import World


@dataclass(frozen=True)
class GradientCache:
    """One loss over the embeddings of a step; every rank computes all of it: the same bits on any number of them.

    Attributes:
        world: the ranks.
        leaves: of a step.
        temperature: of the loss, see `contrast`.
        num_classes: of the data set.
    """

    world: World
    leaves: Leaves
    temperature: float
    num_classes: int

    def __call__(self, engine: TimedEngine, given: StepInput) -> StepResult | None:
        """See `zerovision.training.steps.accumulate.Step`."""
        held, buffers, outputs = [*given.batches], engine.buffers.copy(), list[torch.Tensor]()
        is_single = len(held) == 1  # its graph is kept: there is no other micro-batch to make room for
        with torch.set_grad_enabled(is_single):
            for micro_step, batch in enumerate(held):
                given.seed_leaf(micro_step)
                outputs.append(engine.forward(batch.images))
        if not is_single:
            engine.buffers.restore(buffers)
        size, own = len(held[0].labels), self.leaves.of(self.world.data.rank)
        gathered = (
            self._of_all_leaves([output.detach() for output in outputs]),
            self._of_all_leaves([batch.labels for batch in held]),
            self._of_all_leaves([batch.weights for batch in held]),
        )
        found = contrast(*gathered, self.temperature, self.num_classes, size)
        losses, shares, gradients = ([tensor.split(size)[leaf] for leaf in own] for tensor in found)
        result = None
        for micro_step, batch in enumerate(held):
            if not is_single:
                given.seed_leaf(micro_step)
                outputs[micro_step] = engine.forward(batch.images)
            engine.backward((outputs[micro_step] * gradients[micro_step]).sum() * given.loss_scale)
            result = engine.step()
            # Where one embedding is not finite, the losses of all images are not: it alone is to blame.
            evidence = outputs[micro_step].detach().sum(1)
            given.note(batch, losses[micro_step], shares[micro_step], evidence)
            outputs[micro_step] = evidence  # which frees the graph
        return result

    def _of_all_leaves(self, own: list[torch.Tensor]) -> torch.Tensor:
        """Return this rank's micro-batches [B, ...] and those of the others in the order of leaves; a collective."""
        rows = torch.stack(own)
        every = gather_rows(rows.reshape(-1), self.world).view(-1, *rows.shape[1:])
        return every[self.leaves.order()].flatten(0, 1)
