"""Several networks trained together on the mean of their probabilities."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn


class Ensemble(nn.Module):
    """Images `[B, C, H, W]` to the log of the members' mean probability, float32 `[B, num_classes]`.

    These logits are already normalized, so their softmax is exactly the averaged probability, and cross entropy
    on them is the negative log-likelihood of the average.
    """

    def __init__(self, members: Iterable[nn.Module]) -> None:
        """Take the members, each mapping images to logits `[B, num_classes]`."""
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map images `[B, C, H, W]` to log-probabilities, float32 `[B, num_classes]`."""
        log_probabilities = torch.stack([torch.log_softmax(member(images).float(), dim=1) for member in self.members])
        return torch.logsumexp(log_probabilities, dim=0) - math.log(len(self.members))
