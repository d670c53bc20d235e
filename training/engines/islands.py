"""Islands: equal groups of ranks of which each trains the model by itself, as a run of these ranks alone would.

`training.steps.outer_step` brings them together now and then. In between their weights differ, and their moments always
do. So a checkpoint contains those of each: island 0's by the parameters' names, island i's as 'island i/NAME'. What all
have in common, such as frozen weights, it contains once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch

from training.base.errors import AgreedError
from training.engines.engine import EngineSetup, StepResult
from training.engines.parameter_shards import WEIGHTS, EngineState, ParameterShard, frozen_parameters
from training.engines.torch_engine import TorchEngine
from training.world.collectives import copy_from_main
from training.world.mesh import along
from training.world.world import World

# Kinds of tensors in the optimizer's state that are the same on all islands.
OUTER_WEIGHTS, OUTER_MOMENTUM = "outer_weights", "outer_momentum"
OUTER_RESIDUAL = "outer_residual"  # what an island has still to send of its way, its own
APPLIED_STEPS = "island/applied_steps"  # kept beside the buffers, which each rank saves: an island may skip a step


@dataclass(frozen=True)
class Islands:
    """A rank's groups in ranks that are divided into islands of neighbours.

    Attributes:
        own: the ranks of this rank's island.
        peers: the ranks, one of each island in their order, that have the same part of the training state.
    """

    own: World
    peers: World


def form_islands(world: World, number: int) -> Islands:
    """Divide the ranks into so many islands, a divisor of their number; a collective."""
    numbers = torch.arange(world.size).view(number, -1)
    return Islands(own=along(1, numbers, world), peers=along(0, numbers, world))


class IslandEngine(TorchEngine):
    """The engine of this rank's island, which begins with the weights that all begin with."""

    def __init__(self, setup: EngineSetup, islands: Islands) -> None:
        """Distribute the model over the island's ranks; a collective of all."""
        copy_from_main([*setup.module.parameters()], setup.world)
        super().__init__(dataclasses.replace(setup, world=islands.own))
        if self.loss_scale is not None:
            raise AgreedError("--local-steps: fp16 would have another loss scale on each island, use --precision fp32.")
        self._peers = islands.peers

    def step(self) -> StepResult | None:
        """As of every engine; whether it was applied is a tensor: other islands learn of it when outcomes are read."""
        result = super().step()
        if result is None or isinstance(result.applied, torch.Tensor):
            return result
        return StepResult(torch.tensor(result.applied, device=self._world.device), result.gradient_norm)

    def state(self) -> EngineState:
        """As of every engine; the outer state and what is frozen are among the parts of island 0."""
        own, frozen = super().state(), frozen_parameters(self.module).keys()
        shapes = dict(own.shapes)
        for island in range(1, self._peers.size):
            shapes |= {_prefix(island) + name: shape for name, shape in own.shapes.items() if name not in frozen}
        shards = own.shards
        if not self._peers.is_main:
            shards = [_of_island(shard, self._peers.rank) for shard in shards if shard.name not in frozen]
        applied = torch.full((self._accumulation_steps,), own.applied_steps)
        return dataclasses.replace(own, shapes=shapes, shards=shards, buffers=own.buffers | {APPLIED_STEPS: applied})

    def load_state(
        self,
        tensors: Mapping[str, Mapping[str, torch.Tensor]],
        buffers: Mapping[str, torch.Tensor],
        applied_steps: int,
    ) -> None:
        """As of every engine."""
        frozen = frozen_parameters(self.module).keys()
        own = {
            kind: values if kind in (OUTER_WEIGHTS, OUTER_MOMENTUM) else _OfIsland(values, self._peers.rank, frozen)
            for kind, values in tensors.items()
        }
        super().load_state(own, buffers, int(buffers[APPLIED_STEPS][0]))


def _prefix(island: int) -> str:
    """Return what precedes the names of an island's parameters in a checkpoint."""
    return f"island {island}/" if island else ""


def _of_island(shard: ParameterShard, island: int) -> ParameterShard:
    """Return a shard by its name in a checkpoint, without the outer state, which island 0 saves.

    The checkpoint's format takes what has no moments at all for frozen: then it keeps the outer state.
    """
    inner = {kind: tensor for kind, tensor in shard.tensors.items() if kind not in (OUTER_WEIGHTS, OUTER_MOMENTUM)}
    has_moments = inner.keys() != {WEIGHTS}
    return ParameterShard(_prefix(island) + shard.name, shard.offsets, inner if has_moments else shard.tensors)


class _OfIsland(Mapping[str, torch.Tensor]):
    """An island's tensors of a kind among those of a checkpoint, by the parameters' names."""

    def __init__(self, values: Mapping[str, torch.Tensor], island: int, frozen: Collection[str]) -> None:
        self._values, self._prefix, self._frozen = values, _prefix(island), frozen

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._values[name if name in self._frozen else self._prefix + name]

    def __iter__(self) -> Iterator[str]:
        return (name.removeprefix(self._prefix) for name in self._values)

    def __len__(self) -> int:
        return len(self._values)
