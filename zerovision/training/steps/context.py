"""What stays the same over all steps of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from zerovision.training.base.heartbeat import HeartbeatWriter
from zerovision.training.base.run_logger import Loggers
from zerovision.training.checkpoint.saver import Saver
from zerovision.training.data.sampler import BatchPlan
from zerovision.training.engines.engine import Averages, Step
from zerovision.training.observe.sample_history import SampleHistory
from zerovision.training.observe.step_metrics import Timing
from zerovision.training.recipe.schedule import Schedule
from zerovision.training.steps.nonfinite_steps import NonFiniteGuard
from zerovision.training.tasks.contrast import Neighbours
from zerovision.training.world.signals import StopRequest
from zerovision.training.world.world import World


@dataclass(frozen=True)
class TrainContext:
    """What stays the same over all steps of a run.

    Attributes:
        world: the ranks.
        plan: which samples are in which batch.
        schedule: learning rate by step.
        num_classes: classes C of the data set.
        keeps_probabilities: whether an evaluation does, as `SampleRecorder`.
        image_shape: channels, height and width of the images.
        seed: of sample order, augmentation and dropout.
        step: how the micro-batches of a step are trained on.
        log_every_steps: optimizer steps between two logging points; 'auto' as in `step_metrics.LogPace`.
        epochs: epochs of the run.
        loggers: destinations of the numbers; none on ranks other than 0.
        stop: the ranks' agreement on stopping.
        guard: undoes steps that are not finite.
        heartbeat: signs of life for the launcher.
        timing: what measures time.
        saver: writes checkpoints; None if nothing is saved.
        averages: of the weights; None for none.
        neighbours: tells classes in an evaluation; None if the model does.
        sets: float32 [S, C] on the device, the classes of each label; None if it is one.
        thresholds: as of `SampleRecorder`.
        log_hashes: optimizer steps between two lines of hashes; 0 for none.
        history: of the training images; None if it is not kept.
        local_steps: between two exchanges of groups that train apart; 1 for one group.
    """

    world: World
    plan: BatchPlan
    schedule: Schedule
    num_classes: int
    image_shape: tuple[int, int, int]
    seed: int
    step: Step
    log_every_steps: int | Literal["auto"]
    epochs: int
    loggers: Loggers
    stop: StopRequest
    guard: NonFiniteGuard
    heartbeat: HeartbeatWriter
    timing: Timing
    saver: Saver | None = None
    averages: Averages | None = None
    neighbours: Neighbours | None = None
    sets: torch.Tensor | None = None
    thresholds: np.ndarray | None = None
    log_hashes: int = 0
    keeps_probabilities: bool = False
    history: SampleHistory | None = None
    local_steps: int = 1

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.epochs * self.plan.steps_per_epoch
