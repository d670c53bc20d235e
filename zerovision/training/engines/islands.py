"""Islands: equal groups of ranks of which each trains the model by itself, as a run of these ranks alone would.

`steps.outer_step` brings them together now and then. In between their weights differ, and their moments always
do. So a checkpoint contains those of each: island 0's by the parameters' names, island i's as 'island i/NAME'. What all
have in common, such as frozen weights, it contains once.

A run may go on with another number of islands: the last ones are dropped, and new ones begin as `_of_own_island` says.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from zerovision.training.base.errors import AgreedError
from zerovision.training.engines.engine import EngineSetup, StepResult
from zerovision.training.engines.parameter_shards import (
    WEIGHTS,
    EngineState,
    ParameterShard,
    TakeBox,
    frozen_parameters,
)
from zerovision.training.engines.torch_engine import TorchEngine
from zerovision.training.world.collectives import copy_from_main, largest_over_ranks
from zerovision.training.world.mesh import along
from zerovision.training.world.world import World

# Kinds of tensors in the optimizer's state that are the same on all islands.
OUTER_WEIGHTS, OUTER_MOMENTUM = "outer_weights", "outer_momentum"
OUTER_RESIDUAL = "outer_residual"  # what an island has still to send of its way, its own
FURTHER = re.compile(r"island ([0-9]{1,6})/")  # how the name of a further island's parameter begins in a checkpoint
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


def usable_islands(most: int, ranks: int, ranks_per_machine: int) -> int:
    """Return into how many islands ranks can be divided, all of whole machines or of equal parts of one; 1 always."""

    def is_usable(islands: int) -> bool:
        length, rest = divmod(ranks, islands)
        return not rest and (ranks_per_machine % length == 0 or length % ranks_per_machine == 0)

    return next((islands for islands in range(min(most, ranks), 1, -1) if is_usable(islands)), 1)


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
        first = self._peers.rank * self._world.size * self._accumulation_steps
        leaves, buffers = tuple(first + leaf for leaf in own.leaves), own.buffers | {APPLIED_STEPS: applied}
        return dataclasses.replace(own, shapes=shapes, shards=shards, buffers=buffers, leaves=leaves)

    def load_state(
        self,
        tensors: Mapping[str, TakeBox],
        buffers: Mapping[str, torch.Tensor],
        applied_steps: int,
    ) -> None:
        """As of every engine."""
        prefix, frozen = _prefix(self._peers.rank), frozen_parameters(self.module).keys()
        own = {
            kind: take if kind in (OUTER_WEIGHTS, OUTER_MOMENTUM) else _of_own_island(tensors, kind, prefix, frozen)
            for kind, take in tensors.items()
        }
        # The same on all ranks of an island, unless these were of several.
        applied = largest_over_ranks(buffers[APPLIED_STEPS].to(self._world.device), self._world)
        super().load_state(own, buffers, int(applied.max()))


def _prefix(island: int) -> str:
    """Return what precedes the names of an island's parameters in a checkpoint."""
    return f"island {island}/" if island else ""


def number_of_islands(names: Iterable[str]) -> int:
    """Return how many islands a checkpoint has, given the names of its parameters."""
    return 1 + max((int(found[1]) for found in map(FURTHER.match, names) if found), default=0)


def of_first_island(shapes: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    """Return the shapes of island 0's parameters, and of those that all islands have in common."""
    return {name: list(shape) for name, shape in shapes.items() if not FURTHER.match(name)}


def _of_island(shard: ParameterShard, island: int) -> ParameterShard:
    """Return a shard by its name in a checkpoint, without the outer state, which island 0 saves.

    The checkpoint's format takes what has no moments at all for frozen: then it keeps the outer state.
    """
    inner = {kind: tensor for kind, tensor in shard.tensors.items() if kind not in (OUTER_WEIGHTS, OUTER_MOMENTUM)}
    has_moments = inner.keys() != {WEIGHTS}
    return ParameterShard(_prefix(island) + shard.name, shard.offsets, inner if has_moments else shard.tensors)


def _of_own_island(tensors: Mapping[str, TakeBox], kind: str, prefix: str, frozen: Collection[str]) -> TakeBox:
    """Return what takes an island's tensors of a kind out of a checkpoint's, by the parameters' names.

    An island that the checkpoint has not begins with the outer weights, nothing left to send, and island 0's moments:
    with zeros its first steps would be too long, because the count of steps corrects their bias no more.
    """

    def take(name: str, box: tuple[slice, ...]) -> torch.Tensor:
        try:
            return tensors[kind](name if name in frozen else prefix + name, box)
        except KeyError:
            if kind == OUTER_RESIDUAL:
                return torch.zeros(())
            return tensors[OUTER_WEIGHTS if kind == WEIGHTS else kind](name, box)

    return take
