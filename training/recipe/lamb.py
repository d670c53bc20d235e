"""LAMB on sharded weights, with the trust ratio of each whole parameter.

Under ZeRO an optimizer updates this rank's flat part of many parameters. LAMB's trust ratio (You et al. 2020,
https://arxiv.org/abs/1904.00962, algorithm 2) is a ratio of norms per parameter; norms of flat parts would differ from
it, and with the number of ranks. Here the squared norms of a parameter's pieces are summed over the ranks first: along
blocks of the flat tensors, in an order that does not depend on the ranks, if the engine asks for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from timm.optim import Lamb

from training.parallel.block_norms import ParameterBlocks
from training.parallel.collectives import sum_over_ranks
from training.parallel.parameter_shards import WEIGHTS, EngineState
from training.parallel.world import World

MOMENTS = ("exp_avg", "exp_avg_sq")


class ShardedLamb(Lamb):
    """timm's Lamb over shards, whose state the engine creates; needs `bind_shards` before the first step.

    Gradient clipping is the engine's.
    """

    def __init__(self, params: Any, **defaults: Any) -> None:
        super().__init__(params, max_grad_norm=None, **defaults)
        for group in self.param_groups:  # for `create_state`
            group["created_state"] = {"step": torch.zeros(()), **{kind: torch.zeros(2, 2) for kind in MOMENTS}}
        self._state: EngineState | None = None
        self._world: World | None = None
        self._copies = 1
        self._blocks: dict[torch.Tensor, ParameterBlocks] = {}
        # Of each tensor that is updated: number, sizes, strides and start of the parameters' parts in it.
        self._places: dict[torch.Tensor, list[tuple[int, torch.Size, tuple[int, ...], int]]] = {}

    def bind_shards(self, state: EngineState, world: World, copies: int = 1, *, by_blocks: bool = False) -> None:
        """Note which parts of which parameters lie where in the tensors that are updated; a collective.

        Args:
            state: with all shards that this rank updates.
            world: the ranks.
            copies: ranks that update the same shard.
            by_blocks: whether every group is one flat tensor, of which each rank has whole blocks.
        """
        self._state, self._world, self._copies, self._places = state, world, copies, {}
        for group in self.param_groups:
            for tensor in group["params"]:
                self._places_in(tensor)
                if by_blocks and group["weight_decay"]:
                    self._blocks[tensor] = ParameterBlocks(tensor, state, world)

    def _places_in(self, tensor: torch.Tensor) -> list[tuple[int, torch.Size, tuple[int, ...], int]]:
        """Return the parts of parameters in a tensor as they lay at its first step, or when the shards were bound."""
        assert self._state is not None, "bind_shards comes first"
        if tensor not in self._places:
            numbers = {name: number for number, name in enumerate(self._state.shapes)}
            self._places[tensor] = []
            for shard in self._state.shards:
                weights = shard.tensors[WEIGHTS]
                start = weights.storage_offset() - tensor.storage_offset()
                is_in_it = weights.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
                if is_in_it and 0 <= start < tensor.numel():
                    self._places[tensor].append((numbers[shard.name], weights.shape, weights.stride(), int(start)))
        return self._places[tensor]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all tensors; a collective."""
        updates = [
            (tensor, group, self._adam_update(tensor, group))
            for group in self.param_groups
            for tensor in group["params"]
            if tensor.grad is not None
        ]
        # As in timm, parameters without decay (biases, norms) keep the plain Adam step.
        self._apply_trust_ratios([(tensor, update) for tensor, group, update in updates if group["weight_decay"]])
        for tensor, group, update in updates:
            tensor.add_(update, alpha=-group["lr"])

    def _adam_update(self, tensor: torch.Tensor, group: dict[str, Any]) -> torch.Tensor:
        state = self.state[tensor]
        state["step"] += 1
        beta1, beta2 = group["betas"]
        step = int(state["step"])  # kept on the CPU: no device sync
        state["exp_avg"].lerp_(tensor.grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(tensor.grad, tensor.grad, value=1 - beta2)
        denominator = (state["exp_avg_sq"].sqrt() / (1 - beta2**step) ** 0.5).add_(group["eps"])
        update = (state["exp_avg"] / (1 - beta1**step)).div_(denominator)
        return update.add_(tensor, alpha=group["weight_decay"]) if group["weight_decay"] else update

    def _apply_trust_ratios(self, updates: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Multiply each parameter's update by |weight| / |update|, 1 where either is 0; a collective."""
        assert self._state is not None, "bind_shards comes first"
        assert self._world is not None
        parts: list[tuple[int, torch.Tensor, torch.Tensor]] = []  # number of the parameter, its weights, their update
        for tensor, update in updates:
            for number, sizes, strides, start in self._places_in(tensor):
                weights, part = (
                    whole.as_strided(sizes, strides, whole.storage_offset() + start) for whole in (tensor, update)
                )
                parts.append((number, weights, part))
        # Offloaded shards are in CPU memory, which NCCL cannot reach.
        squares = torch.zeros(2, len(self._state.shapes), dtype=torch.float64, device=self._world.device)
        if self._blocks:
            for pair in updates:
                squares += torch.stack([self._blocks[pair[0]].squares(values) for values in pair])
        else:
            for number, *tensors in parts:
                for row, tensor in enumerate(tensors):
                    squares[row, number] += tensor.square().sum(dtype=torch.float64).to(squares.device)
            squares = sum_over_ranks(squares, self._world) / self._copies
        weight_norms, update_norms = squares.sqrt()
        ratios = torch.where((weight_norms > 0) & (update_norms > 0), weight_norms / update_norms, 1.0)
        for number, _, part in parts:
            part.mul_(ratios[number].to(part.device, part.dtype))


def bind_lamb(
    optimizer: torch.optim.Optimizer, state: EngineState, world: World, copies: int = 1, *, by_blocks: bool = False
) -> None:
    """Bind a `ShardedLamb`, as its `bind_shards` says; other rules need nothing."""
    if isinstance(optimizer, ShardedLamb):
        optimizer.bind_shards(state, world, copies, by_blocks=by_blocks)
