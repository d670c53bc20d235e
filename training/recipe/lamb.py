"""LAMB on sharded weights, with the trust ratio of each whole parameter.

Under ZeRO an optimizer updates this rank's flat part of many parameters. LAMB's trust ratio (You et al. 2020,
https://arxiv.org/abs/1904.00962, algorithm 2) is a ratio of norms per parameter; norms of flat parts would differ from
it, and with the number of ranks. Here the squared norms of a parameter's pieces are summed over the ranks first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from timm.optim import Lamb

from training.parallel.collectives import sum_over_ranks
from training.parallel.engine import FlatShard
from training.parallel.world import World


class ShardedLamb(Lamb):
    """timm's Lamb over flat shards, whose state the engine creates; needs `bind_shards` before the first step.

    Gradient clipping is the engine's.
    """

    def __init__(self, params: Any, **defaults: Any) -> None:
        super().__init__(params, max_grad_norm=None, **defaults)
        self._shards: dict[int, FlatShard] = {}
        self._world: World | None = None

    def bind_shards(self, shards: Iterable[FlatShard], world: World) -> None:
        """Take the layout of the flat tensors, `Engine.flat_shards`, and the ranks over which they are sharded."""
        self._shards, self._world = {id(shard.weights): shard for shard in shards}, world

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
        shard = self._shards[id(flat)]
        numbers = {name: number for number, name in enumerate(shard.names)}
        squares = torch.zeros(2, len(numbers), dtype=torch.float64, device=flat.device)
        for piece in shard.pieces:
            for row, tensor in enumerate((flat, update)):
                values = tensor.narrow(0, piece.start, piece.length)
                squares[row, numbers[piece.name]] += values.square().sum(dtype=torch.float64)
        # Offloaded shards are in CPU memory, which NCCL cannot reach.
        weight_norms, update_norms = sum_over_ranks(squares.to(self._world.device), self._world).sqrt().to(flat.device)
        ratios = torch.where((weight_norms > 0) & (update_norms > 0), weight_norms / update_norms, 1.0).to(flat.dtype)
        for piece in shard.pieces:
            update.narrow(0, piece.start, piece.length).mul_(ratios[numbers[piece.name]])
