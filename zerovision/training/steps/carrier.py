"""The objects that make up a training run."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from zerovision.models.build import BuiltModel
from zerovision.training.base.heartbeat import HeartbeatWriter
from zerovision.training.base.points import Loggers
from zerovision.training.base.progress import Progress
from zerovision.training.base.run_folder import RunFolder
from zerovision.training.base.timing import SpanClock
from zerovision.training.checkpoint.store import FoundCheckpoint, FrozenWeights, TrainState
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


LATER: Any = None  # placeholder for a part that `setup.build` adds


@dataclass(frozen=True)
class Resumed(FoundCheckpoint):
    """The checkpoint that a run resumes from, with the values that the run takes from its manifest."""

    progress: Progress  # position and best epoch to continue with
    settings: dict[str, Any]  # of the run that saved the checkpoint; only a `batch_size` that is used has been checked
    identity: dict[str, Any]  # see `Manifest.identity`
    parameters: Collection[str]  # names of the parameters
    epochs: int  # of the run that saved the checkpoint; 0 if the number is not known
    global_batch: int  # number of images in a step
    preparation: dict[str, Any]  # values of `DataOptions` with which the run prepares images


@dataclass(frozen=True)
class Start:
    """The circumstances in which this process starts or resumes a run.

    Attributes:
        origin: what started this process, and how often the launcher or Slurm has restarted it.
        heartbeat: writer of this rank's heartbeats for the launcher.
        plan_memory: function that predicts a rank's memory in bytes for configurations of the run; only on rank 0.
        stop: the ranks' agreement on when to stop.
        found: the checkpoint to resume from, or None for a fresh start.
        groups: number of equal groups of ranks, each of which trains independently.
        notes: lines for the log.
        events: the engine's events for metrics.jsonl: kind -> values.
        began: time from which `--minutes` is counted, in seconds since 1970.
    """

    origin: Origin = field(default_factory=Origin)
    heartbeat: HeartbeatWriter = field(default_factory=lambda: HeartbeatWriter(None, 0, 0.0))
    plan_memory: Callable[..., list[int]] | None = None
    stop: StopRequest = field(default_factory=StopRequest)
    found: Resumed | None = None
    groups: int = 1
    notes: tuple[str, ...] = ()
    events: dict[str, dict[str, Any]] = field(default_factory=dict)
    began: float = field(default_factory=time.time)


@dataclass(frozen=True)
class Readers:
    """This rank's loaders of training and validation batches, and the record of the image files that they read."""

    train: Loader
    val: Loader
    contents: ImageContents = LATER


@dataclass(frozen=True)
class RunModel:
    """The model of a run."""

    built: BuiltModel  # before sharding
    freezer: BackboneFreezer = LATER
    adapters: Adapters = LATER  # to be merged into the weights
    averages: Averages = LATER
    head_epochs: int = 0  # number of epochs in which only the head is trained
    frozen: FrozenWeights | None = None  # the file of the weights that are not trained; None if all are trained
    flops: TrainingFlops | None = None  # only on rank 0


@dataclass(frozen=True, kw_only=True)
class Run:
    """A training run: its settings and the parts built from them; a trial is a copy made with `dataclasses.replace`.

    Attributes:
        config: the settings, including values that were chosen automatically.
        world: the ranks.
        start: how this process starts or resumes the run.
        folder: paths of the run's files.
        data: the data set, with the run's original preprocessing.
        plan: assignment of samples to batches.
        task: the task that the model learns.
        readers: loaders of this rank's batches.
        model: the trained model.
        state: what changes from step to step: model, optimizer, score sums and position.
        schedule: learning rate schedule.
        step: function that trains on the micro-batches of a step.
        loggers: the run's loggers; ranks other than 0 have none.
        clock: clock that measures the spans of time.
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
        """The precision in use: 'bf16', 'fp16' or 'fp32', never 'auto'."""
        return resolve_precision(self.config.precision, self.world.device)

    @property
    def position(self) -> int:
        """The number of completed optimizer steps of the run."""
        return self.plan.position(self.state.progress)

    @property
    def total_steps(self) -> int:
        """The number of optimizer steps of the whole run."""
        return self.config.epochs * self.plan.steps_per_epoch

    @property
    def ranks_per_state(self) -> int:
        """The number of ranks that share one training state: all ranks, or those of one independent group."""
        return self.world.size // self.start.groups

    def changed(self, **settings: Any) -> Run:
        """Return a copy of the run with changed settings."""
        return dataclasses.replace(self, config=dataclasses.replace(self.config, **settings))

    def noting(self, *notes: str) -> Run:
        """Return a copy of the run with additional lines for the log."""
        return dataclasses.replace(self, start=dataclasses.replace(self.start, notes=(*self.start.notes, *notes)))

    def close(self) -> None:
        """Flush the logs, end the workers, and release the engine and the run's folder."""
        self.loggers.close()
        self.readers.train.close()
        self.readers.val.close()
        self.state.engine.close()
        if self.folder.lock is not None:
            self.folder.lock.close()
