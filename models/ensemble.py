"""Several networks trained side by side, whose probabilities are averaged."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import torch
from torch import nn


class Ensemble(nn.Module):
    """A deep ensemble: each member learns by its own loss, in evaluation their probabilities are averaged.

    Lakshminarayanan et al. 2017 (https://arxiv.org/abs/1612.01474). Trained on the average itself, a member would learn
    little from an image that another member has right already, and end up worse than alone.
    """

    def __init__(self, members: Iterable[nn.Module]) -> None:
        """Take the members, each mapping images to logits `[B, num_classes]`."""
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map images `[B, C, H, W]` to float32 logits.

        Returns:
            In training mode the logits of each member, `[B, num_classes, members]`; in evaluation mode
            `log_mean_probability` of them, `[B, num_classes]`.
        """
        logits = torch.stack([member(images).float() for member in self.members], dim=2)
        return logits if self.training else log_mean_probability(logits)


def log_mean_probability(logits: torch.Tensor) -> torch.Tensor:
    """Return the log of the members' mean probability, float32 `[B, num_classes]`.

    It is normalized already: its softmax is the mean probability itself.

    Args:
        logits: float32 `[B, num_classes, members]`.
    """
    return torch.logsumexp(torch.log_softmax(logits, dim=1), dim=2) - math.log(logits.shape[2])


def mean_over_members(loss: Callable[[torch.Tensor], torch.Tensor], logits: torch.Tensor) -> torch.Tensor:
    """Return the mean of a loss over the members; that of a single network is the loss itself.

    Args:
        loss: from logits `[B, num_classes]` to losses `[B]`.
        logits: `[B, num_classes, members]` of an ensemble in training mode, or `[B, num_classes]`.
    """
    if logits.ndim == 2:
        return loss(logits)
    return torch.stack([loss(member) for member in logits.unbind(2)]).mean(0)
