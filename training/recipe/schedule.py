"""The learning rate as a function of the step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from training.config import TrainConfig


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up, then half a cosine (Loshchilov and Hutter 2017, https://arxiv.org/abs/1608.03983, eq. 5).

    With `base_batch_size` the peak follows the linear scaling rule of Goyal et al. 2017
    (https://arxiv.org/abs/1706.02677, section 2.1): peak = learning_rate * global_batch / base_batch_size.
    """

    peak: float
    total_steps: int
    warmup_steps: int
    final_scale: float
    head_steps: int = 0

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of optimizer step `step`, counted from 0 over the whole run."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
        return self.peak * (self.final_scale + (1 - self.final_scale) * cosine)

    def group_learning_rate(self, step: int, group_scale: float) -> float:
        """Return a parameter group's learning rate: 0 for the backbone while only the head is trained."""
        is_frozen = step < self.head_steps and group_scale != 1.0
        return 0.0 if is_frozen else self.learning_rate(step) * group_scale

    def set_learning_rates(self, groups: Iterable[dict[str, Any]], step: int) -> None:
        """Set the learning rate of every parameter group for optimizer step `step`."""
        for group in groups:
            group["lr"] = self.group_learning_rate(step, group["rate_scale"])


def build_schedule(config: TrainConfig, steps_per_epoch: int, global_batch: int, head_epochs: int) -> Schedule:
    """Build the schedule of a run.

    Args:
        config: the run's configuration.
        steps_per_epoch: optimizer steps per epoch.
        global_batch: images per optimizer step over all ranks and micro-steps.
        head_epochs: epochs in which only the new head is trained; 0 to train all layers from the start.
    """
    scale = global_batch / config.base_batch_size if config.base_batch_size else 1.0
    return Schedule(
        peak=config.learning_rate * scale,
        total_steps=config.epochs * steps_per_epoch,
        warmup_steps=_warmup_steps(config, steps_per_epoch),
        final_scale=config.final_learning_rate_scale,
        head_steps=head_epochs * steps_per_epoch,
    )


def _warmup_steps(config: TrainConfig, steps_per_epoch: int) -> int:
    if config.warmup_epochs == "auto":
        return min(steps_per_epoch, config.epochs * steps_per_epoch // 10)
    return round(config.warmup_epochs * steps_per_epoch)


def schedule_notes(schedule: Schedule) -> list[str]:
    """Return a note for the log if most of the run is warm-up."""
    if 2 * schedule.warmup_steps <= schedule.total_steps:
        return []
    return [
        f"the learning rate is still warming up in {schedule.warmup_steps} of {schedule.total_steps} steps: "
        "a lower --warmup-epochs, or more --epochs, trains at the rate that was asked for"
    ]
