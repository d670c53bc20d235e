"""What the engine asks of the two ways in which it distributes a model."""

from __future__ import annotations

from typing import Protocol

import torch

from training.engines.parameter_shards import ParameterShard


class Distribution(Protocol):
    """Where the parameters are, and what moves their values and gradients between the ranks.

    The optimizer's groups get this rank's parts of them as their parameters.

    Attributes:
        reports: whether this rank's parts are in checkpoints; among ranks with the same parts, one's are.
    """

    reports: bool

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Run the network on images [B, C, H, W]; a collective if it gathers weights."""

    def begin_backward(self, leaf: int) -> None:
        """Prepare for backward of this rank's leaf of the step, the first of which is 0."""

    def end_backward(self) -> None:
        """Add the gradients to the sums over the leaves; after the last leaf of a step, a collective."""

    def sum_gradients(self) -> torch.Tensor:
        """Give the optimizer's parameters the sum of the gradients over all ranks' leaves; a collective.

        Returns:
            The sum of its squares, float64 []; of parameters that a tensor group has whole, on its first rank alone.
        """

    def scale_gradients(self, factor: torch.Tensor) -> None:
        """Multiply the optimizer's gradients by a number [] on the ranks' device."""

    def share_weights(self) -> None:
        """Let every rank compute with what the optimizers' parameters are now; a collective."""

    def settle(self) -> None:
        """Let the optimizer's parameters be what the model computes with; no collective."""

    def shards(self) -> list[ParameterShard]:
        """Return this rank's parts of all parameters, with the optimizer's state of them; no collective."""
