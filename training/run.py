"""The table of contents of a run: build, train, close."""

from __future__ import annotations

import dataclasses
import sys
import time
import traceback
from collections.abc import Callable

import torch

from delivery.best_weights import bring_along
from delivery.evaluation import describe_scores
from delivery.evaluation_files import write_scores
from delivery.weights import save_weights
from models.weights_file import not_finite
from training.announce import announce_end, announce_start
from training.bad_images import check_bad_images
from training.bad_steps import StepGuard
from training.batchnorm import average_buffers
from training.checkpoint.manifest import Progress
from training.checkpoint.resume import fill_engine
from training.checkpoint.saver import Saver, SaveSettings
from training.config import TrainConfig
from training.distributed import agreed, error_on_any_rank, start_world, stop_world
from training.divergence import find_divergence
from training.engine import gather_weights
from training.errors import (
    DIVERGED_EXIT_CODE,
    SECONDS_FOR_RANK_0_TO_SPEAK,
    USER_ERROR_EXIT_CODE,
    AgreedError,
    RunEnded,
    UserError,
    known_death,
)
from training.loggers import EpochPoint
from training.loop import EpochResult, LoopTools, evaluate, train_one_epoch
from training.meter import Timing, name_hosts, peak_memory_per_rank, run_point
from training.metrics import Scores, ScoreSums
from training.parts import Parts, build_parts
from training.run_start import FIRST_START, RunStart
from training.signals import StopRequest, exit_code_of
from training.slow_links import SlowLinkWatch
from training.timing import SpanClock, measured_communication, start_clock

SLOW_PHASE = 5  # start-up, the first step and saves may take this many hang timeouts


def run(config: TrainConfig, start: RunStart = FIRST_START) -> int:
    """Train as the configuration says; every rank calls this.

    Returns:
        The process's exit code: 0 after the last epoch, 130, 138 or 143 after SIGINT, SIGUSR1 or SIGTERM, 2 for a
        user's mistake, 65, 74 and 78 as `training.errors` says, 1 for anything else.
    """
    start.report.beat("start-up", allowed_s=SLOW_PHASE * config.hang_timeout)
    stop = StopRequest()
    stop.install()
    try:
        world = start_world(deterministic=config.deterministic)
    except OSError as error:  # a rank did not come, or was none of this run
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    parts = None
    try:
        parts = build_parts(config, world, start)
        exit_code = train(parts, stop, start)
    except (UserError, RunEnded) as error:
        if world.is_main or not isinstance(error, (AgreedError, RunEnded)):
            print(f"error: {error}", file=sys.stderr, flush=True)
        else:
            # A launcher ends all ranks as soon as one has failed: rank 0 speaks first.
            time.sleep(SECONDS_FOR_RANK_0_TO_SPEAK)
        exit_code = USER_ERROR_EXIT_CODE
        if parts is not None and isinstance(error, RunEnded):
            exit_code = error.exit_code
            _give_up(parts, error)
    except Exception as error:
        # The other ranks do not know of it: whatever needs them would wait for ever, so nothing is closed.
        print(known_death(error, world.rank) or traceback.format_exc(), file=sys.stderr, flush=True)
        return 1
    stop.close()
    if parts is not None:
        parts.close()
    stop_world()
    return exit_code


def train(parts: Parts, stop: StopRequest, start: RunStart = FIRST_START) -> int:
    """Train to the last epoch, to the patience's end or to a signal, and return the exit code; a collective.

    Raises:
        RunEnded: on all ranks, where the run cannot go on.
    """
    sums = ScoreSums(parts.settings.num_classes, parts.world.device)
    progress = _resume(parts, sums, start)
    announce_start(parts, progress)
    saver = Saver(_save_settings(parts), parts.engine, parts.world, parts.loggers, start.report)
    guard = StepGuard(
        parts.engine,
        parts.world,
        parts.loggers,
        parts.config.max_bad_steps,
        parts.data.train.source.name,
        skipped=progress.skipped_steps,
        in_row=progress.bad_steps_in_row,
    )
    start.report.beat("first step", parts.position(progress), allowed_s=SLOW_PHASE * parts.config.hang_timeout)
    stop_signal = stop.poll_now(parts.world)
    first_position, timing = parts.position(progress), _start_timing(parts)
    tools = LoopTools(parts.world, parts.loggers, stop, guard, start.report, saver, timing)
    with measured_communication(timing.clock):
        while progress.epoch < parts.config.epochs and not stop_signal:
            if _is_out_of_patience(parts, progress):
                parts.loggers.message(f"no better top-1 for {progress.epochs_without_better} epochs: stopping early")
                break
            progress, stop_signal = _train_and_evaluate(parts, progress, sums, tools, saver)
        with timing.clock.saving:
            saver.finish(progress, sums.state(), is_stop=bool(stop_signal))
    position = parts.position(progress)
    images = (position - first_position) * parts.settings.plan.global_batch
    announce_end(parts, progress, stop_signal, run_point(position, images, timing, parts.world))
    if parts.world.is_main:  # launchers send SIGTERM once another rank has left, which `stop` still takes in
        _leave_files(parts, has_finished=not stop_signal)
    if stop_signal:
        return exit_code_of(stop_signal)
    return DIVERGED_EXIT_CODE if progress.diverged_epochs_in_row else 0


def _give_up(parts: Parts, error: RunEnded) -> None:
    """Leave what people need to find out why."""
    parts.loggers.event("gave_up", {"step": error.step, "exit_code": error.exit_code, "reason": str(error)})
    parts.loggers.message(f"gave up at step {error.step}")
    if parts.world.is_main:
        _leave_files(parts, has_finished=False)


def _leave_files(parts: Parts, *, has_finished: bool) -> None:
    from delivery.finish import leave_files  # what makes pages and cards is no part of a start

    read_image = parts.data.val.source.read
    with_card = has_finished and parts.folder.weights.is_file()  # a run without a sound epoch has none
    for line in leave_files(parts.folder, read_image, with_card=with_card, with_report=parts.config.report):
        parts.loggers.message(line)


def _train_and_evaluate(
    parts: Parts, progress: Progress, sums: ScoreSums, tools: LoopTools, saver: Saver
) -> tuple[Progress, int]:
    """Run one epoch, or the part of it before a signal, and save; return the new progress and the signal."""
    steps_per_epoch, clock = parts.settings.plan.steps_per_epoch, tools.timing.clock
    parts.engine.train()
    if progress.epoch < parts.head_epochs:
        parts.backbone.rest()
    else:
        parts.backbone.wake()
    only_evaluation_is_left = progress.step == steps_per_epoch
    result = train_one_epoch(
        parts.engine, parts.train_loader.epoch(progress.epoch, progress.step), parts.settings, progress, sums, tools
    )
    check_bad_images(parts.train_loader, parts.world)
    progress, stop_signal = result.progress, result.stop_signal
    if progress.step == steps_per_epoch:
        # A checkpoint of this moment holds averaged buffers: averaging them again would round them again.
        if not only_evaluation_is_left:
            average_buffers(parts.engine.module, parts.world)
        if not stop_signal:
            start = time.perf_counter()
            with clock.evaluation:
                scores = evaluate(parts.engine, parts.val_loader, parts.settings, parts.world, tools)
            if isinstance(scores, Scores):
                evaluation_seconds = time.perf_counter() - start
                return _after_evaluation(parts, result, scores, evaluation_seconds, sums, saver, clock), 0
            stop_signal = scores
    with clock.saving:
        saver.save(progress, sums.state())
    return progress, stop_signal


def _after_evaluation(
    parts: Parts,
    result: EpochResult,
    scores: Scores,
    evaluation_seconds: float,
    sums: ScoreSums,
    saver: Saver,
    clock: SpanClock,
) -> Progress:
    """Log an epoch, save its checkpoint and, where it is the best so far, its weights; a collective."""
    before = result.progress
    epoch, step = before.epoch + 1, (before.epoch + 1) * parts.settings.plan.steps_per_epoch
    train_scores = sums.reduce(parts.world)
    sums.reset()
    diverged = find_divergence(train_scores.loss, scores.loss, parts.settings.num_classes)
    write_best = None
    if diverged is None and scores.top1 > before.best_top1:
        with clock.saving:
            weights = gather_weights(parts.engine, parts.world)
            broken = error_on_any_rank(not_finite(weights), parts.world)
        if broken is None:
            write_best = _best_weights(parts, weights, epoch, scores)
        else:
            diverged = f"the weights hold NaN or infinity, first in {broken}"
    is_best = write_best is not None
    progress = dataclasses.replace(
        before,
        epoch=epoch,
        step=0,
        best_top1=scores.top1 if is_best else before.best_top1,
        best_epoch=epoch if is_best else before.best_epoch,
        epochs_without_better=0 if is_best else before.epochs_without_better + 1,
        diverged_epochs_in_row=before.diverged_epochs_in_row + 1 if diverged else 0,
    )
    point = EpochPoint(
        epoch=epoch,
        step=step,
        epochs=parts.config.epochs,
        train_loss=train_scores.loss,
        train_top1=train_scores.top1,
        validation=scores,
        images_per_second=result.images_per_second,
        data_wait_share=result.data_wait_share,
        seconds=result.seconds,
        evaluation_seconds=evaluation_seconds,
        memory_bytes_per_rank=peak_memory_per_rank(parts.world),
        is_best=is_best,
        diverged=diverged,
        class_names=parts.data.class_names,
    )
    with clock.logging:
        parts.loggers.epoch(point)
        if diverged:
            parts.loggers.event("diverged", {"step": step, "epoch": epoch, "reason": diverged})
            parts.loggers.message(f"epoch {epoch} has diverged: {diverged}")
    with clock.saving:
        saver.save(progress, sums.state(), write_best)
    return progress


def _start_timing(parts: Parts) -> Timing:
    """Start the clock of this rank; a collective."""
    hosts = name_hosts(parts.world)  # where all ranks meet; their clocks start together
    clock = start_clock(parts.world.device)
    profiler = None
    if parts.config.profile and parts.world.is_main:
        from training.profiler import StepProfiler

        profiler = StepProfiler(parts.config.profile, parts.folder.path / "profile", clock, parts.loggers)
    return Timing(clock, slow_links=SlowLinkWatch(hosts), hosts=hosts, flops=parts.flops, profiler=profiler)


def _best_weights(parts: Parts, weights: dict[str, torch.Tensor], epoch: int, scores: Scores) -> Callable[[], None]:
    """Return what writes the weights of an epoch and its scores."""
    extra = {"epoch": epoch, "top1": scores.top1, "top5": scores.top5, "loss": scores.loss}

    def write() -> None:
        save_weights(
            parts.folder.weights,
            weights,
            description=parts.built.description,
            class_names=parts.data.class_names,
            preprocessing=parts.data.preprocessing,
            extra=extra,
        )
        facts = describe_scores(scores, parts.data.class_names, parts.data.val.source.name)
        write_scores(parts.folder.evaluation, {"epoch": epoch, "data": parts.config.data, "split": "val"} | facts)

    return write


def _save_settings(parts: Parts) -> SaveSettings:
    config = parts.config
    return SaveSettings(
        folder=parts.folder.checkpoints,
        identity=parts.identity,
        config=dataclasses.asdict(config),
        every_steps=config.save_every_steps,
        every_minutes=config.save_every_minutes,
        keep_last=config.keep_last,
        patience_s=SLOW_PHASE * config.hang_timeout,
        steps_per_epoch=parts.settings.plan.steps_per_epoch,
    )


def _resume(parts: Parts, sums: ScoreSums, start: RunStart) -> Progress:
    for note in parts.notes:
        parts.loggers.message(note)
    if parts.found is None:
        return Progress()
    found = parts.found
    progress = agreed(lambda: fill_engine(found, parts.engine, sums, parts.world), parts.world)
    parts.loggers.message(f"resuming from {found.path}: epoch {progress.epoch + 1}, step {progress.step + 1}")
    if parts.world.is_main and (line := bring_along(found.path, parts.folder, progress.best_epoch)):
        parts.loggers.message(line)
    parts.loggers.event(
        "resume", {"step": parts.position(progress), "checkpoint": found.path.name, "restarts": start.restarts}
    )
    return progress


def _is_out_of_patience(parts: Parts, progress: Progress) -> bool:
    return 0 < parts.config.early_stopping_patience <= progress.epochs_without_better
