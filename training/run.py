"""The table of contents of a run: join the ranks, build, train epoch by epoch, close."""

from __future__ import annotations

import dataclasses
import functools
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from models.build import BuiltModel
from models.weights_file import not_finite
from training.auto_batch_size import choose_batch_size
from training.auto_learning_rate import choose_learning_rate
from training.base.errors import (
    DIVERGED_EXIT_CODE,
    FILE_SERVER_EXIT_CODE,
    OUT_OF_MEMORY_EXIT_CODE,
    RANK_0_MESSAGE_SECONDS,
    USER_ERROR_EXIT_CODE,
    AgreedError,
    AnotherStartNeededError,
    FileServerError,
    RunEnded,
    UserError,
    known_failure,
)
from training.base.heartbeat import SLOW_PHASE
from training.base.progress import Progress
from training.base.run_folder import RunFolder
from training.base.run_logger import Loggers
from training.base.timing import measured_communication
from training.checkpoint.frozen import FrozenWeights, keep_frozen
from training.checkpoint.saver import Saver
from training.checkpoint.state import TrainState
from training.checkpoint.store import FoundCheckpoint
from training.config import FLAG_OF, TrainConfig
from training.config.check import check_config, check_starting_weights
from training.config.unused_flags import note_unused_flags
from training.data import data_options, load_data
from training.data.bad_images import check_bad_images
from training.data.datasets import DatasetPair
from training.data.image_contents import ImageContents
from training.data.loader import Loader, build_loaders
from training.data.sampler import BatchPlan, build_plan
from training.engines.build_engine import build_engine, note_engine, resolve_engine
from training.engines.compilation import auto_compiles, keep_compiled_code, load_compiled_code, resolve_compile
from training.engines.deepspeed_config import deepspeed_config, read_strategy_json
from training.engines.engine import EngineSetup
from training.engines.flops import TrainingFlops
from training.engines.model import build_training_model
from training.engines.parameter_shards import frozen_parameters, gather_weights
from training.engines.precision import resolve_precision
from training.engines.strategies import plan_of
from training.final_test import judge_test
from training.launched_run import run_launched
from training.loop import evaluate, train_one_epoch
from training.messages import announce_end, announce_start, log_epoch
from training.observe.best_weights import bring_along, epoch_of, keep_finished, write_best
from training.observe.environment import RunFacts, describe_run
from training.observe.loggers import open_loggers
from training.observe.scores import Scores, ScoreSums
from training.observe.step_metrics import peak_memory_per_rank, resident_bytes, run_point, start_timing
from training.other_epochs import before_decay, note_other_epochs
from training.out_of_memory import describe_failure, is_out_of_memory
from training.recipe import read_tune
from training.recipe.divergence import find_divergence
from training.recipe.freezing import BackboneFreezer
from training.recipe.loss import Loss, build_loss
from training.recipe.optimizer import build_optimizer
from training.recipe.schedule import Schedule, build_schedule, has_slow_backbone, head_epochs_of
from training.recipe.tuning import Adapters
from training.resume import (
    DATA_SET,
    FIRST_START,
    NORMALIZATION,
    RunStart,
    check_fit,
    create_folder,
    find_checkpoint,
    keep_global_batch,
    keep_normalization,
    keep_starting_weights,
    keep_threads,
    normalization_of,
    note_other_leaves,
    restore,
)
from training.steps.context import TrainContext
from training.steps.epoch_observer import EpochResult
from training.steps.nonfinite_steps import NonFiniteGuard
from training.steps.weight_average import WeightAverages
from training.world.collectives import agreed, error_on_any_rank, ranks_per_machine
from training.world.preserved_process import preserved_process
from training.world.signals import StopRequest
from training.world.world import World, start_world, stop_world

# Writes evaluation, model card and report of a run and returns lines for the log, as `delivery.end_of_run.leave_files`.
Deliver = Callable[..., list[str]]


def run(
    config: TrainConfig, start: RunStart = FIRST_START, deliver: Deliver | None = None, *, gpus: int | None = None
) -> int:
    """Train as the configuration says; every rank calls this.

    Args:
        config: what to train.
        start: which start of the run this is.
        deliver: writes the files about a finished run on rank 0; None for the weights and logs alone.
        gpus: ranks to start on this machine, which leave the files that scripts/launch_distributed.sh does, whatever
            `start` and `deliver` are; None to train in this process, which may be a rank that a launcher has started.

    Returns:
        The process's exit code: 0 after the last epoch; 130, 138 or 143 after SIGINT, SIGUSR1 or SIGTERM; 2 for a
        user's mistake; 65, 71, 74, 75 and 78 as in `training.base.errors`; 1 for anything else.

    Raises:
        UserError: for a value that a flag would refuse.
    """
    return _run_here(config, start, deliver) if gpus is None else run_launched(config, gpus)


@preserved_process()
def _run_here(config: TrainConfig, start: RunStart, deliver: Deliver | None) -> int:
    check_config(config, FLAG_OF)
    start.heartbeat.beat("start-up", allowed_s=SLOW_PHASE * config.hang_timeout)
    stop = StopRequest()
    stop.install()
    try:
        world = start_world(deterministic=config.deterministic)
    except OSError as error:  # a rank did not come, or belongs to another run
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    context = None
    try:
        context = build_run(config, world, start)
        exit_code = train(context, stop, start, deliver)
    except (UserError, RunEnded) as error:
        if world.is_main or not isinstance(error, (AgreedError, RunEnded)):
            print(f"error: {error}", file=sys.stderr, flush=True)
        else:
            # A launcher ends all ranks as soon as one has failed: rank 0 prints its line first.
            time.sleep(RANK_0_MESSAGE_SECONDS)
        exit_code = USER_ERROR_EXIT_CODE
        if context is not None and isinstance(error, RunEnded):
            exit_code = error.exit_code
            _give_up(context, error, start, deliver)
    except Exception as error:
        if is_out_of_memory(error):  # the launcher ends the others, and may start all again
            print(f"error: {describe_failure(error, world.rank)}", file=sys.stderr, flush=True)
            return OUT_OF_MEMORY_EXIT_CODE
        if isinstance(error, (FileServerError, AnotherStartNeededError)):
            print(f"error: {error}", file=sys.stderr, flush=True)
            return FILE_SERVER_EXIT_CODE
        # The other ranks do not know of it. Closing anything that needs them would wait for ever.
        print(known_failure(error, world.rank) or traceback.format_exc(), file=sys.stderr, flush=True)
        return 1
    stop.close()
    if context is not None:
        context.close()
    stop_world()
    return exit_code


@dataclass(frozen=True)
class RunContext:
    """Everything that a run consists of.

    Attributes:
        config: the user's settings, `compile` as resolved.
        world: the ranks.
        precision: 'bf16', 'fp16' or 'fp32', never 'auto'.
        data: training and validation set.
        built: the model, before it was sharded.
        folder: paths of the run's files.
        facts: on which a prediction of its memory depends.
        lock: on rank 0 the file that locks the run folder as long as it is open.
        plan: which samples are in which batch.
        loss: each sample's training loss.
        schedule: learning rate by step.
        head_epochs: epochs in which only the head is trained.
        state: model, optimizer and position.
        averages: of the weights over the steps.
        freezer: freezes what does not learn in an epoch.
        adapters: of the model, to be merged into its weights.
        frozen: the file of weights that are not trained; None if all are.
        flops: counts the model's operations, on rank 0.
        loggers: none on ranks other than 0.
        found: the checkpoint to resume from, None for a fresh start.
        notes: lines for the log about the choice of the checkpoint.
        train_loader: this rank's training batches.
        val_loader: this rank's validation batches.
        contents: watches the files that the first epoch reads.
        compiled_code: the file that keeps what `torch.compile` makes; None unless the run is compiled.
    """

    config: TrainConfig
    world: World
    precision: str
    data: DatasetPair
    built: BuiltModel
    folder: RunFolder
    facts: RunFacts
    lock: IO[bytes] | None
    plan: BatchPlan
    loss: Loss
    schedule: Schedule
    head_epochs: int
    state: TrainState
    averages: WeightAverages
    freezer: BackboneFreezer
    adapters: Adapters
    frozen: FrozenWeights | None
    flops: TrainingFlops | None
    loggers: Loggers
    found: FoundCheckpoint | None
    notes: list[str]
    train_loader: Loader
    val_loader: Loader
    contents: ImageContents
    compiled_code: Path | None

    @property
    def identity(self) -> dict[str, Any]:
        """What a checkpoint and the run that resumes from it must agree on, beside the recipe."""
        return _identity(self.data, self.built, self.plan) | {NORMALIZATION: normalization_of(self.data)}

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


def build_run(
    config: TrainConfig, world: World, start: RunStart = FIRST_START, data: DatasetPair | None = None
) -> RunContext:
    """Build a run, in the order in which a mistake is cheapest to report; a collective.

    Args:
        config: what to train.
        world: the ranks.
        start: which start of the run this is.
        data: that of the configuration, if it is loaded already: a run's trials get its own.

    Raises:
        UserError: on all ranks, for a mistake that any of them found.
    """
    precision = agreed(lambda: resolve_precision(config.precision, world.device), world)
    strategy_json = agreed(lambda: read_strategy_json(config.strategy, config.deepspeed_config), world)
    first_data = data or agreed(lambda: load_data(data_options(config)), world)
    folder, lock = create_folder(config, start, world)
    found, notes = find_checkpoint(config, folder, start, world)
    data = agreed(lambda: keep_normalization(config, first_data, found), world)
    build = functools.partial(build_run, data=data)
    found, decay_notes = before_decay(config, found, world)
    if found is None:
        agreed(lambda: check_starting_weights(config, FLAG_OF), world)
    config = agreed(lambda: keep_global_batch(config, found, world), world)
    config, thread_notes = keep_threads(config, found, world)
    if config.threads_per_rank:
        torch.set_num_threads(config.threads_per_rank)
    notes = [*note_unused_flags(config), *notes, *decay_notes, *thread_notes, *note_other_leaves(config, found)]
    run_facts = _facts(config, world, precision, config.engine, data, folder)
    config, batch_notes = choose_batch_size(config, folder, run_facts, start, world, build)
    config, rate_notes = choose_learning_rate(config, len(data.class_names), folder, found, start, world, build)
    notes += batch_notes + rate_notes
    config = keep_starting_weights(config, found)  # after all that reads them
    head_epochs = head_epochs_of(config)
    plan = build_plan(config, data.train.source.labels, world.size)
    loss = agreed(lambda: build_loss(config, data.class_names, data.train_counts, world.device), world)
    # Worker processes take seconds to start: they do so while the model and the engine are built.
    train_loader, val_loader = agreed(lambda: build_loaders(config, data, plan, world), world)
    built, flops = build_training_model(config, data, world, loads_weights=found is None)
    if found is not None:
        checkpoint, identity = found, _identity(data, built, plan)
        agreed(lambda: check_fit(checkpoint, config, identity, plan.steps_per_epoch, data), world)
    pixels = config.epochs * len(data.train) * data.train.preprocessing["image_size"] ** 2
    compiles = resolve_compile(config, found.manifest.config.get("compile") if found else None, pixels, world)
    is_choice = config.compile != "auto" or compiles == auto_compiles(config, pixels, world)
    same_code = "" if is_choice else "on" if compiles else "off"
    setup, engine_name = set_up_engine(config, built, strategy_json, precision, world, compiles=compiles)
    notes += note_other_epochs(config, found, plan, head_epochs, engine_name, same_code)
    notes += note_engine(config.engine, engine_name, setup.plan, strategy_json, built.module)
    first_step = plan.position(found.manifest.progress) if found else 0
    loggers = Loggers([])
    if world.is_main:
        facts = describe_run(world, precision, data, built)
        loggers = open_loggers(config, folder, facts, dict(setup.deepspeed_config), first_step)
    run_facts = _facts(config, world, precision, engine_name, data, folder)  # before the engine takes memory
    freezer, adapters = BackboneFreezer(built.module, built.head_parameter_names), Adapters(built.module)
    frozen = agreed(lambda: _keep_frozen(config, built, folder, found, world), world)
    compiled_code = None
    if compiles:
        recipe = (built.description, config.micro_batch, precision, config.strategy, engine_name)
        compiled_code = load_compiled_code(recipe)
    setup = dataclasses.replace(setup, must_compile=config.compile == "on", image_shape=data.image_shape)
    engine = build_engine(setup, engine_name)
    notes = [*notes, *setup.notes]
    return RunContext(
        config=dataclasses.replace(config, compile="on" if compiles else "off"),
        world=world,
        precision=precision,
        data=data,
        built=built,
        folder=folder,
        facts=run_facts,
        lock=lock,
        plan=plan,
        loss=loss,
        schedule=build_schedule(config, plan.steps_per_epoch, plan.global_batch, head_epochs),
        head_epochs=head_epochs,
        state=TrainState(engine, ScoreSums(len(data.class_names), world.device), Progress()),
        averages=WeightAverages(engine, config.ema, config.lookahead, plan.steps_per_epoch),
        freezer=freezer,
        adapters=adapters,
        frozen=frozen,
        flops=flops,
        loggers=loggers,
        found=found,
        notes=notes,
        train_loader=train_loader,
        val_loader=val_loader,
        contents=ImageContents(folder, data, {"train": train_loader, "val": val_loader}, world, loggers),
        compiled_code=compiled_code,
    )


def set_up_engine(
    config: TrainConfig,
    built: BuiltModel,
    strategy_json: dict[str, Any],
    precision: str,
    world: World,
    *,
    compiles: bool,
) -> tuple[EngineSetup, str]:
    """Return what the engine is built from, with a new optimizer, and the engine's name; a collective."""
    shards = ranks_per_machine(world) if config.replicate_across == "nodes" else world.size
    parallel = plan_of(config.strategy, world.size, config.offload, shards)
    name = agreed(
        lambda: resolve_engine(config.engine, parallel, strategy_json, built.module),
        world,
    )
    discriminative = has_slow_backbone(config)
    resolved = dataclasses.replace(config, precision=precision)  # type: ignore[arg-type]  # one of its values
    heads = built.head_parameter_names
    optimizer = agreed(lambda: build_optimizer(built.module, resolved, heads, discriminative=discriminative), world)
    setup = EngineSetup(
        built.module,
        optimizer,
        parallel,
        precision,
        world,
        batch_size=config.micro_batch,
        accumulation_steps=config.gradient_accumulation_steps,
        gradient_clipping=config.gradient_clipping,
        deepspeed_config=deepspeed_config(
            strategy_json,
            batch_size_per_rank=config.micro_batch,
            accumulation_steps=config.gradient_accumulation_steps,
            gradient_clipping=config.gradient_clipping,
            offload=config.offload,
        ),
        compiles=compiles,
    )
    return setup, name


def _facts(
    config: TrainConfig,
    world: World,
    precision: str,
    engine_name: str,
    data: DatasetPair,
    folder: RunFolder,
) -> RunFacts:
    name = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else ""
    return RunFacts(
        folder=str(folder.path),
        config=dataclasses.asdict(config) | {"image_channels": data.image_channels},
        classes=len(data.class_names),
        image_size=data.train.sizes[-1],
        engine=engine_name,
        precision=precision,
        ranks=world.size,
        ranks_per_machine=world.local_size,
        gpu_name=name,
        process_bytes=0 if name else resident_bytes(),
    )


def _keep_frozen(
    config: TrainConfig, built: BuiltModel, folder: RunFolder, found: FoundCheckpoint | None, world: World
) -> FrozenWeights | None:
    """Write the weights that fine-tuning leaves alone beside the checkpoints, which then do not contain them."""
    if read_tune(config.tune)[0] == "full":
        return None
    return keep_frozen(folder.checkpoints, frozen_parameters(built.module), found, is_main=world.is_main)


def train(context: RunContext, stop: StopRequest, start: RunStart = FIRST_START, deliver: Deliver | None = None) -> int:
    """Train to the last epoch, to early stopping or to a signal; return the exit code. A collective.

    Raises:
        RunEnded: on all ranks, if the run cannot go on.
    """
    config, world, state = context.config, context.world, context.state
    _resume(context, start)
    announce_start(context)
    loop = _train_context(context, stop, start)
    assert loop.saver is not None
    start.heartbeat.beat("first step", context.position, allowed_s=SLOW_PHASE * config.hang_timeout)
    stop_signal = stop.poll_now(world)
    first_position = context.position
    with measured_communication(loop.timing.clock):
        while state.progress.epoch < config.epochs and not stop_signal:
            without_better = state.progress.epochs_without_better
            if 0 < config.early_stopping_patience <= without_better:
                context.loggers.message(f"no better top-1 for {without_better} epochs: stopping early")
                break
            stop_signal = _train_and_evaluate(context, loop, loop.saver)
        with loop.timing.clock.saving:
            loop.saver.finish(stop, is_stop=bool(stop_signal))
        if not stop_signal:
            judge_test(context, loop)
    images = (context.position - first_position) * context.plan.global_batch
    announce_end(context, stop_signal, run_point(context.position, images, loop.timing, world))
    if world.is_main:
        # Launchers send SIGTERM once another rank has left: the handler of `stop` still catches it.
        _deliver(context, start, deliver, has_finished=not stop_signal)
    if stop_signal:
        return 128 + stop_signal
    return DIVERGED_EXIT_CODE if state.progress.diverged_epochs_in_row else 0


def _train_and_evaluate(context: RunContext, loop: TrainContext, saver: Saver) -> int:
    """Train and evaluate one epoch, or the part of it before a signal, and save; return the signal."""
    state, world, clock = context.state, context.world, loop.timing.clock
    engine, epoch = state.engine, state.progress.epoch
    context.freezer.start_epoch(only_head=epoch < context.head_epochs)
    if epoch == context.head_epochs > 0 and state.progress.step == 0:
        engine.restart_optimizer()
    first_step, last_step = state.progress.step, context.plan.steps_per_epoch
    only_evaluation_is_left = first_step == last_step
    write_weights = None
    result = train_one_epoch(state, context.train_loader.epoch(epoch, state.progress.step), loop)
    check_bad_images(context.train_loader, world)
    stop_signal = result.stop_signal
    if state.progress.step == last_step:
        # A checkpoint of this moment holds averaged buffers: averaging them again would round them again.
        if not only_evaluation_is_left:
            engine.buffers.average(world)
        if not stop_signal:
            evaluation_start = time.perf_counter()
            raw = _evaluate_raw(context, loop)
            with context.averages.in_use():
                with clock.evaluation:
                    scores = evaluate(engine, context.val_loader, loop, is_interruptible=True)
                if isinstance(scores, Scores):
                    seconds = time.perf_counter() - evaluation_start
                    write_weights = _end_epoch(context, loop, result, scores, raw, seconds)
                    is_last = state.progress.epoch == context.config.epochs
                    context.contents.after_epoch(context.position, is_last_chance=first_step == 0 or is_last)
                else:
                    stop_signal = scores
    with clock.saving:
        if context.compiled_code is not None and context.world.local_rank == 0:
            keep_compiled_code(context.compiled_code)  # with the code of the evaluation
        saver.save(write_weights)
    return stop_signal


def _evaluate_raw(context: RunContext, loop: TrainContext) -> Scores | None:
    """Return the scores of the weights that are no average, if they are wanted and no signal came; a collective."""
    if not context.config.raw_accuracy:
        return None
    with loop.timing.clock.evaluation:
        scores = evaluate(context.state.engine, context.val_loader, loop, is_interruptible=True)
    # After a signal the evaluation of the average, which begins next, ends as well.
    return scores if isinstance(scores, Scores) else None


def _end_epoch(
    context: RunContext,
    loop: TrainContext,
    result: EpochResult,
    scores: Scores,
    raw: Scores | None,
    evaluation_seconds: float,
) -> Callable[[], None] | None:
    """Log an epoch and count it; if it is the best so far, return what writes its weights. A collective."""
    state, world, clock = context.state, context.world, loop.timing.clock
    train_scores = state.sums.reduce(world)
    state.sums.reset()
    train_loss = train_scores.loss if train_scores.samples else 0.0  # of no step that was applied
    diverged = find_divergence(train_loss, scores.loss, loop.num_classes)
    write_weights = None
    if diverged is None and scores.top1 > state.progress.best_top1:
        with clock.saving:
            weights = context.adapters.merge(gather_weights(state.engine, world))
            broken = error_on_any_rank(not_finite(weights), world)
        if broken is None:
            epoch = state.progress.epoch + 1
            write_weights = write_best(
                context.folder, weights, context.built, context.data, context.config.data, epoch, scores
            )
        else:
            diverged = f"the weights hold NaN or infinity, first in {broken}"
    is_best = write_weights is not None
    state.progress = state.progress.after_epoch(scores.top1, is_best=is_best, has_diverged=diverged is not None)
    memory = peak_memory_per_rank(world)
    with clock.logging:
        log_epoch(
            context,
            result,
            train_scores,
            scores,
            raw,
            evaluation_seconds,
            memory,
            is_best=is_best,
            diverged=diverged,
        )
    return write_weights


def _resume(context: RunContext, start: RunStart) -> None:
    """Restore the state from the checkpoint that was found, if there is one; a collective."""
    found, state, loggers = context.found, context.state, context.loggers
    for note in context.notes:
        loggers.message(note)
    if found is None:
        return
    agreed(lambda: restore(found, state, context.world), context.world)
    progress, restarts = state.progress, start.origin.restarts
    loggers.message(f"resuming from {found.path}: epoch {progress.epoch + 1}, step {progress.step + 1}")
    if context.world.is_main:
        kept = keep_finished(context.folder, found.manifest, context.config.epochs)
        brought = bring_along(found.path, context.folder, progress.best_epoch)
        for line in filter(None, (kept, brought)):
            loggers.message(line)
    loggers.event("resume", {"step": context.position, "checkpoint": found.path.name, "restarts": restarts})


def _train_context(context: RunContext, stop: StopRequest, start: RunStart) -> TrainContext:
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
        world,
        loggers,
        config.max_bad_steps,
        context.data.train.source.name,
        skipped=state.progress.skipped_steps,
        consecutive=state.progress.bad_steps_in_row,
    )
    return TrainContext(
        world=world,
        plan=context.plan,
        schedule=context.schedule,
        num_classes=len(context.data.class_names),
        image_shape=context.data.image_shape,
        seed=config.seed,
        loss=context.loss,
        log_every_steps=config.log_every_steps,
        epochs=config.epochs,
        loggers=loggers,
        stop=stop,
        guard=guard,
        heartbeat=start.heartbeat,
        saver=saver,
        averages=context.averages,
        timing=start_timing(world, context.flops, config.profile, context.folder.path / "profile", loggers),
    )


def _give_up(context: RunContext, error: RunEnded, start: RunStart, deliver: Deliver | None) -> None:
    """Log why the run ended, and deliver what there is."""
    context.loggers.event("gave_up", {"step": error.step, "exit_code": error.exit_code, "reason": str(error)})
    context.loggers.message(f"gave up at step {error.step}")
    if context.world.is_main:
        _deliver(context, start, deliver, has_finished=False)


def _deliver(context: RunContext, start: RunStart, deliver: Deliver | None, *, has_finished: bool) -> None:
    if deliver is None:
        return
    if start.predict is not None:
        start.predict(context.facts)
    # A run without a sound epoch has none; one that went back before its decay may have those of the longer run before.
    with_card = has_finished and epoch_of(context.folder.weights) == context.state.progress.best_epoch
    sources = {name: part.source for name, part in context.data.parts.items()}
    for line in deliver(context.folder, sources, with_card=with_card, with_report=context.config.report):
        context.loggers.message(line)


def _identity(data: DatasetPair, built: BuiltModel, plan: BatchPlan) -> dict[str, Any]:
    return {
        "model": built.description,
        "class list": data.class_names,
        DATA_SET: data.fingerprint,
        "global batch": plan.global_batch,
    }
