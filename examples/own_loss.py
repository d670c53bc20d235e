"""A loss of your own, the focal loss: `--plugin examples/own_loss.py --loss focal`.

Lin et al. 2017, "Focal loss for dense object detection", https://arxiv.org/abs/1708.02002, equation 5.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import one_hot

from zerovision import LOSSES, Batch, TrainConfig
from zerovision.training.tasks.labels import cross_entropy

GAMMA = 2.0


def focal(config: TrainConfig, weights: torch.Tensor | None) -> Callable[[torch.Tensor, Batch], torch.Tensor]:
    """Return the function of logits [B, C] and batch to the loss of each image [B], with `--class-weights`."""
    plain = cross_entropy(config, weights)  # smoothed and mixed targets, too

    def loss(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        shares = logits.float().softmax(1)
        targets = one_hot(batch.labels, shares.shape[1]) if batch.targets is None else batch.targets
        return (1 - (shares * targets).sum(1)) ** GAMMA * plain(logits, batch)

    return loss


LOSSES["focal"] = focal
