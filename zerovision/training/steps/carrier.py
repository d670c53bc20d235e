"""The one carrier of a training."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from zerovision.models.build import BuiltModel
from zerovision.training.base.heartbeat import HeartbeatWriter
from zerovision.training.base.run_folder import RunFolder
from zerovision.training.base.run_lock import Origin
from zerovision.training.base.run_logger import Loggers
from zerovision.training.base.timing import SpanClock
from zerovision.training.checkpoint.frozen import FrozenWeights
from zerovision.training.checkpoint.restore import TrainState
from zerovision.training.checkpoint.store import FoundCheckpoint
from zerovision.training.data.datasets import DatasetPair
from zerovision.training.data.image_list import ImageContents
from zerovision.training.data.loader import Loader
from zerovision.training.data.sampler import BatchPlan
from zerovision.training.engines.engine import Averages, Step
from zerovision.training.engines.flops import TrainingFlops
from zerovision.training.engines.precision import resolve_precision
from zerovision.training.observe.observer import Observers
from zerovision.training.recipe.schedule import Schedule
from zerovision.training.recipe.tuning import Adapters, BackboneFreezer
from zerovision.training.tasks.task import Task
from zerovision.training.world.signals import StopRequest
from zerovision.training.world.world import World

if TYPE_CHECKING:
    from zerovision.training.config import TrainConfig


LATER: Any = None  # of a part that `setup.build` adds


@dataclass(frozen=True)
class Start:
    """How this process comes to a run, and what it has to say of that.

    Attributes:
        origin: what started it and how often it was restarted.
        heartbeat: signs of life for the launcher.
        plan_memory: predicts on rank 0 the bytes that a rank takes under configurations of the run.
        stop: the ranks' agreement on stopping.
        found: the checkpoint to resume from, None for a fresh start.
        groups: equal ones of ranks, of which each trains by itself.
        notes: lines for the log.
        events: of the engine, for metrics.jsonl: kind -> values.
        began: when the minutes of `--minutes` began, in seconds since 1970.
    """

    origin: Origin = field(default_factory=Origin)
    heartbeat: HeartbeatWriter = field(default_factory=lambda: HeartbeatWriter(None, 0, 0.0))
    plan_memory: Callable[..., list[int]] | None = None
    stop: StopRequest = field(default_factory=StopRequest)
    found: FoundCheckpoint | None = None
    groups: int = 1
    notes: tuple[str, ...] = ()
    events: dict[str, dict[str, Any]] = field(default_factory=dict)
    began: float = field(default_factory=time.time)


@dataclass(frozen=True)
class Readers:
    """This rank's training and validation batches, and what watches the files that the first epoch reads."""

    train: Loader
    val: Loader
    contents: ImageContents = LATER


@dataclass(frozen=True)
class RunModel:
    """The model of a run.

    Attributes:
        built: before it was sharded.
        averages: of the weights.
        freezer: freezes what does not learn in an epoch.
        adapters: of the model, to be merged into its weights.
        head_epochs: epochs in which only the head is trained.
        frozen: the file of weights that are not trained; None if all are.
        flops: counts the model's operations, on rank 0.
    """

    built: BuiltModel
    freezer: BackboneFreezer = LATER
    adapters: Adapters = LATER
    averages: Averages = LATER
    head_epochs: int = 0
    frozen: FrozenWeights | None = None
    flops: TrainingFlops | None = None


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training: what it was asked for, and what is built of that, part by part; a trial is a `replace` of it.

    Attributes:
        config: the settings, those that were left open as they are resolved.
        world: the ranks.
        start: how this process comes to the run.
        folder: paths of the run's files.
        data: the data set, prepared as the run began with.
        plan: which samples are in which batch.
        task: what is learned.
        readers: of the images.
        model: that is trained.
        state: what changes from step to step: model, optimizer, sums and position.
        schedule: learning rate by step.
        step: how the micro-batches of a step are trained on.
        loggers: destinations of the numbers; none on ranks other than 0.
        clock: spans of the time.
        observers: of the steps.
    """

    config: TrainConfig
    world: World
    start: Start = field(default_factory=Start)
    folder: RunFolder = LATER
    data: DatasetPair = LATER
    plan: BatchPlan = LATER
    task: Task = LATER
    readers: Readers = LATER
    model: RunModel = LATER
    state: TrainState = LATER
    schedule: Schedule = LATER
    step: Step = LATER
    loggers: Loggers = field(default_factory=lambda: Loggers([]))
    clock: SpanClock = field(default_factory=SpanClock)
    observers: Observers = LATER

    @property
    def precision(self) -> str:
        """'bf16', 'fp16' or 'fp32', never 'auto'."""
        return resolve_precision(self.config.precision, self.world.device)

    @property
    def position(self) -> int:
        """Optimizer steps of the run that are done."""
        return self.plan.position(self.state.progress)

    @property
    def total_steps(self) -> int:
        """Optimizer steps of the whole run."""
        return self.config.epochs * self.plan.steps_per_epoch

    def changed(self, **settings: Any) -> Run:
        """Return the same with other settings."""
        return dataclasses.replace(self, config=dataclasses.replace(self.config, **settings))

    def noting(self, *notes: str) -> Run:
        """Return the same with more lines for the log."""
        return dataclasses.replace(self, start=dataclasses.replace(self.start, notes=(*self.start.notes, *notes)))

    def close(self) -> None:
        """Flush the logs, end the workers, release the engine and the run's folder."""
        self.loggers.close()
        self.readers.train.close()
        self.readers.val.close()
        self.state.engine.close()
        if self.folder.lock is not None:
            self.folder.lock.close()
