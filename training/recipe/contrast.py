"""The supervised contrastive loss, which compares each image of a step with all others, and its gradient."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F

EMBEDDING_SIZE = 128  # of the projection, as in Khosla et al.
VIEWS = 2  # of each image of a step: what an image has in common with itself, augmented otherwise


class Contrast(NamedTuple):
    """What the comparison of N images gives.

    Attributes:
        losses: float32 [N], 0 for an image without another one of its class.
        shares: float32 [N, classes], how similar an image is to the others of each class; the shares add up to 1.
        gradient: float32 [N, D], of the sum of the losses with weight by the embeddings.
    """

    losses: torch.Tensor
    shares: torch.Tensor
    gradient: torch.Tensor


def contrast(
    embeddings: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, temperature: float, classes: int, rows: int
) -> Contrast:
    """Compare images by the angles between their embeddings: L_out, equation 2 of Khosla et al. 2020.

    https://arxiv.org/abs/2004.11362. The anchors are taken a block at a time, always in the same order: memory is that
    of a block, and the bits depend on the embeddings alone.

    Args:
        embeddings: float32 [N, D], of any length above 0.
        labels: int64 [N].
        weights: float32 [N]; images of weight 0 are neither anchors, nor compared with any.
        temperature: by which the cosines are divided.
        classes: of the data set.
        rows: anchors of a block, a divisor of N.
    """
    leaves = embeddings.detach().requires_grad_()
    one_hot, losses, shares = F.one_hot(labels, classes).float(), [], []
    for anchors in torch.arange(len(labels), device=labels.device).split(rows):
        with torch.enable_grad():
            unit = F.normalize(leaves)
            similarity = unit[anchors] @ unit.T / temperature
            is_other = (weights > 0) & (torch.arange(len(labels), device=labels.device) != anchors[:, None])
            is_positive = is_other & (labels == labels[anchors, None])
            # The smallest number, not minus infinity: an image that is compared with none has a gradient of 0, not NaN.
            kept = similarity.masked_fill(~is_other, torch.finfo(similarity.dtype).min)
            log_share = kept - kept.logsumexp(1, keepdim=True)
            found = -torch.where(is_positive, log_share, 0.0).sum(1) / is_positive.sum(1).clamp(min=1)
            (found * weights[anchors]).sum().backward()
        losses.append(found.detach())
        shares.append(log_share.detach().exp() @ one_hot)
    assert leaves.grad is not None
    return Contrast(torch.cat(losses), torch.cat(shares), leaves.grad)
