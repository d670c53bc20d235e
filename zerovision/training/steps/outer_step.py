"""The outer step of DiLoCo: islands of ranks, each of which has trained by itself, agree on weights to go on from.

Douillard et al. 2023 (https://arxiv.org/abs/2311.08105, algorithm 1): the weights that all islands began with, less the
mean of those that they have come to, is the gradient of a step of SGD with Nesterov momentum. Its weights are the outer
ones, which are evaluated and exported; islands keep the moments of their own optimizers.

The outer state is in the optimizer's state beside the moments, as averages of the weights are: so it is sharded, saved
and resumed as those. With `--outer-precision bf16` what rounding has kept back of an island's way is in it, too, and is
added to its next one: error feedback (Karimireddy et al. 2019, https://arxiv.org/abs/1901.09847).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from zerovision.training.base.run_logger import Loggers
from zerovision.training.base.units import plural
from zerovision.training.engines.engine import Engine
from zerovision.training.engines.islands import OUTER_MOMENTUM, OUTER_RESIDUAL, OUTER_WEIGHTS, Islands
from zerovision.training.engines.settings import EngineSettings
from zerovision.training.recipe.optimizer import AVERAGES
from zerovision.training.steps.weight_average import exchange_with
from zerovision.training.world.collectives import mean_over_ranks
from zerovision.training.world.world import World


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
        self._is_rounded = config.outer_precision == "bf16"
        zeros = [OUTER_MOMENTUM, *[OUTER_RESIDUAL] * self._is_rounded]
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
        start, peers, states = time.perf_counter(), self._islands.peers, self._engine.optimizer.state
        sent = []
        for weights, state in states.items():
            way = state[OUTER_WEIGHTS] - weights
            if self._is_rounded:
                way += state[OUTER_RESIDUAL]
                torch.sub(way, way.bfloat16(), out=state[OUTER_RESIDUAL])
            sent.append(way.to(torch.bfloat16 if self._is_rounded else torch.float32).reshape(-1))
        sent_bytes = 0
        if sent:  # else no rank of its peers updates anything
            flat = torch.cat(sent)  # in one tensor: over slow links every message takes its time
            sent_bytes = 2 * (peers.size - 1) * -(-len(flat) // peers.size) * flat.itemsize
            means = mean_over_ranks(flat, peers).split([len(way) for way in sent])
            gradients = {weights: mean.view(weights.shape) for weights, mean in zip(states, means, strict=True)}
        self._engine.change_weights(lambda weights, state: self._update(weights, state, gradients[weights]))
        sent_bytes += self._engine.buffers.average(self._world)
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
