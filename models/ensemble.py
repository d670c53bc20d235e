"""Several networks trained side by side, whose probabilities are averaged."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor


class Ensemble(nn.Module):
    """A deep ensemble: each member learns by its own loss, in evaluation their probabilities are averaged.

    Lakshminarayanan et al. 2017 (https://arxiv.org/abs/1612.01474). Trained on the average itself, a member would learn
    little from an image that another member has right already, and end up worse than alone.

    In training each member draws random numbers, such as dropout's, from a seed of its own: what it draws does not
    depend on what the others are, nor on whether they run here.

    Attributes:
        own: numbers of the members that run here.
        gather: returns the logits of all members in their order, given those of `own`.
    """

    def __init__(self, members: Iterable[nn.Module]) -> None:
        """Take the members, each mapping images to logits `[B, num_classes]`."""
        super().__init__()
        self.members = nn.ModuleList(members)
        self.own: Sequence[int] = range(len(self.members))
        self.gather: Callable[[list[torch.Tensor]], list[torch.Tensor]] = list

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map images `[B, C, H, W]` to float32 logits.

        Returns:
            In training mode the logits of each member, `[B, num_classes, members]`; in evaluation mode
            `log_mean_probability` of them, `[B, num_classes]`.
        """
        draws = self.training and not (images.is_meta or isinstance(images, FakeTensor))  # nothing without data
        seeds = torch.randint(1 << 62, (len(self.members),)).tolist() if draws else []
        answers = []
        for number in self.own:
            if draws:
                seed_generators(seeds[number], images.device)
            answers.append(self.members[number](images).float())
        logits = torch.stack(self.gather(answers), dim=2)
        return logits if self.training else log_mean_probability(logits)


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed what a network on a device draws from."""
    # Not torch.manual_seed, which asks every kind of device for its generator: 120 microseconds against 1.
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


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
