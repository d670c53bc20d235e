"""What changes from step to step, which a checkpoint contains and resume restores, and what stays the same."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from training.checkpoint.saver import Saver
    from training.data.sampler import BatchPlan
    from training.observe.heartbeat import HeartbeatWriter
    from training.observe.loggers import Loggers
    from training.observe.scores import ScoreSums
    from training.observe.step_metrics import Timing
    from training.parallel.engine import Engine
    from training.parallel.signals import StopRequest
    from training.parallel.world import World
    from training.recipe.loss import Loss
    from training.recipe.nonfinite_steps import NonFiniteGuard
    from training.recipe.schedule import Schedule
    from training.recipe.weight_average import WeightAverages


@dataclass(frozen=True)
class Progress:
    """Where a run stands.

    Attributes:
        epoch: the epoch to go on with, from 0.
        step: the optimizer step of that epoch to go on with, from 0; the number of steps of an epoch where only its
            evaluation is left.
        best_top1: the best validation top-1 so far, -1 before the first evaluation.
        best_epoch: the epoch of it, from 1; 0 before the first evaluation.
        epochs_without_better: evaluations since then, for early stopping.
        skipped_steps: optimizer steps skipped so far because a gradient was not finite.
        bad_steps_in_row: how many of them were the latest steps.
        diverged_epochs_in_row: how many of the latest epochs had diverged, see `training.recipe.divergence`.
    """

    epoch: int = 0
    step: int = 0
    best_top1: float = -1.0
    best_epoch: int = 0
    epochs_without_better: int = 0
    skipped_steps: int = 0
    bad_steps_in_row: int = 0
    diverged_epochs_in_row: int = 0

    def after_epoch(self, top1: float, *, is_best: bool, has_diverged: bool) -> Progress:
        """Return the position at the start of the next epoch, given the validation top-1 of this one."""
        return dataclasses.replace(
            self,
            epoch=self.epoch + 1,
            step=0,
            best_top1=top1 if is_best else self.best_top1,
            best_epoch=self.epoch + 1 if is_best else self.best_epoch,
            epochs_without_better=0 if is_best else self.epochs_without_better + 1,
            diverged_epochs_in_row=self.diverged_epochs_in_row + 1 if has_diverged else 0,
        )


@dataclass
class TrainState:
    """Everything that changes from step to step.

    Dropout, sample order and augmentation are functions of the seed and the position, so no generator is part of it.

    Attributes:
        engine: parameters, buffers, optimizer state, number of applied updates and fp16's loss scale.
        sums: score sums of the running epoch.
        progress: position of the run, best epoch and counts.
    """

    engine: Engine
    sums: ScoreSums
    progress: Progress


@dataclass(frozen=True)
class TrainContext:
    """What stays the same over all steps of a run.

    Attributes:
        world: the ranks.
        plan: which samples are in which batch.
        schedule: learning rate by step.
        num_classes: classes C of the data set.
        image_shape: channels, height and width of the images.
        seed: of sample order, augmentation and dropout.
        loss: each sample's training loss, [B], of the model's output and their batch.
        log_every_steps: optimizer steps between two logging points; 'auto' as in `step_metrics.LogPace`.
        epochs: epochs of the run.
        loggers: destinations of the numbers; none on ranks other than 0.
        stop: the ranks' agreement on stopping.
        guard: undoes steps that are not finite.
        heartbeat: signs of life for the launcher.
        timing: what measures time.
        saver: writes checkpoints; None if nothing is saved.
        averages: of the weights over the steps; None for none.
    """

    world: World
    plan: BatchPlan
    schedule: Schedule
    num_classes: int
    image_shape: tuple[int, int, int]
    seed: int
    loss: Loss
    log_every_steps: int | Literal["auto"]
    epochs: int
    loggers: Loggers
    stop: StopRequest
    guard: NonFiniteGuard
    heartbeat: HeartbeatWriter
    timing: Timing
    saver: Saver | None = None
    averages: WeightAverages | None = None

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.epochs * self.plan.steps_per_epoch
