"""Islands: equal groups of ranks, each of which trains the model like a separate run.

`OuterSteps` synchronizes the islands periodically. The islands' weights differ between outer steps, and their moments
always differ, so a checkpoint contains the weights and moments of each island: those of island 0 under the parameters'
names, and those of island i as 'island i/NAME'. Common values, such as frozen weights, are saved only once.

A run may resume with a different number of islands: surplus islands are dropped, and new islands start as described in
`_of_own_island`.

Outer steps follow DiLoCo (Douillard et al. 2023, https://arxiv.org/abs/2311.08105, algorithm 1): the gradient is the
weights with which all islands began, minus the mean of their current weights, and SGD with Nesterov momentum applies
this gradient. The results are the outer weights, which are evaluated and exported; each island keeps the moments of its
own optimizer.

The outer state is stored in the optimizer's state next to the moments, as averages of the weights are, so it is
sharded, saved and resumed in the same way. With an outer precision of bf16, the outer state also contains the rounding
error of an island's change, which is added to the next change (error feedback; Karimireddy et al. 2019,
https://arxiv.org/abs/1901.09847).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch

from zerovision.training.base.errors import AgreedError
from zerovision.training.base.points import Loggers
from zerovision.training.base.units import plural
from zerovision.training.engines.engine import Averages, EngineSetup
from zerovision.training.engines.parameter_shards import (
    FURTHER,
    WEIGHTS,
    EngineState,
    ParameterShard,
    TakeBox,
    frozen_parameters,
)
from zerovision.training.engines.torch_engine import TorchEngine
from zerovision.training.recipe.optimizer import AVERAGES, exchange_with
from zerovision.training.world.collectives import copy_from_main, largest_over_ranks, mean_over_ranks
from zerovision.training.world.world import along

# Kinds of tensors in the optimizer's state that are the same on all islands.
OUTER_WEIGHTS, OUTER_MOMENTUM = "outer_weights", "outer_momentum"
OUTER_RESIDUAL = "outer_residual"  # the part of its change that an island has not sent yet; differs between islands
APPLIED_STEPS = "island/applied_steps"  # each rank saves this with its buffers, because an island may skip a step


def usable_islands(most: int, ranks: int, ranks_per_machine: int) -> int:
    """Return the largest number of islands up to `most` that are either whole machines or equal parts of a machine."""
    for islands in range(min(most, ranks), 1, -1):
        length, rest = divmod(ranks, islands)
        if not rest and (ranks_per_machine % length == 0 or length % ranks_per_machine == 0):
            return islands
    return 1


class IslandEngine(TorchEngine):
    """The engine of this rank's island; all islands begin with the same weights."""

    def __init__(self, setup: EngineSetup) -> None:
        """Divide the ranks into islands of neighboring ranks, and distribute the model over each island.

        This is a collective over all ranks.
        """
        copy_from_main([*setup.module.parameters()], setup.world)
        numbers = torch.arange(setup.world.size).view(setup.groups, -1)
        super().__init__(dataclasses.replace(setup, world=along(1, numbers, setup.world)))
        # The peers have the same part of the training state, one per island in order.
        self.peers, self.everyone = along(0, numbers, setup.world), setup.world
        self.group = "island" if setup.groups > 1 else ""
        if self.loss_scale is not None:
            raise AgreedError("--local-steps: fp16 would have its own loss scale on each island: use --precision fp32.")

    def state(self) -> EngineState:
        """See `Engine.state`; only island 0 includes the outer state and the frozen weights."""
        own, frozen = super().state(), frozen_parameters(self.module).keys()
        shapes = dict(own.shapes)
        for island in range(1, self.peers.size):
            shapes |= {_prefix(island) + name: shape for name, shape in own.shapes.items() if name not in frozen}
        shards = own.shards
        if not self.peers.is_main:
            shards = [_of_island(shard, self.peers.rank) for shard in shards if shard.name not in frozen]
        applied = torch.full((self._accumulation_steps,), own.applied_steps)
        first = self.peers.rank * self._world.size * self._accumulation_steps
        leaves, buffers = tuple(first + leaf for leaf in own.leaves), own.buffers | {APPLIED_STEPS: applied}
        return dataclasses.replace(own, shapes=shapes, shards=shards, buffers=buffers, leaves=leaves)

    def load_state(
        self, tensors: Mapping[str, TakeBox], buffers: Mapping[str, torch.Tensor], applied_steps: int
    ) -> None:
        """See `Engine.load_state`."""
        prefix, frozen = _prefix(self.peers.rank), frozen_parameters(self.module).keys()
        own = {
            kind: take if kind in (OUTER_WEIGHTS, OUTER_MOMENTUM) else _of_own_island(tensors, kind, prefix, frozen)
            for kind, take in tensors.items()
        }
        # Equal on all ranks of an island, unless its ranks were in different islands when the checkpoint was saved.
        applied = largest_over_ranks(buffers[APPLIED_STEPS].to(self._world.device), self._world)
        super().load_state(own, buffers, int(applied.max()))


def _prefix(island: int) -> str:
    """Return the prefix of an island's parameter names in a checkpoint."""
    return f"island {island}/" if island else ""


def number_of_islands(names: Iterable[str]) -> int:
    """Return the number of islands in a checkpoint, given its parameter names."""
    return 1 + max((int(found[1]) for found in map(FURTHER.match, names) if found), default=0)


def _of_island(shard: ParameterShard, island: int) -> ParameterShard:
    """Return a shard under its name in a checkpoint, without the outer state, which island 0 saves.

    A shard without other moments keeps the outer state, because one without any moments belongs to a frozen parameter.
    """
    inner = {kind: tensor for kind, tensor in shard.tensors.items() if kind not in (OUTER_WEIGHTS, OUTER_MOMENTUM)}
    has_moments = inner.keys() != {WEIGHTS}
    return ParameterShard(_prefix(island) + shard.name, shard.offsets, inner if has_moments else shard.tensors)


def _of_own_island(tensors: Mapping[str, TakeBox], kind: str, prefix: str, frozen: Collection[str]) -> TakeBox:
    """Return the function that reads an island's tensors of one kind from a checkpoint, by parameter name.

    An island that is not in the checkpoint begins with the outer weights, no rounding error, and island 0's moments.
    If the moments were zero, the island's first steps would be too large, because bias correction has already ended.
    """

    def take(name: str, box: tuple[slice, ...]) -> torch.Tensor:
        try:
            return tensors[kind](name if name in frozen else prefix + name, box)
        except KeyError:
            if kind == OUTER_RESIDUAL:
                return torch.zeros(())
            return tensors[OUTER_WEIGHTS if kind == WEIGHTS else kind](name, box)

    return take


class OuterSteps(Averages):
    """Takes an outer step every `local_steps` steps, and after the last step of the run."""

    def __init__(self, engine: IslandEngine, config: Any, total_steps: int, loggers: Loggers) -> None:
        self._engine, self._config = engine, config
        self._total_steps, self._loggers = total_steps, loggers
        self._is_rounded = config.outer_precision == "bf16"
        # The engine's state must be restored after this, so that the outer state is restored with it.
        zeros = [OUTER_MOMENTUM, *[OUTER_RESIDUAL] * self._is_rounded]
        for group in engine.optimizer.param_groups:
            group[AVERAGES] = (OUTER_WEIGHTS, *zeros)
        for weights, state in engine.optimizer.state.items():
            state[OUTER_WEIGHTS] = weights.detach().clone()
            state |= {kind: torch.zeros_like(weights) for kind in zeros}

    def describe(self) -> list[str]:
        """Describe the islands for the log."""
        config, engine = self._config, self._engine
        rounds = -(-self._total_steps // config.local_steps)
        return [
            f"{plural(engine.peers.size, 'island')} of {plural(engine.everyone.size // engine.peers.size, 'rank')}: "
            f"{plural(rounds, 'round')} of {config.local_steps} steps, each with an outer step at its end (learning "
            f"rate {config.outer_learning_rate:g}, momentum {config.outer_momentum:g}, {config.outer_precision}); the "
            "outer weights are evaluated and saved"
        ]

    def after_step(self, applied: bool | torch.Tensor, step: int) -> None:
        """Take an outer step if it is due, whether or not this island's step changed its weights; a collective."""
        since = step % self._config.local_steps
        if not since or step == self._total_steps:
            self._take_outer_step(step, since or self._config.local_steps)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """See `Averages`; uses the outer weights."""
        with_outer = partial(exchange_with, kind=OUTER_WEIGHTS)
        self._engine.change_weights(with_outer)
        yield
        self._engine.change_weights(with_outer)

    @torch.no_grad()
    def _take_outer_step(self, step: int, local_steps: int) -> None:
        """Make all islands continue from new outer weights and averaged BatchNorm statistics; a collective.

        Here, `local_steps` is the number of steps since the last outer step.
        """
        start, peers, states = time.perf_counter(), self._engine.peers, self._engine.optimizer.state
        sent = []
        for weights, state in states.items():
            way = state[OUTER_WEIGHTS] - weights
            if self._is_rounded:
                way += state[OUTER_RESIDUAL]
                torch.sub(way, way.bfloat16(), out=state[OUTER_RESIDUAL])
            sent.append(way.to(torch.bfloat16 if self._is_rounded else torch.float32).reshape(-1))
        sent_bytes = 0
        if sent:  # otherwise, neither this rank nor its peers update anything
            flat = torch.cat(sent)  # one tensor, because each message adds the latency of a slow link
            sent_bytes = 2 * (peers.size - 1) * -(-len(flat) // peers.size) * flat.itemsize
            means = mean_over_ranks(flat, peers).split([len(way) for way in sent])
            gradients = {weights: mean.view(weights.shape) for weights, mean in zip(states, means, strict=True)}
        self._engine.change_weights(lambda weights, state: self._update(weights, state, gradients[weights]))
        sent_bytes += self._engine.buffers.average(self._engine.everyone)
        values: dict[str, float] = {"round": -(-step // self._config.local_steps), "islands": peers.size}
        values |= {"local_steps": local_steps, "sent_bytes": sent_bytes}
        values |= {"seconds": round(time.perf_counter() - start, 4)}
        self._loggers.event("outer_step", {"step": step} | values)

    def _update(self, weights: torch.Tensor, state: dict[str, torch.Tensor], gradient: torch.Tensor) -> None:
        """Update one tensor as `torch.optim.SGD` with `nesterov` does."""
        outer, momentum = state[OUTER_WEIGHTS], state[OUTER_MOMENTUM]
        momentum.mul_(self._config.outer_momentum).add_(gradient)
        gradient = gradient.add(momentum, alpha=self._config.outer_momentum)
        weights.copy_(outer.add_(gradient, alpha=-self._config.outer_learning_rate))
