"""LAMB on sharded weights, with the trust ratio of each whole parameter.

ZeRO hands an optimizer this rank's flat piece of many parameters. LAMB's trust ratio (You et al. 2020,
https://arxiv.org/abs/1904.00962, algorithm 2) is a ratio of norms per parameter, so on flat pieces it would be
another one, and another one again for every number of ranks. Here the squared norms of a parameter's fragments are
summed over the ranks first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from timm.optim import Lamb

from training.parallel.collectives import sum_over_ranks
from training.parallel.world import World


@dataclass(frozen=True)
class Fragment:
    """Where a piece of a parameter lies in a flat tensor.

    Attributes:
        parameter: number of the parameter within its flat tensor's group, the same on all ranks.
        start: first element in the flat tensor.
        length: number of elements.
        offset: first element in the flattened parameter.
    """

    parameter: int
    start: int
    length: int
    offset: int


@dataclass(frozen=True)
class FlatLayout:
    """The parameters that share a flat tensor over all ranks, and the fragments of this rank."""

    num_parameters: int
    fragments: tuple[Fragment, ...]


class ShardedLamb(Lamb):
    """timm's Lamb over flat shards, whose state the engine creates; needs `bind_shards` before the first step.

    Gradient clipping is the engine's.
    """

    def __init__(self, params: Any, **defaults: Any) -> None:
        super().__init__(params, max_grad_norm=None, **defaults)
        self._layouts: Mapping[int, FlatLayout] = {}
        self._world: World | None = None

    def bind_shards(self, layouts: Mapping[int, FlatLayout], world: World) -> None:
        """Say how the flat tensors are laid out.

        Args:
            layouts: `id` of each flat tensor -> its layout.
            world: the ranks over which parameters are sharded.
        """
        self._layouts, self._world = layouts, world

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all flat tensors; a collective."""
        for group in self.param_groups:
            for flat in group["params"]:
                if flat.grad is not None:
                    self._update(flat, group)

    def _update(self, flat: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[flat]
        state["step"] += 1
        beta1, beta2 = group["betas"]
        step = int(state["step"])  # kept on the CPU: no device sync
        state["exp_avg"].lerp_(flat.grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(flat.grad, flat.grad, value=1 - beta2)
        denominator = (state["exp_avg_sq"].sqrt() / (1 - beta2**step) ** 0.5).add_(group["eps"])
        update = (state["exp_avg"] / (1 - beta1**step)).div_(denominator)
        # As in timm, parameters without decay (biases, norms) keep the plain Adam step.
        if group["weight_decay"]:
            update.add_(flat, alpha=group["weight_decay"])
            self._apply_trust_ratios(flat, update)
        flat.add_(update, alpha=-group["lr"])

    def _apply_trust_ratios(self, flat: torch.Tensor, update: torch.Tensor) -> None:
        """Multiply each parameter's update by |weight| / |update|, 1 where either is 0; a collective."""
        assert self._world is not None, "bind_shards comes first"
        layout = self._layouts[id(flat)]
        squares = torch.zeros(2, layout.num_parameters, dtype=torch.float64, device=flat.device)
        for fragment in layout.fragments:
            for row, tensor in enumerate((flat, update)):
                piece = tensor.narrow(0, fragment.start, fragment.length)
                squares[row, fragment.parameter] += piece.square().sum(dtype=torch.float64)
        # Offloaded shards lie in CPU memory, which NCCL cannot reach.
        weight_norms, update_norms = sum_over_ranks(squares.to(self._world.device), self._world).sqrt().to(flat.device)
        ratios = torch.where((weight_norms > 0) & (update_norms > 0), weight_norms / update_norms, 1.0).to(flat.dtype)
        for fragment in layout.fragments:
            update.narrow(0, fragment.start, fragment.length).mul_(ratios[fragment.parameter])
