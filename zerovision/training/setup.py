"""Builds a run: everything that it consists of, once, in the order in which a mistake is cheapest to report."""

from __future__ import annotations

import dataclasses
import hashlib
import math
from dataclasses import dataclass
from typing import Any

from zerovision.models.build import BuiltModel
from zerovision.training.base.errors import UserError
from zerovision.training.base.heartbeat import SLOW_PHASE
from zerovision.training.base.progress import Progress
from zerovision.training.base.run_logger import Loggers
from zerovision.training.checkpoint.frozen import FrozenWeights, keep_frozen
from zerovision.training.checkpoint.restore import TrainState
from zerovision.training.checkpoint.saver import Saver
from zerovision.training.config import TrainConfig
from zerovision.training.config.check import needing_torch
from zerovision.training.data.datasets import DatasetPair, ImageDataset
from zerovision.training.data.image_list import ImageContents
from zerovision.training.data.loader import Loader, build_loaders
from zerovision.training.data.sampler import BatchPlan, EvaluationPlan, build_plan
from zerovision.training.engines.build_engine import build_engine, parallel_plan, set_up_engine
from zerovision.training.engines.compilation import resolve_compile
from zerovision.training.engines.engine import Averages, Step
from zerovision.training.engines.flops import TrainingFlops
from zerovision.training.engines.model import build_training_model
from zerovision.training.engines.parameter_shards import frozen_parameters
from zerovision.training.engines.settings import TORCH, ways_of
from zerovision.training.observe.environment import describe_run
from zerovision.training.observe.loggers import open_loggers
from zerovision.training.observe.sample_history import MOST_IMAGES, SampleHistory
from zerovision.training.observe.step_metrics import start_timing
from zerovision.training.prepare import Prepared, RunStart
from zerovision.training.recipe import read_tune
from zerovision.training.recipe.schedule import Schedule, build_schedule, head_epochs_of
from zerovision.training.recipe.tuning import Adapters, BackboneFreezer
from zerovision.training.resume import DATA_SET, NORMALIZATION, check_fit, preparation_of
from zerovision.training.steps.accumulate import Accumulate
from zerovision.training.steps.audit import Audited
from zerovision.training.steps.context import TrainContext
from zerovision.training.steps.nonfinite_steps import NonFiniteGuard
from zerovision.training.steps.weight_average import WeightAverages
from zerovision.training.tasks.class_scores import check_best_by
from zerovision.training.tasks.contrast import MOST_COMPARED, VIEWS, GradientCache, Neighbours
from zerovision.training.tasks.labels import build_loss
from zerovision.training.tasks.of_weights import task_of_labels
from zerovision.training.tasks.scores import ScoreSums
from zerovision.training.teacher import Teacher, load_teacher
from zerovision.training.world.collectives import agreed
from zerovision.training.world.world import World


@dataclass(frozen=True)
class Run(Prepared):
    """Everything that a run consists of: what was prepared, with `compile` as resolved, and what is built of it.

    Attributes:
        built: the model, before it was sharded.
        plan: which samples are in which batch.
        teacher: whose answers the run learns; None without.
        step: how the micro-batches of a step are trained on.
        schedule: learning rate by step.
        head_epochs: epochs in which only the head is trained.
        state: model, optimizer and position.
        averages: of the weights.
        freezer: freezes what does not learn in an epoch.
        adapters: of the model, to be merged into its weights.
        frozen: the file of weights that are not trained; None if all are.
        flops: counts the model's operations, on rank 0.
        loggers: none on ranks other than 0.
        events: of the engine, for metrics.jsonl: kind -> values.
        train_loader: this rank's training batches.
        val_loader: this rank's validation batches.
        neighbours: tells classes in an evaluation; None if the model does.
        keeps_probabilities: whether an evaluation does, as `SampleRecorder`.
        contents: watches the files that the first epoch reads.
    """

    built: BuiltModel
    plan: BatchPlan
    teacher: Teacher | None
    step: Step
    schedule: Schedule
    head_epochs: int
    state: TrainState
    averages: Averages
    freezer: BackboneFreezer
    adapters: Adapters
    frozen: FrozenWeights | None
    flops: TrainingFlops | None
    loggers: Loggers
    events: dict[str, dict[str, Any]]
    train_loader: Loader
    val_loader: Loader
    neighbours: Neighbours | None
    keeps_probabilities: bool
    contents: ImageContents

    @property
    def identity(self) -> dict[str, Any]:
        """What a checkpoint and the run that resumes from it must agree on, beside the recipe."""
        return _identity(self.data, self.built, self.plan, self.teacher) | {NORMALIZATION: preparation_of(self.data)}

    @property
    def position(self) -> int:
        """Optimizer steps of the run that are done."""
        return self.plan.position(self.state.progress)

    def close(self) -> None:
        """Flush the logs, end the workers, release the engine."""
        self.loggers.close()
        self.train_loader.close()
        self.val_loader.close()
        self.state.engine.close()
        if self.lock is not None:
            self.lock.close()


def build(prepared: Prepared) -> Run:
    """Build a run; a collective.

    Raises:
        UserError: on all ranks, for a mistake that any of them found.
    """
    config, world, precision, data = prepared.config, prepared.world, prepared.precision, prepared.data
    folder, found = prepared.folder, prepared.found
    head_epochs = head_epochs_of(config)
    views = VIEWS if config.is_contrastive else 1
    dealt = (world.data.size, views, prepared.groups, parallel_plan(config, world).neighbours)
    plan = agreed(lambda: build_plan(config, data.train.source, *dealt), world)
    teacher = load_teacher(config, data, precision, world)
    step = agreed(lambda: _build_step(config, data, plan, world, teacher), world)
    keeps = agreed(lambda: check_best_by(config.best_by, data, config.micro_batch, world.data.size), world)
    # Worker processes take seconds to start: they do so while the model and the engine are built.
    train_loader, val_loader, neighbours = agreed(lambda: _build_readers(config, data, plan, world), world)
    built, flops = build_training_model(config, data, world, loads_weights=found is None)
    if found is not None:
        checkpoint, identity = found, _identity(data, built, plan, teacher)
        agreed(lambda: check_fit(checkpoint, config, identity, plan.steps_per_epoch, data), world)
    pixels = config.epochs * len(data.train) * math.prod(data.train.preprocessing.sides)
    # Not a loss that compares images: its first pass would be another network, with other dropout.
    # Nor a network in stages, which ends in the midst of a forward, or whose layers other ranks compute, too.
    compiles = (
        not config.is_contrastive
        and config.features == "computed"  # else nothing is left to compile
        and config.ranks_per_replica == 1
        and resolve_compile(config, found.manifest.config.get("compile") if found else None, pixels, world)
    )
    setup, ways = set_up_engine(config, built, precision, world, needing_torch(config), compiles=compiles)
    first_step = plan.position(found.manifest.progress) if found else 0
    loggers = Loggers([])
    if world.is_main:
        files = {name: content for way in ways for name, content in way.files(setup).items()}
        loggers = open_loggers(config, folder, describe_run(world, precision, data, built), files, first_step)
    freezer, adapters = BackboneFreezer(built.module, built.head_parameter_names), Adapters(built.module)
    frozen = None
    if read_tune(config.tune)[0] != "full":  # what is not trained is written once, beside the checkpoints
        kept = (folder.checkpoints, frozen_parameters(built.module), found)
        frozen = agreed(lambda: keep_frozen(*kept, is_main=world.is_main), world)
    setup = dataclasses.replace(
        setup,
        must_compile=config.compile == "on",
        records_graphs=config.compile != "off" and _computes_alike(config, head_epochs),
        image_shape=data.preprocessing.shape,
        groups=prepared.groups,
    )
    engine = build_engine(setup, ways)
    steps = plan.steps_per_epoch
    of_ways = (way.averages(engine, config.epochs * steps, loggers) for way in ways)
    averages = next(filter(None, of_ways), None) or WeightAverages(engine, config.ema, config.lookahead, steps)
    notes = [*prepared.notes, *averages.describe(), *setup.notes]
    changed: dict[str, Any] = {"config": dataclasses.replace(config, compile="on" if compiles else "off")}
    return Run(
        **vars(prepared) | changed | {"notes": notes},
        built=built,
        plan=plan,
        teacher=teacher,
        step=step,
        schedule=build_schedule(config, plan.steps_per_epoch, plan.global_batch, head_epochs),
        head_epochs=head_epochs,
        state=TrainState(
            engine, ScoreSums(len(data.class_names), world.device, data.label_targets(world.device)), Progress()
        ),
        averages=averages,
        freezer=freezer,
        adapters=adapters,
        frozen=frozen,
        flops=flops if config.features == "computed" else None,
        loggers=loggers,
        events=setup.events,
        train_loader=train_loader,
        val_loader=val_loader,
        neighbours=neighbours,
        keeps_probabilities=keeps,
        contents=ImageContents(folder, data, {"train": train_loader, "val": val_loader}, world, loggers),
    )


def _computes_alike(config: TrainConfig, head_epochs: int) -> bool:
    """Return whether a network's forward and backward are the same kernels in every step, of this rank alone."""
    is_whole = config.ranks_per_replica == 1 and not config.sync_batchnorm
    is_all_trained = read_tune(config.tune)[0] == "full" and not head_epochs and config.features == "computed"
    return is_whole and is_all_trained and not config.is_contrastive and not config.activation_checkpointing


def _build_step(config: TrainConfig, data: DatasetPair, plan: BatchPlan, world: World, teacher: Teacher | None) -> Step:
    """Return how a step trains: on the loss of each image, or on one over all images of a step.

    Raises:
        UserError: Images have weights of their own that the loss does not know.
    """
    if data.train.source.loss_weights is not None and (config.is_contrastive or config.mixup or config.cutmix):
        cause = f"--loss {config.loss}" if config.is_contrastive else "--mixup and --cutmix"
        raise UserError(f"--data {config.data}: {cause} cannot weight single images: leave out the column weight.")
    if config.is_contrastive:
        return GradientCache(world.data, plan.leaves, config.temperature, len(data.class_names))
    told = (config, data.class_names, data.train_counts, world.device)
    task = task_of_labels(len(data.class_names), data.label_targets(world.device), None)
    loss = build_loss(*told, build=task.losses, teacher=teacher)
    of_ways = (way.step(loss) for way in ways_of(config, TORCH))
    return next(filter(None, of_ways), Accumulate(loss))


def _build_readers(
    config: TrainConfig, data: DatasetPair, plan: BatchPlan, world: World
) -> tuple[Loader, Loader, Neighbours | None]:
    """Return the loaders of `build_loaders`, and the training images that tell classes if no classifier is trained."""
    if not config.is_contrastive:
        return *build_loaders(config, data, plan, world), None
    compared = ImageDataset(data.train.source, data.preprocessing, most_bad=data.train.most_bad)
    train, val = build_loaders(config, data, plan, world, [compared])
    stride = -(-len(compared) // MOST_COMPARED)
    each_once = EvaluationPlan(-(-len(compared) // stride), config.micro_batch, world.data.size, stride)
    loader = Loader(compared, each_once, world.data.rank, workers=train.pool or 0, device=world.device)
    return train, val, Neighbours(loader, len(data.class_names), world.data)


def train_context(context: Run, start: RunStart) -> TrainContext:
    """Build what the loop uses in every step; a collective."""
    config, world, state, loggers = context.config, context.world, context.state, context.loggers
    saver = Saver(
        context.folder.checkpoints,
        context.identity,
        config,
        context.plan,
        state,
        world,
        loggers,
        start.heartbeat,
        patience_s=SLOW_PHASE * config.hang_timeout,
        frozen=context.frozen,
    )
    guard = NonFiniteGuard(
        state.engine,
        world.data,
        loggers,
        config.max_bad_steps,
        context.data.train.source.name,
        skipped=state.progress.skipped_steps,
        consecutive=state.progress.bad_steps_in_row,
        by_group=context.groups > 1,
    )
    step = context.step
    if config.audit:
        assert isinstance(step, Accumulate)
        leaves = context.plan.accumulation_steps
        step = Audited(step, config.audit, world, leaves, lambda: context.position, loggers)
    tells_classes = context.neighbours is None and context.data.sets is None
    is_kept = tells_classes and config.features != "cached" and len(context.data.train) <= MOST_IMAGES
    return TrainContext(
        world=world,
        plan=context.plan,
        schedule=context.schedule,
        num_classes=len(context.data.class_names),
        image_shape=context.data.preprocessing.shape,
        sets=context.data.label_targets(world.device),
        seed=config.seed,
        step=step,
        log_every_steps=config.log_every_steps,
        epochs=config.epochs,
        loggers=loggers,
        stop=start.stop,
        guard=guard,
        heartbeat=start.heartbeat,
        saver=saver,
        averages=context.averages,
        neighbours=context.neighbours,
        log_hashes=config.log_hashes,
        keeps_probabilities=context.keeps_probabilities,
        history=SampleHistory(context.folder.path, world, config.epochs) if is_kept else None,
        local_steps=config.local_steps,
        timing=start_timing(world, context.flops, config.profile, context.folder.path, loggers),
    )


def _identity(data: DatasetPair, built: BuiltModel, plan: BatchPlan, teacher: Teacher | None) -> dict[str, Any]:
    taught = {} if teacher is None else {"teacher": teacher.digest}
    in_shards = {"division into shards": hashlib.sha256(plan.places).hexdigest()} if plan.places else {}
    return (
        taught
        | in_shards
        | {
            "model": built.description.to_dict(),
            "class list": data.class_names,
            DATA_SET: data.fingerprint,
            "global batch": plan.global_batch,
        }
    )
