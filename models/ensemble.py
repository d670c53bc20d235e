"""Several networks trained side by side, whose probabilities are averaged."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor


class Ensemble(nn.Module):
    """A deep ensemble: members are trained with separate losses; in evaluation, their probabilities are averaged.

    See Lakshminarayanan et al. 2017 (https://arxiv.org/abs/1612.01474). If trained on the average, a member would learn
    little from images that other members already classify correctly, and end up worse than if trained alone.

    In training, each member draws random numbers, such as those for dropout, from its own seed, so they do not depend
    on the other members, or on whether other members run in the same process.

    Attributes:
        own: indices of the members that run in this process.
        gather: function that returns the logits of all members in order, given the logits of the members in `own`.
    """

    def __init__(self, members: Iterable[nn.Module]) -> None:
        """Store the members, each of which maps images to logits `[B, num_classes]`."""
        super().__init__()
        self.members = nn.ModuleList(members)
        self.own: Sequence[int] = range(len(self.members))
        self.gather: Callable[[list[torch.Tensor]], list[torch.Tensor]] = list

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map images `[B, C, H, W]` to float32 logits.

        Returns:
            In training mode, the logits of each member, `[B, num_classes, members]`; in evaluation mode, the
            `log_mean_probability` of all members, `[B, num_classes]`.
        """
        draws = self.training and not (images.is_meta or isinstance(images, FakeTensor))  # no draws without data
        seeds = torch.randint(1 << 62, (len(self.members),)).tolist() if draws else []
        answers = []
        for number in self.own:
            if draws:
                seed_generators(seeds[number], images.device)
            answers.append(self.members[number](images).float())
        logits = torch.stack(self.gather(answers), dim=2)
        return logits if self.training else log_mean_probability(logits)


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed the generators that a network on a device draws from."""
    # Not torch.manual_seed, which seeds every kind of device: 120 microseconds instead of 1.
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)


def log_mean_probability(logits: torch.Tensor) -> torch.Tensor:
    """Return the log of the members' mean probability, float32 `[B, num_classes]`.

    The result is already normalized: its softmax is the mean probability.

    Args:
        logits: float32 `[B, num_classes, members]`.
    """
    return torch.logsumexp(torch.log_softmax(logits, dim=1), dim=2) - math.log(logits.shape[2])


def mean_over_members(loss: Callable[[torch.Tensor], torch.Tensor], logits: torch.Tensor) -> torch.Tensor:
    """Return the mean of a loss over the members; for a single network, the loss itself.

    Args:
        loss: function that maps logits `[B, num_classes]` to losses `[B]`.
        logits: `[B, num_classes, members]` from an ensemble in training mode, or `[B, num_classes]`.
    """
    if logits.ndim == 2:
        return loss(logits)
    return torch.stack([loss(member) for member in logits.unbind(2)]).mean(0)
