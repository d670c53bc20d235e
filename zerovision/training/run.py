"""Executes a training run: connects the ranks, builds the run, trains epoch by epoch, and closes the run."""

from __future__ import annotations

import dataclasses
import sys
import time
import traceback
from collections.abc import Callable
from functools import partial

from zerovision.training.auto_batch_size import choose_batch_size
from zerovision.training.auto_learning_rate import choose_learning_rate
from zerovision.training.base.errors import (
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
from zerovision.training.base.heartbeat import SLOW_PHASE
from zerovision.training.base.points import SCORE_NAMES
from zerovision.training.base.timing import measured_communication, start_clock
from zerovision.training.cached_features import cache_features
from zerovision.training.checkpoint.store import restore
from zerovision.training.config import FLAG_OF, TrainConfig
from zerovision.training.config.check import check_config
from zerovision.training.config.saved import with_saved_settings
from zerovision.training.engines.build import form_ranks
from zerovision.training.epoch import judge_test, train_and_evaluate
from zerovision.training.launched_run import run_launched
from zerovision.training.loop import forward_all
from zerovision.training.messages import announce_end, announce_start
from zerovision.training.observe.best_weights import bring_along, epoch_of, keep_finished
from zerovision.training.observe.device_use import DeviceGauge, run_point
from zerovision.training.observe.new_run import removed_if_refused
from zerovision.training.out_of_memory import describe_failure, is_out_of_memory
from zerovision.training.resume import NORMALIZATION, identity_of, preparation_of
from zerovision.training.setup import build, prepare
from zerovision.training.steps.carrier import Run, Start
from zerovision.training.steps.watch import watched
from zerovision.training.trial import limit_epochs
from zerovision.training.world.collectives import agreed
from zerovision.training.world.preserved_process import preserved_process
from zerovision.training.world.world import World, start_world, stop_world

# A function that writes a run's evaluation, model card and report, and returns lines for the log; see
# `evaluation_files.leave_files`.
Deliver = Callable[..., list[str]]


def run(
    config: TrainConfig,
    start: Start | None = None,
    deliver: Deliver | None = None,
    *,
    gpus: int | None = None,
    raises: bool = False,
) -> int:
    """Train with a configuration; every rank calls this.

    Args:
        config: configuration of the run.
        start: circumstances of this start, such as the launcher and its stop signals.
        deliver: function that writes the files about a finished run on rank 0; None to write only weights and logs.
        gpus: number of ranks to start on this machine; they write the same files as ranks started by
            scripts/launch_distributed.sh, and `start` and `deliver` are ignored. With None, training runs in this
            process, which may be a launcher's rank.
        raises: whether to raise a user error that is found in this process, instead of printing it.

    Returns:
        The process's exit code: 0 after the last epoch; 130, 138 or 143 after SIGINT, SIGUSR1 or SIGTERM; 2 for a
        user error; 65, 70, 71, 74, 75 and 78 as in `zerovision.training.base.errors`; 1 for anything else.

    Raises:
        UserError: for a value that a flag would reject; with `raises`, for every user error.
    """
    if gpus is not None:
        return run_launched(config, gpus)
    return _run_here(config, start or Start(), deliver, raises=raises)


@preserved_process()
def _run_here(config: TrainConfig, start: Start, deliver: Deliver | None, *, raises: bool) -> int:
    config = check_config(config, FLAG_OF)
    start.heartbeat.beat("start-up", allowed_s=SLOW_PHASE * config.hang_timeout)
    start.stop.install()
    try:
        world = start_world(deterministic=config.deterministic)
    except OSError as error:  # a rank did not connect, or belongs to a different run
        print(f"error: {error}", file=sys.stderr, flush=True)
        return 1
    run = mistake = None
    try:
        run = set_up(config, world, start)
        exit_code = train(run, deliver)
    except (UserError, RunEnded) as error:
        if raises and isinstance(error, UserError):
            mistake = error
        elif world.is_main or not isinstance(error, (AgreedError, RunEnded)):
            print(f"error: {error}", file=sys.stderr, flush=True)
        else:
            # A launcher ends all ranks as soon as one fails, so rank 0 must print its line first.
            time.sleep(RANK_0_MESSAGE_SECONDS)
        exit_code = USER_ERROR_EXIT_CODE
        if run is not None and isinstance(error, RunEnded):
            exit_code = error.exit_code
            run.loggers.event("gave_up", {"step": error.step, "exit_code": error.exit_code, "reason": str(error)})
            run.loggers.message(f"gave up at step {error.step}")
            if world.is_main:
                _deliver(run, deliver, has_finished=False)
    except Exception as error:
        if is_out_of_memory(error):  # the launcher ends the other ranks, and may restart them all
            print(f"error: {describe_failure(error, world.rank)}", file=sys.stderr, flush=True)
            return OUT_OF_MEMORY_EXIT_CODE
        if isinstance(error, (FileServerError, AnotherStartNeededError)):
            print(f"error: {error}", file=sys.stderr, flush=True)
            return FILE_SERVER_EXIT_CODE
        # The other ranks do not know about this error, so closing anything that needs them would block forever.
        print(known_failure(error, world.rank) or traceback.format_exc(), file=sys.stderr, flush=True)
        return 1
    start.stop.close()
    if run is not None:
        run.close()
    stop_world()
    if mistake is not None:
        raise mistake
    return exit_code


def set_up(config: TrainConfig, world: World, start: Start | None = None) -> Run:
    """Build the run for a configuration, after the short trials that choose settings; a collective.

    Raises:
        UserError: on all ranks, for a mistake that any rank found.
    """
    start = start or Start()
    config = with_saved_settings(config, is_restart=start.origin.restarts > 0)
    world = form_ranks(config, world)
    prepared = prepare(config, world, start)
    with removed_if_refused(prepared.folder):
        return build(limit_epochs(choose_learning_rate(choose_batch_size(prepared))))


def train(run: Run, deliver: Deliver | None = None) -> int:
    """Train until the last epoch, early stopping or a signal; return the exit code; a collective.

    Raises:
        RunEnded: on all ranks, if the run cannot continue.
    """
    config, world, state, start = run.config, run.world, run.state, run.start
    _restore_state(run)
    run = dataclasses.replace(run, clock=start_clock(world.device))
    run, saver = watched(run, identity_of(run) | {NORMALIZATION: preparation_of(run.data)})
    with removed_if_refused(run.folder):
        no_room = saver.check_room(is_new=start.found is None and not start.origin.restarts)
    announce_start(run)
    if no_room:
        run.loggers.message(f"note: {no_room}")
    start.heartbeat.beat("first step", run.position, allowed_s=SLOW_PHASE * config.hang_timeout)
    stop_signal = start.stop.poll_now(world)
    if config.features == "cached" and not stop_signal:
        with removed_if_refused(run.folder):
            stop_signal = cache_features(run)
    if not stop_signal and run.position < run.total_steps:
        with run.clock.evaluation:
            stop_signal = run.task.before_training(run.readers.train, partial(forward_all, run), run.loggers.message)
    first_position = run.position
    with measured_communication(run.clock):
        while state.progress.epoch < config.epochs and not stop_signal:
            without_better = state.progress.epochs_without_better
            if 0 < config.early_stopping_patience <= without_better:
                score = SCORE_NAMES[config.best_by]
                run.loggers.message(f"no better {score} for {without_better} epochs: stopping early")
                break
            stop_signal = train_and_evaluate(run)
        with run.clock.saving:
            saver.finish(is_stop=bool(stop_signal))
        if not stop_signal:
            judge_test(run)
    images = run.plan.images(first_position, run.position)
    gauge = DeviceGauge(world, run.folder, run.model.flops)
    announce_end(run, stop_signal, run_point(run.position, images, run.clock.seconds(), gauge, world))
    if world.is_main:
        # Launchers send SIGTERM once another rank has exited: the handler of `stop` still catches it.
        _deliver(run, deliver, has_finished=not stop_signal)
    return 128 + stop_signal if stop_signal else DIVERGED_EXIT_CODE if state.progress.diverged_epochs_in_row else 0


def _restore_state(run: Run) -> None:
    """Restore the state from the checkpoint that was found, unless this is a fresh start; a collective."""
    start, loggers = run.start, run.loggers
    found = start.found
    for note in start.notes:
        loggers.message(note)
    if found is not None:
        state, world, restarts = run.state, run.world, start.origin.restarts
        agreed(lambda: restore(found, state, world), world)
        progress, epochs = found.progress, run.config.epochs
        state.progress = progress  # without a best epoch whose weights are gone
        place = f"epoch {progress.epoch + 1}, step {progress.step + 1}"
        loggers.message(f"resuming from {found.path}: {place if progress.epoch < epochs else 'all epochs are trained'}")
        if world.is_main:
            kept = keep_finished(run.folder, found.epochs, progress.epoch, epochs)
            brought = bring_along(found.path, run.folder, progress.best_epoch)
            for line in filter(None, (kept, brought)):
                loggers.message(line)
        loggers.event("resume", {"step": run.position, "checkpoint": found.path.name, "restarts": restarts})
    for kind, values in start.events.items():
        loggers.event(kind, {"step": run.position} | values)


def _deliver(run: Run, deliver: Deliver | None, *, has_finished: bool) -> None:
    if deliver is None:
        return
    # A run in which every epoch diverged has no weights; after a return to the start of the decay, old ones may remain.
    with_card = has_finished and epoch_of(run.folder.weights) == run.state.progress.best_epoch
    sources = {name: part.source for name, part in run.data.parts.items()}
    for line in deliver(run.folder, sources, with_card=with_card, with_report=run.config.report):
        run.loggers.message(line)
    run.loggers.delivered()
