"""What comes before a run is built: its data, its folder, and the checkpoint that it goes on from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch

from zerovision.training.base.heartbeat import HeartbeatWriter
from zerovision.training.base.run_folder import EVALUATION, RunFolder
from zerovision.training.base.run_lock import Origin
from zerovision.training.config import TrainConfig
from zerovision.training.config.check import note_unused_flags
from zerovision.training.data import data_options, load_data
from zerovision.training.engines.precision import resolve_precision
from zerovision.training.engines.settings import check_files
from zerovision.training.observe.evaluation import check_replaceable
from zerovision.training.observe.new_run import create_run_folder, removed_if_refused, run_folder
from zerovision.training.resume import Resolved, resolve
from zerovision.training.steps.audit import check_audit
from zerovision.training.world.collectives import agreed, broadcast_object
from zerovision.training.world.signals import StopRequest
from zerovision.training.world.world import World


@dataclass(frozen=True)
class RunFacts:
    """What a prediction of a run depends on.

    Attributes:
        config: with the resolved precision, and the channels of the images.
        classes: of the data set.
        image_size: of the training images, pixels.
        ranks: that share one training state: all, or those of a group that trains by itself.
        ranks_per_machine: of these.
        has_gpus: whether they compute on GPUs.
    """

    config: TrainConfig
    classes: int
    image_size: int | str
    ranks: int
    ranks_per_machine: int
    has_gpus: bool


@dataclass(frozen=True)
class RunStart:
    """A start of a run.

    Attributes:
        origin: what started it and how often it was restarted.
        heartbeat: signs of life for the launcher.
        plan_memory: predicts on rank 0 the bytes that a rank takes under configurations of the run.
        stop: the ranks' agreement on stopping.
    """

    origin: Origin
    heartbeat: HeartbeatWriter
    plan_memory: Callable[[RunFacts, Sequence[TrainConfig]], list[int]] | None = None
    stop: StopRequest = field(default_factory=StopRequest)


FIRST_START = RunStart(Origin(), HeartbeatWriter(None, 0, 0.0))


@dataclass(frozen=True)
class Prepared(Resolved):
    """A run of which nothing is built yet: what its checkpoint decides, and more.

    Attributes:
        world: the ranks.
        precision: 'bf16', 'fp16' or 'fp32', never 'auto'.
        folder: paths of the run's files.
        lock: on rank 0 the file that locks the run folder as long as it is open.
    """

    world: World
    precision: str
    folder: RunFolder
    lock: IO[bytes] | None

    def changed(self, **settings: Any) -> Prepared:
        """Return the same with other settings."""
        return dataclasses.replace(self, config=dataclasses.replace(self.config, **settings))

    def decide(self, note: str, **settings: Any) -> Prepared:
        """Return the same with settings that were left to this machine, and a note on them."""
        return dataclasses.replace(self.changed(**settings), notes=[*self.notes, note])

    def memory_facts(self) -> RunFacts:
        """Return on what the memory that a rank needs depends."""
        world, ranks = self.world, self.world.size // self.groups  # that share one training state
        resolved: dict[str, Any] = {"precision": self.precision, "image_channels": self.data.preprocessing.channels}
        return RunFacts(
            config=dataclasses.replace(self.config, **resolved),
            classes=len(self.data.class_names),
            image_size=self.data.train.sizes[-1],
            ranks=ranks,
            ranks_per_machine=min(world.local_size, ranks),
            has_gpus=world.device.type == "cuda",
        )


def prepare(config: TrainConfig, world: World, start: RunStart = FIRST_START) -> Prepared:
    """Read what decides about a run, in the order in which a mistake is cheapest to report; a collective.

    Args:
        config: what to train.
        world: the ranks.
        start: which start of the run this is.

    Raises:
        UserError: on all ranks, for a mistake that any of them found.
    """
    agreed(lambda: check_audit(config, world), world)
    precision = agreed(lambda: resolve_precision(config.precision, world.device), world)
    agreed(lambda: check_files(config), world)
    data = agreed(lambda: load_data(data_options(config)), world)
    folder, lock = create_folder(config, start, world)
    with removed_if_refused(folder):
        resolved = resolve(config, folder, data, world, is_restart=start.origin.restarts > 0)
    if resolved.config.threads_per_rank:
        torch.set_num_threads(resolved.config.threads_per_rank)
    resolved.notes[:0] = note_unused_flags(resolved.config)
    return Prepared(**vars(resolved), world=world, precision=precision, folder=folder, lock=lock)


def create_folder(config: TrainConfig, start: RunStart, world: World) -> tuple[RunFolder, IO[bytes] | None]:
    """Create the run's folders on rank 0, see `create_run_folder`; a collective.

    Returns:
        The folders, and on rank 0 the file that locks the run as long as it is open.
    """

    def create() -> tuple[RunFolder, IO[bytes]]:
        if config.run_name:
            check_replaceable(run_folder(config).path / EVALUATION)  # by that of the best epoch
        return create_run_folder(config, start.origin)

    created, lock = agreed(lambda: create() if world.is_main else (None, None), world)
    paths = [str(created.log_dir), created.name] if created else None
    log_dir, name = broadcast_object(paths, world)
    if world.is_main:
        start.heartbeat.run_name(name)
    return created or RunFolder(Path(log_dir), name), lock
