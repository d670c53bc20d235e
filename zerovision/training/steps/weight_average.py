"""Averages of the weights over the steps: the exponential moving average, and lookahead's slow weights.

The averages are part of the optimizer's state, so they are sharded, saved and restored like its moments.

The moving average (EMA) is evaluated and exported. It includes BatchNorm's statistics, as in timm, because the running
statistics follow the latest weights, while the EMA's weights are older.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from zerovision.training.engines.engine import Averages, Engine
from zerovision.training.recipe.optimizer import AVERAGES, exchange_with

EMA, SLOW_WEIGHTS = "ema", "slow_weights"  # kinds of tensors in the optimizer's state
LOOKAHEAD_SHARE = 0.5  # of the way from the slow weights to the fast ones: timm.optim.Lookahead's alpha
WARM_UP_GAMMA, WARM_UP_POWER = 1.0, 2 / 3  # timm.utils.ModelEmaV3's


class WeightAverages(Averages):
    """The averages that a run uses: EMA, slow weights, both or neither; built before the engine's state is restored."""

    def __init__(self, engine: Engine, ema_decay: float, lookahead_steps: int, steps_per_epoch: int) -> None:
        self._engine, self._decay = engine, ema_decay  # the share of the EMA that a step keeps; 0 for no EMA
        self._lookahead_steps, self._steps_per_epoch = lookahead_steps, steps_per_epoch  # 0 for no lookahead
        kinds = ((EMA,) if ema_decay else ()) + ((SLOW_WEIGHTS,) if lookahead_steps else ())
        for group in engine.optimizer.param_groups:
            group[AVERAGES] = kinds
        for weights, state in engine.optimizer.state.items():
            state.update({kind: weights.detach().clone() for kind in kinds})
        if ema_decay:
            engine.buffers.keep_averages()

    def after_step(self, applied: bool | torch.Tensor, step: int) -> None:
        """See `Averages`."""
        if self._lookahead_steps and (step % self._lookahead_steps == 0 or step % self._steps_per_epoch == 0):
            # Zhang et al. 2019 (https://arxiv.org/abs/1907.08610, algorithm 1). As in timm.optim.Lookahead, the first
            # pull only copies the weights to the slow weights; as in timm's train.py, each epoch ends with a pull.
            is_first = step == min(self._lookahead_steps, self._steps_per_epoch)
            # `applied` is converted to a number, even if it is on the device: a skipped step causes no pull.
            self._engine.change_weights(partial(_pull_slow_weights, share=applied * 1.0, is_first=is_first))
        if self._decay and applied is not False:
            self._update_ema(applied, step)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """See `Averages`; uses the EMA if the run has one."""
        if not self._decay:
            yield
            return
        with_ema = partial(exchange_with, kind=EMA)
        self._engine.change_weights(with_ema)
        with self._engine.buffers.averages_in_use():
            yield
        self._engine.change_weights(with_ema)

    @torch.no_grad()
    def _update_ema(self, applied: bool | torch.Tensor, step: int) -> None:
        weight = 1 - ema_decay_at(step, self._decay)
        weights = [*self._engine.optimizer.state]
        averages = [state[EMA] for state in self._engine.optimizer.state.values()]
        if averages and isinstance(applied, torch.Tensor):  # stays on the device
            moved, share = torch._foreach_lerp(averages, weights, weight), applied * 1.0
            torch._foreach_mul_(moved, share)  # one of the two summands is all zeros
            torch._foreach_mul_(averages, 1.0 - share)
            torch._foreach_add_(averages, moved)
        elif averages:
            torch._foreach_lerp_(averages, weights, weight)
        self._engine.buffers.update_averages(weight * applied)


def ema_decay_at(step: int, decay: float) -> float:
    """Return the EMA's decay in a step of the run, counted from 1, with a warm-up as in `timm.utils.ModelEmaV3`."""
    return min(1 - (1 + (step - 1) / WARM_UP_GAMMA) ** -WARM_UP_POWER, decay)


def _pull_slow_weights(
    weights: torch.Tensor, state: dict[str, torch.Tensor], *, share: float | torch.Tensor, is_first: bool
) -> None:
    """Move the slow weights toward the fast ones, which continue from there; a `share` of 0 changes no fast weight."""
    slow = state[SLOW_WEIGHTS]
    if is_first:
        slow.copy_(weights)
    slow.add_((weights - slow) * (LOOKAHEAD_SHARE * share))
    weights.lerp_(slow, share)
