"""Features by comparison: a loss over all images of a step with the memory of one micro-batch.

The method is that of Gao et al. 2021 (https://arxiv.org/abs/2101.06983): the embeddings of all micro-batches are
computed without a graph, the gradient of the loss with respect to each embedding is computed from all of them, and a
second pass backpropagates these gradients through the network, one micro-batch at a time. Dropout and augmentation are
functions of the leaf (micro-batch), so both passes compute the same embeddings. BatchNorm uses a micro-batch's
statistics in both passes, and updates its running statistics only in the second.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from zerovision.training.base.leaves import Leaves
from zerovision.training.engines.engine import StepResult
from zerovision.training.world.collectives import gather_rows
from zerovision.training.world.world import World

if TYPE_CHECKING:
    from zerovision.training.engines.engine import StepInput, TimedEngine


@dataclass(frozen=True)
class GradientCache:
    """Trains on one loss over a step's embeddings; each rank computes it, with the same bits on any number of ranks."""

    world: World
    leaves: Leaves
    temperature: float  # see `contrast`
    num_classes: int

    def __call__(self, engine: TimedEngine, given: StepInput) -> StepResult | None:
        """See `zerovision.training.engines.engine.Step`."""
        held, buffers, outputs = [*given.batches], engine.buffers.copy(), list[torch.Tensor]()
        is_single = len(held) == 1  # if so, keep the graph: no other micro-batch needs the memory
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
            # If one embedding is not finite, no loss is finite, so the embeddings show which sample is to blame.
            evidence = outputs[micro_step].detach().sum(1)
            given.note(batch, losses[micro_step], shares[micro_step], evidence)
            outputs[micro_step] = evidence  # frees the graph
        return result

    def _of_all_leaves(self, own: list[torch.Tensor]) -> torch.Tensor:
        """Concatenate the micro-batches [B, ...] of all ranks, in the order of the leaves; a collective."""
        rows = torch.stack(own)
        every = gather_rows(rows.reshape(-1), self.world).view(-1, *rows.shape[1:])
        return every[self.leaves.order()].flatten(0, 1)


def contrast(
    embeddings: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, temperature: float, classes: int, rows: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return losses, shares and gradient of the supervised contrastive loss L_out from the cosines between embeddings.

    Source: Khosla et al. 2020 (https://arxiv.org/abs/2004.11362), equation 2, in which the temperature divides the
    cosines. Anchors are processed in blocks of `rows`, a divisor of N, always in the same order, so that only one block
    needs memory, and the bits depend only on the embeddings.

    The embeddings are float32 [N, D], with arbitrary norms above 0; the labels, int64 [N]; the weights, float32 [N].
    Images with weight 0 are neither anchors nor compared.

    The losses, float32 [N], are 0 for an image that is the only image of its class. The shares, float32 [N, classes],
    are each image's similarity to the other images of each class; rows add up to 1. The gradient, float32 [N, D], is
    that of the weighted sum of losses with respect to the embeddings.
    """
    leaves = embeddings.detach().requires_grad_()
    one_hot, losses, shares = F.one_hot(labels, classes).float(), [], []
    for anchors in torch.arange(len(labels), device=labels.device).split(rows):
        with torch.enable_grad():
            unit = F.normalize(leaves)
            similarity = unit[anchors] @ unit.T / temperature
            is_other = (weights > 0) & (torch.arange(len(labels), device=labels.device) != anchors[:, None])
            is_positive = is_other & (labels == labels[anchors, None])
            # The lowest number instead of minus infinity, so that the gradient of an image compared with none is 0.
            kept = similarity.masked_fill(~is_other, torch.finfo(similarity.dtype).min)
            log_share = kept - kept.logsumexp(1, keepdim=True)
            found = -torch.where(is_positive, log_share, 0.0).sum(1) / is_positive.sum(1).clamp(min=1)
            (found * weights[anchors]).sum().backward()
        losses.append(found.detach())
        shares.append(log_share.detach().exp() @ one_hot)
    assert leaves.grad is not None
    return torch.cat(losses), torch.cat(shares), leaves.grad
