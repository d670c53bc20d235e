"""LAMB on sharded weights, with the trust ratio of each whole parameter.

Under ZeRO an optimizer updates this rank's flat part of many parameters. LAMB's trust ratio (You et al. 2020,
https://arxiv.org/abs/1904.00962, algorithm 2) is a ratio of norms per parameter; norms of flat parts would differ from
it, and with the number of ranks. Here the squared norms of a parameter's pieces are summed over the ranks first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from timm.optim import Lamb

from training.parallel.collectives import sum_over_ranks
from training.parallel.parameter_shards import WEIGHTS, EngineState
from training.parallel.world import World


class ShardedLamb(Lamb):
    """timm's Lamb over flat shards, whose state the engine creates; needs `bind_shards` before the first step.

    Gradient clipping is the engine's.
    """

    def __init__(self, params: Any, **defaults: Any) -> None:
        super().__init__(params, max_grad_norm=None, **defaults)
        self._state: EngineState | None = None
        self._world: World | None = None

    def bind_shards(self, state: EngineState, world: World) -> None:
        """Take which part of which parameter lies where in the flat tensors, and the ranks that have the others."""
        self._state, self._world = state, world

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
        assert self._state is not None
        parts = []  # of each shard in this flat tensor: number of the parameter, its weights and its update
        numbers = {name: number for number, name in enumerate(self._state.shapes)}
        for shard in self._state.shards:
            weights = shard.tensors[WEIGHTS]
            start = weights.storage_offset() - flat.storage_offset()
            if weights.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr() and 0 <= start < len(flat):
                parts.append((numbers[shard.name], weights, update.as_strided(weights.shape, weights.stride(), start)))
        squares = torch.zeros(2, len(numbers), dtype=torch.float64, device=flat.device)
        for number, *tensors in parts:
            for row, tensor in enumerate(tensors):
                squares[row, number] += tensor.square().sum(dtype=torch.float64)
        # Offloaded shards are in CPU memory, which NCCL cannot reach.
        weight_norms, update_norms = sum_over_ranks(squares.to(self._world.device), self._world).sqrt().to(flat.device)
        ratios = torch.where((weight_norms > 0) & (update_norms > 0), weight_norms / update_norms, 1.0).to(flat.dtype)
        for number, _, part in parts:
            part.mul_(ratios[number])
