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

import torch

from training.base.run_logger import Loggers
from training.base.units import plural
from training.engines.engine import Engine
from training.engines.islands import OUTER_MOMENTUM, OUTER_RESIDUAL, OUTER_WEIGHTS, Islands
from training.engines.norms import BLOCK
from training.engines.settings import EngineSettings
from training.recipe.optimizer import AVERAGES
from training.steps.compressed_mean import compressed_mean
from training.steps.weight_average import exchange_with
from training.world.collectives import mean_over_ranks
from training.world.world import World


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
        zeros = (OUTER_MOMENTUM, OUTER_RESIDUAL) if self._is_compressed else (OUTER_MOMENTUM,)
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
        local_steps = self._config.local_steps
        if step % local_steps and step != self._total_steps:
            return
        start = time.perf_counter()
        sent_bytes = self._take_outer_step() + self._engine.buffers.average(self._world)
        values: dict[str, float] = {"round": -(-step // local_steps), "islands": self._islands.peers.size}
        values |= {"local_steps": (step - 1) % local_steps + 1, "sent_bytes": sent_bytes}
        values |= {"seconds": round(time.perf_counter() - start, 4)}
        self._loggers.event("outer_step", {"step": step} | values)

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
    def _take_outer_step(self) -> int:
        """Let all islands go on from new outer weights; return the bytes that this rank sent. A collective."""
        states, peers = self._engine.optimizer.state, self._islands.peers
        # In one tensor: over slow links every message takes its time.
        ways = [(state[OUTER_WEIGHTS] - weights).reshape(-1) for weights, state in states.items()]
        if not ways:  # nor have the peers: an island's other ranks update all weights
            mean, sent_bytes = list[torch.Tensor](), 0
        elif self._is_compressed:
            mean, sent_bytes = self._compressed_mean(ways)
        else:
            flat = torch.cat(ways)
            mean = mean_over_ranks(flat, peers).split(list(map(len, ways)))
            sent_bytes = 2 * (peers.size - 1) * -(-len(flat) // peers.size) * flat.itemsize
        gradients = dict(zip(states, mean, strict=True))
        self._engine.change_weights(lambda weights, state: self._update(weights, state, gradients[weights]))
        return sent_bytes

    def _compressed_mean(self, ways: list[torch.Tensor]) -> tuple[list[torch.Tensor], int]:
        """Return the mean of the ways over islands, and the bytes that this rank sent; a collective."""
        kept = [state[OUTER_RESIDUAL] for state in self._engine.optimizer.state.values()]
        # Blocks are the engine's, which no rank shares with another: so the ranks of an island change no byte.
        padded = [
            torch.nn.functional.pad(way + residual.reshape(-1), (0, -way.numel() % BLOCK))
            for way, residual in zip(ways, kept, strict=True)
        ]
        blocks, lengths = torch.cat(padded).view(-1, BLOCK), list(map(len, padded))
        mean, left, sent_bytes = compressed_mean(blocks, self._config.outer_precision, self._islands.peers)
        for part, residual in zip(left.view(-1).split(lengths), kept, strict=True):
            residual.copy_(part[: residual.numel()].view(residual.shape))
        return [part[: len(way)] for part, way in zip(mean.reshape(-1).split(lengths), ways, strict=True)], sent_bytes

    def _update(self, weights: torch.Tensor, state: dict[str, torch.Tensor], gradient: torch.Tensor) -> None:
        """Update one tensor as `torch.optim.SGD` with `nesterov` does."""
        outer, momentum = state[OUTER_WEIGHTS], state[OUTER_MOMENTUM]
        gradient = gradient.view(weights.shape)
        momentum.mul_(self._config.outer_momentum).add_(gradient)
        gradient = gradient.add(momentum, alpha=self._config.outer_momentum)
        outer.add_(gradient, alpha=-self._config.outer_learning_rate)
        weights.copy_(outer)
