"""The objects that make up a training."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from zerovision.models.build import BuiltModel
from zerovision.training.base.heartbeat import HeartbeatWriter
from zerovision.training.base.points import Loggers
from zerovision.training.base.run_folder import RunFolder
from zerovision.training.base.timing import SpanClock
from zerovision.training.checkpoint.restore import FrozenWeights, TrainState
from zerovision.training.checkpoint.store import FoundCheckpoint
from zerovision.training.data.datasets import DatasetPair
from zerovision.training.data.image_list import ImageContents
from zerovision.training.data.loader import Loader
from zerovision.training.data.sampler import BatchPlan
from zerovision.training.engines.engine import Averages, Step
from zerovision.training.engines.flops import TrainingFlops
from zerovision.training.engines.precision import resolve_precision
from zerovision.training.observe.new_run import Origin
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
    """How this process comes to a run, with notes about that.

    Attributes:
        origin: what started it and how often it was restarted.
        heartbeat: signs of life for the launcher.
        plan_memory: predicts, on rank 0, a rank's bytes under configurations of the run.
        stop: the ranks' agreement on stopping.
        found: the checkpoint to resume from, None for a fresh start.
        groups: number of equal groups of ranks, each of which trains independently.
        notes: lines for the log.
        events: the engine's events for metrics.jsonl: kind -> values.
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
    """This rank's training and validation batches, and the watcher of files that the first epoch reads."""

    train: Loader
    val: Loader
    contents: ImageContents = LATER


@dataclass(frozen=True)
class RunModel:
    """The model of a run.

    Attributes:
        built: the model before sharding.
        averages: averages of the weights.
        freezer: freezes the layers that do not learn in an epoch.
        adapters: adapters of the model, to be merged into its weights.
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
    """A training: its settings, and the parts built from them; a trial is a `replace` of it.

    Attributes:
        config: the settings, with undecided ones resolved.
        world: the ranks.
        start: how this process comes to the run.
        folder: paths of the run's files.
        data: the data set, with the run's original preprocessing.
        plan: assigns samples to batches.
        task: what is learned.
        readers: the batches.
        model: the trained model.
        state: what changes from step to step: model, optimizer, sums and position.
        schedule: learning rate by step.
        step: trains on the micro-batches of a step.
        loggers: destinations of the numbers; none on ranks other than 0.
        clock: measures the spans of time.
        observers: observers of the steps.
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
        """The number of completed optimizer steps of the run."""
        return self.plan.position(self.state.progress)

    @property
    def total_steps(self) -> int:
        """The number of optimizer steps of the whole run."""
        return self.config.epochs * self.plan.steps_per_epoch

    def changed(self, **settings: Any) -> Run:
        """Return the run with other settings."""
        return dataclasses.replace(self, config=dataclasses.replace(self.config, **settings))

    def noting(self, *notes: str) -> Run:
        """Return the run with more lines for the log."""
        return dataclasses.replace(self, start=dataclasses.replace(self.start, notes=(*self.start.notes, *notes)))

    def close(self) -> None:
        """Flush the logs, end the workers, release the engine and the run's folder."""
        self.loggers.close()
        self.readers.train.close()
        self.readers.val.close()
        self.state.engine.close()
        if self.folder.lock is not None:
            self.folder.lock.close()
