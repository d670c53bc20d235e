"""Builds a run: everything that it consists of, once, in the order in which a mistake is cheapest to report."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from zerovision.training.base.errors import UserError
from zerovision.training.base.progress import Progress
from zerovision.training.base.run_logger import Loggers
from zerovision.training.checkpoint.frozen import keep_frozen
from zerovision.training.checkpoint.restore import TrainState
from zerovision.training.config.check import needing_torch
from zerovision.training.data.datasets import ImageDataset
from zerovision.training.data.image_list import ImageContents
from zerovision.training.data.loader import Loader, build_loaders
from zerovision.training.data.sampler import EvaluationPlan, build_plan
from zerovision.training.engines.build_engine import build_engine, parallel_plan, set_up_engine
from zerovision.training.engines.compilation import resolve_compile
from zerovision.training.engines.engine import Averages, EngineSetup, Step
from zerovision.training.engines.model import build_training_model
from zerovision.training.engines.parameter_shards import frozen_parameters
from zerovision.training.engines.settings import TORCH, ways_of
from zerovision.training.engines.ways import Way
from zerovision.training.observe.environment import describe_run
from zerovision.training.observe.loggers import open_loggers
from zerovision.training.recipe import read_tune
from zerovision.training.recipe.schedule import build_schedule, head_epochs_of
from zerovision.training.recipe.tuning import Adapters, BackboneFreezer
from zerovision.training.resume import check_fit, identity_of
from zerovision.training.steps.accumulate import Accumulate
from zerovision.training.steps.carrier import Readers, Run, RunModel, RunTask
from zerovision.training.steps.weight_average import WeightAverages
from zerovision.training.tasks.class_scores import check_best_by
from zerovision.training.tasks.contrast import MOST_COMPARED, VIEWS, GradientCache, Neighbours
from zerovision.training.tasks.labels import build_loss
from zerovision.training.tasks.of_weights import task_of_labels
from zerovision.training.tasks.scores import ScoreSums
from zerovision.training.teacher import load_teacher
from zerovision.training.world.collectives import agreed


def build(run: Run) -> Run:
    """Build the parts of a run; a collective.

    Raises:
        UserError: on all ranks, for a mistake that any of them found.
    """
    for add in (_add_plan, _add_task, _add_readers, _add_model, _add_engine):
        run = add(run)
    readers = {"train": run.readers.train, "val": run.readers.val}
    contents = ImageContents(run.folder, run.data, readers, run.world, run.loggers)
    return dataclasses.replace(run, readers=dataclasses.replace(run.readers, contents=contents))


def _add_plan(run: Run) -> Run:
    """Add which samples are in which batch, and the learning rate by step."""
    config, world = run.config, run.world
    views = VIEWS if config.is_contrastive else 1
    dealt = (world.data.size, views, run.start.groups, parallel_plan(config, world).neighbours)
    plan = agreed(lambda: build_plan(config, run.data.train.source, *dealt), world)
    schedule = build_schedule(config, plan.steps_per_epoch, plan.global_batch, head_epochs_of(config))
    return dataclasses.replace(run, plan=plan, schedule=schedule)


def _add_task(run: Run) -> Run:
    """Add what is learned, and how a step trains."""
    config, world, data = run.config, run.world, run.data
    run = dataclasses.replace(run, task=RunTask(learns_from=load_teacher(config, data, run.precision, world)))
    step = agreed(lambda: _build_step(run), world)
    keeps = agreed(lambda: check_best_by(config.best_by, data, config.micro_batch, world.data.size), world)
    return dataclasses.replace(run, step=step, task=dataclasses.replace(run.task, keeps_probabilities=keeps))


def _build_step(run: Run) -> Step:
    """Return how a step trains: on the loss of each image, or on one over all images of a step.

    Raises:
        UserError: Images have weights of their own that the loss does not know.
    """
    config, data, world = run.config, run.data, run.world
    if data.train.source.loss_weights is not None and (config.is_contrastive or config.mixup or config.cutmix):
        cause = f"--loss {config.loss}" if config.is_contrastive else "--mixup and --cutmix"
        raise UserError(f"--data {config.data}: {cause} cannot weight single images: leave out the column weight.")
    if config.is_contrastive:
        return GradientCache(world.data, run.plan.leaves, config.temperature, len(data.class_names))
    task = task_of_labels(len(data.class_names), data.label_targets(world.device), None)
    told = (config, data.class_names, data.train_counts, world.device)
    loss = build_loss(*told, build=task.losses, teacher=run.task.learns_from)
    of_ways = (way.step(loss) for way in ways_of(config, TORCH))
    return next(filter(None, of_ways), Accumulate(loss))


def _add_readers(run: Run) -> Run:
    """Add the loaders, and the training images that tell classes if no classifier is trained.

    Worker processes take seconds to start: they do so while the model and the engine are built.
    """
    config, world, data, plan = run.config, run.world, run.data, run.plan
    if not config.is_contrastive:
        train, val = agreed(lambda: build_loaders(config, data, plan, world), world)
        return dataclasses.replace(run, readers=Readers(train, val))
    compared = ImageDataset(data.train.source, data.preprocessing, most_bad=data.train.most_bad)
    train, val = agreed(lambda: build_loaders(config, data, plan, world, [compared]), world)
    stride = -(-len(compared) // MOST_COMPARED)
    each_once = EvaluationPlan(-(-len(compared) // stride), config.micro_batch, world.data.size, stride)
    loader = Loader(compared, each_once, world.data.rank, workers=train.pool or 0, device=world.device)
    neighbours = Neighbours(loader, len(data.class_names), world.data)
    task = dataclasses.replace(run.task, neighbours=neighbours)
    return dataclasses.replace(run, readers=Readers(train, val), task=task)


def _add_model(run: Run) -> Run:
    """Add the model, and refuse a checkpoint that does not fit the run."""
    config, found, data = run.config, run.start.found, run.data
    built, flops = build_training_model(config, data, run.world, loads_weights=found is None)
    flops = flops if config.features == "computed" else None
    run = dataclasses.replace(run, model=RunModel(built, head_epochs=head_epochs_of(config), flops=flops))
    if found is not None:
        agreed(lambda: check_fit(found, config, identity_of(run), run.plan.steps_per_epoch, data), run.world)
    return run


def _add_engine(run: Run) -> Run:
    """Add the engine, with what logs and averages its weights."""
    config, world, model = run.config, run.world, run.model
    compiles = _compiles(run)
    setup, ways = set_up_engine(config, model.built, run.precision, world, needing_torch(config), compiles=compiles)
    run = run.changed(compile="on" if compiles else "off")
    run = dataclasses.replace(run, loggers=_open_loggers(run, setup, ways), model=_tuned(run))
    setup = dataclasses.replace(
        setup,
        must_compile=config.compile == "on",
        records_graphs=config.compile != "off" and _computes_alike(run),
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


def _compiles(run: Run) -> bool:
    """Return whether the model is compiled, the same on all ranks; a collective."""
    config, data = run.config, run.data
    pixels = config.epochs * len(data.train) * math.prod(data.train.preprocessing.sides)
    # Not a loss that compares images: its first pass would be another network, with other dropout.
    # Nor a network in stages, which ends in the midst of a forward, or whose layers other ranks compute, too.
    return (
        not config.is_contrastive
        and config.features == "computed"  # else nothing is left to compile
        and config.ranks_per_replica == 1
        and resolve_compile(config, pixels, run.world)
    )


def _computes_alike(run: Run) -> bool:
    """Return whether a network's forward and backward are the same kernels in every step, of this rank alone."""
    config = run.config
    is_whole = config.ranks_per_replica == 1 and not config.sync_batchnorm
    is_all_trained = read_tune(config.tune)[0] == "full" and not run.model.head_epochs
    is_computed = config.features == "computed" and not config.activation_checkpointing
    return is_whole and is_all_trained and is_computed and not config.is_contrastive


def _open_loggers(run: Run, setup: EngineSetup, ways: Sequence[Way]) -> Loggers:
    if not run.world.is_main:
        return Loggers([])
    facts = describe_run(run.world, run.precision, run.data, run.model.built)
    files = {name: content for way in ways for name, content in way.files(setup).items()}
    first_step = run.plan.position(run.start.found.manifest.progress) if run.start.found else 0
    return open_loggers(run.config, run.folder, facts, files, first_step)


def _tuned(run: Run) -> RunModel:
    """Return the model with what tunes it, before it is sharded; a collective."""
    module, frozen = run.model.built.module, None
    if read_tune(run.config.tune)[0] != "full":  # what is not trained is written once, beside the checkpoints
        kept = (run.folder.checkpoints, frozen_parameters(module), run.start.found)
        frozen = agreed(lambda: keep_frozen(*kept, is_main=run.world.is_main), run.world)
    freezer = BackboneFreezer(module, run.model.built.head_parameter_names)
    return dataclasses.replace(run.model, freezer=freezer, adapters=Adapters(module), frozen=frozen)
