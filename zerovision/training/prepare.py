"""Prepares a run before it is built: its data, its folder, and the checkpoint to resume from."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zerovision.training.base.run_folder import EVALUATION, RunFolder
from zerovision.training.config import TrainConfig
from zerovision.training.config.check import note_unused_flags
from zerovision.training.data import data_options, load_data
from zerovision.training.engines.precision import resolve_precision
from zerovision.training.engines.settings import check_files
from zerovision.training.observe.evaluation import check_replaceable
from zerovision.training.observe.new_run import create_run_folder, removed_if_refused, run_folder
from zerovision.training.resume import resolve
from zerovision.training.steps.audit import check_audit
from zerovision.training.steps.carrier import Run, Start
from zerovision.training.world.collectives import agreed, broadcast_object
from zerovision.training.world.world import World


@dataclass(frozen=True)
class RunFacts:
    """The facts that predictions about a run depend on.

    Attributes:
        config: settings with the resolved precision, and the channels of the images.
        classes: number of classes.
        image_size: size of the training images, pixels.
        ranks: number of ranks that share one training state: all, or those of an independent group.
        ranks_per_machine: how many of these are on each machine.
        has_gpus: whether they use GPUs.
    """

    config: TrainConfig
    classes: int
    image_size: int | str
    ranks: int
    ranks_per_machine: int
    has_gpus: bool


def memory_facts(run: Run) -> RunFacts:
    """Return the facts that determine the memory of a rank."""
    world, ranks = run.world, run.world.size // run.start.groups  # that share one training state
    resolved: dict[str, Any] = {"precision": run.precision, "image_channels": run.data.preprocessing.channels}
    return RunFacts(
        config=dataclasses.replace(run.config, **resolved),
        classes=len(run.data.class_names),
        image_size=run.data.train.sizes[-1],
        ranks=ranks,
        ranks_per_machine=min(world.local_size, ranks),
        has_gpus=world.device.type == "cuda",
    )


def prepare(config: TrainConfig, world: World, start: Start) -> Run:
    """Return a prepared run, not yet built; checks come in the order in which mistakes are cheapest to report.

    This is a collective.

    Raises:
        UserError: on all ranks, for a mistake that any rank found.
    """
    agreed(lambda: check_audit(config, world), world)
    agreed(lambda: resolve_precision(config.precision, world.device), world)
    agreed(lambda: check_files(config), world)
    data = agreed(lambda: load_data(data_options(config)), world)
    run = Run(config=config, world=world, start=start, folder=create_folder(config, start, world), data=data)
    with removed_if_refused(run.folder):
        run = resolve(run)
    if run.config.threads_per_rank:
        torch.set_num_threads(run.config.threads_per_rank)
    notes = (*note_unused_flags(run.config), *run.start.notes)
    return dataclasses.replace(run, start=dataclasses.replace(run.start, notes=notes))


def create_folder(config: TrainConfig, start: Start, world: World) -> RunFolder:
    """Create the run's folders on rank 0, see `create_run_folder`; a collective."""

    def create() -> RunFolder:
        if config.run_name:
            check_replaceable(run_folder(config).path / EVALUATION)  # by that of the best epoch
        return create_run_folder(config, start.origin)

    created = agreed(lambda: create() if world.is_main else None, world)
    log_dir, name = broadcast_object([str(created.log_dir), created.name] if created else None, world)
    if world.is_main:
        start.heartbeat.run_name(name)
    return created or RunFolder(Path(log_dir), name)
