"""Prepares a run, then builds each of its parts once, in the order that reports mistakes as early as possible."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from zerovision.training.base.points import Loggers
from zerovision.training.base.progress import Progress
from zerovision.training.base.run_folder import EVALUATION, RunFolder
from zerovision.training.checkpoint.store import TrainState, keep_frozen
from zerovision.training.config import TrainConfig
from zerovision.training.config.check import needing_torch, note_unused_flags
from zerovision.training.data import data_options, load_data
from zerovision.training.data.image_list import ImageContents
from zerovision.training.data.loader import build_loaders
from zerovision.training.data.sampler import build_plan
from zerovision.training.engines.build import build_engine, build_training_model, parallel_plan, set_up_engine
from zerovision.training.engines.compilation import resolve_compile
from zerovision.training.engines.engine import Averages, EngineSetup, Loss, Step
from zerovision.training.engines.parameter_shards import frozen_parameters
from zerovision.training.engines.precision import resolve_precision
from zerovision.training.engines.settings import TORCH, check_files, ways_of
from zerovision.training.engines.ways import Way
from zerovision.training.loop import Accumulate
from zerovision.training.observe.environment import describe_run
from zerovision.training.observe.evaluation import check_replaceable
from zerovision.training.observe.loggers import open_loggers
from zerovision.training.observe.new_run import create_run_folder, removed_if_refused, run_folder
from zerovision.training.recipe import read_tune
from zerovision.training.recipe.schedule import build_schedule, head_epochs_of
from zerovision.training.recipe.tuning import Adapters, BackboneFreezer
from zerovision.training.resume import check_fit, choose_checkpoint, identity_of
from zerovision.training.steps.audit import check_audit
from zerovision.training.steps.carrier import Readers, Run, RunModel, Start
from zerovision.training.steps.weight_average import WeightAverages
from zerovision.training.tasks.scores import ScoreSums
from zerovision.training.tasks.settings import asked_task
from zerovision.training.world.collectives import agreed, broadcast_object
from zerovision.training.world.world import World


def build(run: Run) -> Run:
    """Build the parts of a run, or raise a UserError on all ranks; a collective."""
    for add in (_add_task, _add_step, _add_model, _add_engine):
        run = add(run)
    readers = {"train": run.readers.train, "val": run.readers.val}
    contents = ImageContents(run.folder, run.data, readers, run.world, run.loggers)
    return dataclasses.replace(run, readers=dataclasses.replace(run.readers, contents=contents))


def _add_task(run: Run) -> Run:
    """Add the task, the assignment of samples to batches, and the learning rate schedule."""
    config, world, task = run.config, run.world, asked_task(run.config)
    dealt = (world.data.size, task.views, run.start.groups, parallel_plan(config, world).gradient_shards)
    plan = agreed(lambda: build_plan(config, run.data.train.source, *dealt), world)
    schedule = build_schedule(config, plan.steps_per_epoch, plan.global_batch, head_epochs_of(config))
    return dataclasses.replace(run, task=task, plan=plan, schedule=schedule)


def _add_step(run: Run) -> Run:
    """Add the loaders and the step function, whose loss is computed per image or over all images of a step."""
    run.task.prepare(run.data, run.precision, run.world)

    def of_losses(loss: Loss) -> Step:
        return next(filter(None, (way.step(loss) for way in ways_of(run.config, TORCH))), Accumulate(loss))

    step = agreed(lambda: run.task.step(run.plan.leaves, of_losses), run.world)
    # The server that forks workers takes seconds to start, during which the model and the engine are built.
    build = partial(build_loaders, run.config, run.data, run.plan, run.world)
    readers = Readers(*agreed(lambda: run.task.readers(build), run.world))
    return dataclasses.replace(run, step=step, readers=readers)


def _add_model(run: Run) -> Run:
    """Add the model, and reject a checkpoint that does not fit the run."""
    config, found, data = run.config, run.start.found, run.data
    built, flops = build_training_model(config, data, run.world, loads_weights=found is None)
    flops = flops if config.features == "computed" else None
    run = dataclasses.replace(run, model=RunModel(built, head_epochs=head_epochs_of(config), flops=flops))
    if found is not None:
        agreed(lambda: check_fit(found, config, identity_of(run), run.plan.steps_per_epoch, data), run.world)
    return run


def _add_engine(run: Run) -> Run:
    """Add the engine, the loggers and the averages of the weights."""
    config, world, built, train = run.config, run.world, run.model.built, run.data.train
    # Do not compile if images go through the model twice (the first pass would be a different network, with different
    # dropout), if the model is cut into stages, which end in the middle of a forward pass, or if ranks share layers.
    compiles = (
        not config.embedding
        and config.features == "computed"  # otherwise nothing is left to compile
        and config.ranks_per_replica == 1
        and resolve_compile(config, config.epochs * len(train) * math.prod(train.preprocessing.sides), world)
    )
    setup, ways = set_up_engine(config, built, run.precision, world, needing_torch(config), compiles=compiles)
    run = run.changed(compile="on" if compiles else "off")
    run = dataclasses.replace(run, loggers=_open_loggers(run, setup, ways), model=_tuned(run))
    setup = dataclasses.replace(
        setup,
        static_graph=config.compile != "off" and _is_static(run),
        image_shape=run.data.preprocessing.shape,
        groups=run.start.groups,
    )
    engine = build_engine(setup, ways)
    of_ways = (way.averages(engine, run.total_steps, run.loggers) for way in ways)
    averages: Averages = next(filter(None, of_ways), None) or WeightAverages(
        engine, config.ema, config.lookahead, run.plan.steps_per_epoch
    )
    run = run.noting(*averages.describe(), *setup.notes)
    sums = ScoreSums(len(run.data.class_names), world.device, run.data.label_targets(world.device))
    return dataclasses.replace(
        run,
        start=dataclasses.replace(run.start, events=setup.events),
        state=TrainState(engine, sums, Progress()),
        model=dataclasses.replace(run.model, averages=averages),
    )


def _is_static(run: Run) -> bool:
    """Return whether forward and backward use the same kernels in every step and involve only this rank."""
    config = run.config
    is_whole = config.ranks_per_replica == 1 and not config.sync_batchnorm
    is_all_trained = read_tune(config.tune)[0] == "full" and not run.model.head_epochs
    is_computed = config.features == "computed" and not config.activation_checkpointing
    return is_whole and is_all_trained and is_computed and not config.embedding


def _open_loggers(run: Run, setup: EngineSetup, ways: Sequence[Way]) -> Loggers:
    if not run.world.is_main:
        return Loggers([])
    facts = describe_run(run.world, run.precision, run.data, run.model.built)
    files = {name: content for way in ways for name, content in way.files(setup).items()}
    first_step = run.plan.position(run.start.found.progress) if run.start.found else 0
    return open_loggers(run.config, run.folder, facts, files, first_step)


def _tuned(run: Run) -> RunModel:
    """Return the model prepared for `--tune`, before it is sharded; a collective."""
    module, frozen = run.model.built.module, None
    if read_tune(run.config.tune)[0] != "full":  # frozen weights are written once, next to the checkpoints
        kept = (run.folder.checkpoints, frozen_parameters(module), run.start.found)
        frozen = agreed(lambda: keep_frozen(*kept, is_main=run.world.is_main), run.world)
    freezer = BackboneFreezer(module, run.model.built.head_parameter_names)
    return dataclasses.replace(run.model, freezer=freezer, adapters=Adapters(module), frozen=frozen)


def prepare(config: TrainConfig, world: World, start: Start) -> Run:
    """Return a run that is prepared but not yet built, or raise a UserError on all ranks; a collective."""
    agreed(lambda: check_audit(config, world), world)  # the cheapest checks come first
    agreed(lambda: resolve_precision(config.precision, world.device), world)
    agreed(lambda: check_files(config), world)
    data = agreed(lambda: load_data(data_options(config)), world)
    run = Run(config=config, world=world, start=start, folder=create_folder(config, start, world), data=data)
    with removed_if_refused(run.folder):
        run = choose_checkpoint(run)
    if run.config.threads_per_rank:
        torch.set_num_threads(run.config.threads_per_rank)
    notes = (*note_unused_flags(run.config), *run.start.notes)
    return dataclasses.replace(run, start=dataclasses.replace(run.start, notes=notes))


def create_folder(config: TrainConfig, start: Start, world: World) -> RunFolder:
    """Create the run's folders on rank 0; see `create_run_folder`; a collective."""

    def create() -> RunFolder:
        if config.run_name:
            check_replaceable(run_folder(config).path / EVALUATION)  # the best epoch's evaluation replaces it
        return create_run_folder(config, start.origin)

    created = agreed(lambda: create() if world.is_main else None, world)
    log_dir, name = broadcast_object([str(created.log_dir), created.name] if created else None, world)
    if world.is_main:
        start.heartbeat.run_name(name)
    return created or RunFolder(Path(log_dir), name)
