"""`--minutes`: chooses how many epochs fit, from the speed of some of the run's steps on its ranks.

A trial trains these steps twice, because the first epoch reads images from files, and others may find them in a cache.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from itertools import pairwise

from zerovision.training.base.heartbeat import SLOW_PHASE
from zerovision.training.base.units import format_duration, plural
from zerovision.training.steps.carrier import Run
from zerovision.training.trial import TrialStopped, free_memory, shortened, train_shortly, trial
from zerovision.training.world.collectives import broadcast_object

STEPS = 5  # of each pass; what the first one makes beside its update counts for none
OF_EVALUATION = 0.5  # of the time of a training step, for as many images: no backward, but their files are read whole
END_SECONDS = 6.0  # from the last epoch to the end: the files about the run
TRIAL_FOLDER = "time-trial"


def limit_epochs(run: Run) -> Run:
    """Return the run with at most the epochs that `--minutes` allows, and a note for the log; a collective.

    A resumed run keeps its epochs, see `saved_and_given`.
    """
    config, world = run.config, run.world
    if not config.minutes or config.solver == "lbfgs":  # which has no epochs
        return run.changed(minutes=0.0)
    run.start.heartbeat.beat("start-up", allowed_s=SLOW_PHASE * config.hang_timeout)
    try:
        first, others = broadcast_object(_epoch_seconds(run), world)
    except TrialStopped:  # as the run, which is about to end
        return run.changed(minutes=0.0)
    spent = broadcast_object(time.time() - run.start.began, world)
    left = 60 * config.minutes - spent - END_SECONDS
    epochs = max(1, min(config.epochs, 1 + int((left - first) / others)))
    fit = f"shortened to {epochs} of {plural(config.epochs, 'epoch')}" if epochs < config.epochs else "all epochs fit"
    note = f"--minutes {config.minutes:g}: {fit}, {format_duration(others)} each"
    if first > left:
        note += f", the first {format_duration(first)}: less than one does not fit"
    warmup = config.warmup_epochs if config.warmup_epochs == "auto" else min(config.warmup_epochs, epochs / 10)
    return run.changed(epochs=epochs, minutes=0.0, warmup_epochs=warmup).noting(note)


def _epoch_seconds(run: Run) -> tuple[float, float]:
    """Return the seconds of the first epoch, including the final test, and of each other epoch; a collective."""
    passes, data = list[float](), run.data
    with trial(run.changed(ema=0.0), TRIAL_FOLDER) as attempt:
        plan, _ = shortened(attempt.plan, min(STEPS, attempt.plan.steps_per_epoch))
        for number in (0, 0):
            times = train_shortly(dataclasses.replace(attempt, plan=plan), [number]).times
            steps = [later - earlier for earlier, later in pairwise(times)]
            passes.append(statistics.median(steps) if steps else 0.0)
        whole, images = attempt.plan.steps_per_epoch, attempt.plan.global_batch
    del attempt
    free_memory(run.world)
    cold, warm = passes
    val, once = len(data.val) / images, len(data.test or ()) / images
    return cold * (whole + OF_EVALUATION * (val + once)), max(warm * (whole + OF_EVALUATION * val), 1e-6)
