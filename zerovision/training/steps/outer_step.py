"""The outer step of DiLoCo: islands of ranks, each of which has trained by itself, agree on weights to go on from.

Douillard et al. 2023 (https://arxiv.org/abs/2311.08105, algorithm 1): the weights that all islands began with, less the
mean of those that they have come to, is the gradient of a step of SGD with Nesterov momentum. Its weights are the outer
ones, which are evaluated and exported; islands keep the moments of their own optimizers.

The outer state is in the optimizer's state beside the moments, as averages of the weights are: so it is sharded, saved
and resumed as those. With `--outer-precision` what rounding has kept back of an island's way is in it, too.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from zerovision.training.base.run_logger import Loggers
from zerovision.training.base.units import plural
from zerovision.training.engines.engine import Engine
from zerovision.training.engines.islands import OUTER_MOMENTUM, OUTER_RESIDUAL, OUTER_WEIGHTS, Islands
from zerovision.training.engines.norms import BLOCK
from zerovision.training.engines.settings import EngineSettings
from zerovision.training.recipe.optimizer import AVERAGES
from zerovision.training.steps.compressed_mean import compressed_mean
from zerovision.training.steps.weight_average import exchange_with
from zerovision.training.world.collectives import mean_over_ranks
from zerovision.training.world.world import World


class Exchanged(NamedTuple):
    """Mean over the islands of the ways [n], what of this island's was not sent [n] or nothing, and the bytes sent."""

    mean: torch.Tensor
    left: torch.Tensor
    sent_bytes: int


class OuterSteps:
    """Takes an outer step after every so many steps of the islands, and after the last of the run.

    Args:
        engine: of this rank's island, before its state is restored.
        islands: the groups of ranks.
        world: all ranks.
        config: how many steps lie between two outer steps, and their learning rate, momentum and precision.
        total_steps: of the run.
        loggers: of the run.
    """

    def __init__(
        self,
        engine: Engine,
        islands: Islands,
        world: World,
        config: EngineSettings,
        total_steps: int,
        loggers: Loggers,
    ) -> None:
        self._engine, self._islands, self._world, self._config = engine, islands, world, config
        self._total_steps, self._loggers = total_steps, loggers
        self._is_compressed = config.outer_precision != "fp32"
        zeros = [OUTER_MOMENTUM, *[OUTER_RESIDUAL] * self._is_compressed]
        for group in engine.optimizer.param_groups:
            group[AVERAGES] = (OUTER_WEIGHTS, *zeros)
        for weights, state in engine.optimizer.state.items():
            state[OUTER_WEIGHTS] = weights.detach().clone()
            state |= {kind: torch.zeros_like(weights) for kind in zeros}

    def describe(self) -> str:
        """Return what the islands do, for the log."""
        config, islands = self._config, self._islands
        rounds = -(-self._total_steps // config.local_steps)
        return (
            f"{plural(islands.peers.size, 'island')} of {plural(islands.own.size, 'rank')}: "
            f"{plural(rounds, 'round')} of {config.local_steps} steps, each with an outer step at its end (learning "
            f"rate {config.outer_learning_rate:g}, momentum {config.outer_momentum:g}, {config.outer_precision}); "
            "evaluated and saved are the outer weights"
        )

    def after_step(self, applied: bool | torch.Tensor, step: int) -> None:
        """Take an outer step if it is time; a collective.

        Args:
            applied: whether the step of this island changed its weights, which makes no difference here.
            step: of the run, from 1; skipped ones count.
        """
        since = step % self._config.local_steps
        if not since or step == self._total_steps:
            self._take_outer_step(step, since or self._config.local_steps)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Let the model compute with the outer weights inside the block; a collective at both ends.

        Afterwards every bit is as before. After an error the weights are not put back: other ranks may not know of it.
        """
        with_outer = partial(exchange_with, kind=OUTER_WEIGHTS)
        self._engine.change_weights(with_outer)
        yield
        self._engine.change_weights(with_outer)

    @torch.no_grad()
    def _take_outer_step(self, step: int, local_steps: int) -> None:
        """Let all islands go on from new outer weights and averaged statistics of BatchNorm; a collective.

        Args:
            step: of the run.
            local_steps: of the round that ends with it.
        """
        start, states = time.perf_counter(), self._engine.optimizer.state
        ways = [(state[OUTER_WEIGHTS] - weights).reshape(-1) for weights, state in states.items()]
        if self._is_compressed:
            # Blocks are the engine's, which no rank shares with another: so the ranks of an island change no byte.
            kept = [state[OUTER_RESIDUAL].reshape(-1) for state in states.values()]
            ways = [pad(way + residual, (0, -len(way) % BLOCK)) for way, residual in zip(ways, kept, strict=True)]
        # In one tensor: over slow links every message takes its time. None has what no rank of its peers updates.
        flat = torch.cat(ways) if ways else torch.empty(0, device=self._world.device)
        mean, left, sent_bytes = _exchange(flat, self._config.outer_precision, self._islands.peers)
        lengths = [len(way) for way in ways]
        means, residuals = (flat.split(lengths if len(flat) else []) for flat in (mean, left))
        gradients = {
            weights: part[: weights.numel()].view(weights.shape) for weights, part in zip(states, means, strict=True)
        }
        self._engine.change_weights(lambda weights, state: self._update(weights, state, gradients[weights]))
        for (weights, state), residual in zip(states.items(), residuals, strict=False):  # none of fp32
            state[OUTER_RESIDUAL].copy_(residual[: weights.numel()].view(weights.shape))
        sent_bytes += self._engine.buffers.average(self._world)
        values: dict[str, float] = {"round": -(-step // self._config.local_steps), "islands": self._islands.peers.size}
        values |= {"local_steps": local_steps, "sent_bytes": sent_bytes}
        values |= {"seconds": round(time.perf_counter() - start, 4)}
        self._loggers.event("outer_step", {"step": step} | values)

    def _update(self, weights: torch.Tensor, state: dict[str, torch.Tensor], gradient: torch.Tensor) -> None:
        """Update one tensor as `torch.optim.SGD` with `nesterov` does."""
        outer, momentum = state[OUTER_WEIGHTS], state[OUTER_MOMENTUM]
        momentum.mul_(self._config.outer_momentum).add_(gradient)
        gradient = gradient.add(momentum, alpha=self._config.outer_momentum)
        weights.copy_(outer.add_(gradient, alpha=-self._config.outer_learning_rate))


def _exchange(flat: torch.Tensor, precision: str, peers: World) -> Exchanged:
    """Return the mean over peers of a tensor [n], for int8 and bf16 of whole blocks; a collective."""
    if not len(flat):
        return Exchanged(flat, flat, 0)
    if precision == "fp32":
        part = -(-len(flat) // peers.size)
        return Exchanged(mean_over_ranks(flat, peers), flat[:0], 2 * (peers.size - 1) * part * flat.itemsize)
    mean, left, sent_bytes = compressed_mean(flat.view(-1, BLOCK), precision, peers)
    return Exchanged(mean.reshape(-1), left.view(-1), sent_bytes)
