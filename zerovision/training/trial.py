"""Short trials on a run's ranks, for `--learning-rate auto`, `--batch-size auto` and `--minutes`.

A trial is built like the run, on the same data, in a temporary folder inside the run's folder. The trial is closed
before the run's own model is built, so it does not change the training.

The trial for `--minutes` runs its steps twice, because the first epoch reads images from files, while later epochs may
find them in a cache.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import json
import math
import shutil
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from zerovision.training.base.errors import RunEnded, shown
from zerovision.training.base.heartbeat import SLOW_PHASE
from zerovision.training.base.points import Loggers, RunLogger, StepPoint
from zerovision.training.base.run_folder import RunFolder
from zerovision.training.base.units import format_duration, plural
from zerovision.training.config import CHANGEABLE_ON_RESUME, FIELDS, FLAG_OF, TrainConfig
from zerovision.training.data import data_options, load_data
from zerovision.training.data.augmentations import size_ramp
from zerovision.training.data.sampler import BatchPlan
from zerovision.training.engines.settings import TOGETHER
from zerovision.training.loop import train_one_epoch
from zerovision.training.observe.new_run import make_folders
from zerovision.training.observe.observer import Observers
from zerovision.training.recipe.schedule import FEWEST_EPOCHS, given_decay, head_epochs_of, stable_epochs
from zerovision.training.setup import build
from zerovision.training.steps.carrier import Run
from zerovision.training.steps.watch import every_step, guard_of
from zerovision.training.world.collectives import agreed, broadcast_object
from zerovision.training.world.world import World

MOST_BAD_STEPS = 10  # number of consecutive non-finite steps after which a trial ends


def trial_settings(config: TrainConfig, *more: str, **facts: int) -> dict[str, Any]:
    """Return what a trial's result depends on, as JSON values: the recipe, the data, and other settings and facts."""
    names = FIELDS.keys() - CHANGEABLE_ON_RESUME | {"data", "data_root", *more}
    return json.loads(json.dumps({name: getattr(config, name) for name in sorted(names)} | facts))


def earlier_result(file: Path, about: dict[str, Any]) -> dict[str, Any]:
    """Return the result that an earlier start saved under the same conditions, or {}."""
    with contextlib.suppress(OSError, ValueError, TypeError, LookupError):
        content = json.loads(file.read_text(encoding="utf-8"))
        return content if all(content[name] == value for name, value in about.items()) else {}
    return {}


class TrialStopped(Exception):
    """Raised on every rank at the same point if the run receives a stop signal during a trial."""


@contextmanager
def trial(run: Run, name: str) -> Iterator[Run]:
    """Build a run for a trial of the given run's settings, and remove everything that it leaves behind; a collective.

    The trial's folder has the given name inside the run's folder. A stop signal raises TrialStopped.
    """
    world, folder = run.world, RunFolder(run.folder.path / name, "trial")
    if run.start.stop.poll_now(world):
        raise TrialStopped
    if world.is_main:
        shutil.rmtree(folder.log_dir, ignore_errors=True)  # left by an interrupted trial
    agreed(lambda: make_folders(folder) if world.is_main else None, world)
    quiet = run.changed(compile="off", progress="off", loggers="none", profile=0, log_every_steps=1)
    built = build(dataclasses.replace(quiet, folder=folder))
    is_stopped = False
    try:
        yield built
    except TrialStopped:
        is_stopped = True
    built.close()
    if world.is_main:
        shutil.rmtree(folder.log_dir, ignore_errors=True)
    if is_stopped:
        raise TrialStopped


def free_memory(world: World) -> None:
    """Free a trial's memory before the next model is moved to the device; nothing may still refer to the trial."""
    gc.collect()
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    with contextlib.suppress(AttributeError):  # only glibc has this function
        ctypes.CDLL(None).malloc_trim(0)


def shortened(plan: BatchPlan, steps: int) -> tuple[BatchPlan, int]:
    """Return a shortened plan and its number of epochs: at least `steps` steps in as few equal epochs as possible."""
    epochs = math.ceil(steps / plan.steps_per_epoch)
    most = math.ceil(steps / epochs) * plan.global_batch
    return dataclasses.replace(plan, num_samples=min(plan.num_samples, most)), epochs


class KeptSteps(RunLogger):
    """Records each step's loss and completion time, on every rank."""

    def __init__(self) -> None:
        self.losses: list[float | None] = []  # in nats; None or NaN for a step without a loss
        self.times: list[float] = []  # completion times, in seconds

    def steps(self, point: StepPoint) -> None:
        self.losses.append(point.loss)
        self.times.append(time.perf_counter())


def train_shortly(run: Run, numbers: Sequence[int], *, only_head: bool = False) -> KeptSteps:
    """Train a run built by `trial` for a few epochs of its shortened plan, and return the records; a collective.

    Each epoch takes its images from an epoch of the run, whose index is in `numbers`. Training ends early after
    `MOST_BAD_STEPS` non-finite steps in a row, or with a `TrialStopped` if the run received a stop signal.
    """
    state, signal, kept = run.state, 0, KeptSteps()
    run = run.changed(epochs=len(numbers), **dict.fromkeys(TOGETHER, 1))
    guard = guard_of(dataclasses.replace(run, loggers=Loggers([])), MOST_BAD_STEPS)
    run = dataclasses.replace(run, loggers=Loggers([kept]))
    run = dataclasses.replace(run, observers=Observers(every_step(run, guard), run.clock))
    run.model.freezer.start_epoch(only_head=only_head)
    with contextlib.suppress(RunEnded):  # raised only for non-finite steps
        for place, number in enumerate(numbers):
            state.progress = dataclasses.replace(state.progress, epoch=place, step=0)  # the schedule continues
            signal = train_one_epoch(run, run.readers.train.epoch(number)).stop_signal
            state.sums.reset()
            if signal:
                break
    run.start.stop.close()
    if signal:
        raise TrialStopped
    return kept


STEPS = 5  # per pass; the set-up work of the first step is not counted
# Time to evaluate as many images as in a training step, relative to the time of that step: there is no backward pass,
# but image files are read whole.
OF_EVALUATION = 0.5
END_SECONDS = 6.0  # from the last epoch to the end, for writing the files about the run
TRIAL_FOLDER = "time-trial"


def limit_epochs(run: Run) -> Run:
    """Return the run with no more epochs than `--minutes` allows, and a note for the log; a collective.

    A resumed run keeps its number of epochs; see `saved_and_given`.
    """
    config, world = run.config, run.world
    if not config.minutes or config.solver == "lbfgs" or run.start.found:  # lbfgs has no epochs
        return run.changed(minutes=0.0)
    run.start.heartbeat.beat("start-up", allowed_s=SLOW_PHASE * config.hang_timeout)
    try:
        first, others = broadcast_object(_epoch_seconds(run), world)
    except TrialStopped:  # the run itself is about to end
        return run.changed(minutes=0.0)
    left = 60 * config.minutes - broadcast_object(time.time() - run.start.began, world) - END_SECONDS
    epochs = max(1, min(config.epochs, 1 + int((left - first) / others)))
    fit = f"shortened to {epochs} of {plural(config.epochs, 'epoch')}" if epochs < config.epochs else "all epochs fit"
    times = f"{format_duration(others)} each, {format_duration(first)} for the first"
    times += ", more than the time that is left" if first > left else ""
    values = in_proportion(config, epochs) if epochs < config.epochs else {}
    changes = "".join(f"; {FLAG_OF[name]} {shown(value)} in proportion" for name, value in values.items())
    run = run.changed(minutes=0.0, epochs=epochs, **values)
    run = run.noting(f"--minutes {config.minutes:g}: {fit}, {times}{changes}")
    if {"progressive_size", "mixup_off_epochs"} & values.keys():  # the data set was loaded with them
        run = dataclasses.replace(run, data=agreed(lambda: load_data(data_options(run.config)), world))
    return run


def in_proportion(config: TrainConfig, epochs: int) -> dict[str, Any]:
    """Return the settings of `IN_EPOCHS`, other than the epochs, that change if a shorter run keeps its proportions."""
    share = epochs / config.epochs

    def whole(part: int) -> int:  # if the run has two epochs, both this part and the rest keep one
        scaled = math.ceil(part * epochs / config.epochs)
        return min(scaled, epochs - 1) if part < config.epochs else scaled

    warmup = 0.0 if config.warmup_epochs == "auto" else round(share * config.warmup_epochs, 6)
    values: dict[str, Any] = {"cooldown_epochs": round(share * config.cooldown_epochs, 6)}
    values |= {"warmup_epochs": warmup or config.warmup_epochs, "mixup_off_epochs": whole(config.mixup_off_epochs)}
    values |= {"head_epochs": whole(config.head_epochs)} if head_epochs_of(config) else {}
    if ramp := size_ramp(config.progressive_size):
        first = whole(ramp.first + 1) - 1
        values["progressive_size"] = f"{ramp.low}:{first}:{whole(ramp.last)}" if first >= 0 else ""
    name, *words = config.schedule.split(":")
    if name == "step" and words and words[0] != "auto":
        words[0] = ",".join(at and f"{max(share * float(at), FEWEST_EPOCHS):.9g}" for at in words[0].split(","))
    elif given_decay(config.schedule):
        stable = max(math.floor(share * stable_epochs(config)), math.ceil(warmup))  # whole, as for the given decay
        decay = epochs - stable - values["cooldown_epochs"]
        words[0] = f"{decay:.9g}" if decay >= FEWEST_EPOCHS else "auto"
    values["schedule"] = ":".join([name, *words])
    return {name: value for name, value in values.items() if value != getattr(config, name)}


def _epoch_seconds(run: Run) -> tuple[float, float]:
    """Return the seconds that the first epoch takes, including the final test, and each later epoch; a collective."""
    passes, data = list[float](), run.data
    with trial(run.changed(ema=0.0), TRIAL_FOLDER) as attempt:
        plan, epochs = shortened(attempt.plan, STEPS)
        for _ in range(2):  # with images of the last epoch, which has the largest ones
            times = train_shortly(dataclasses.replace(attempt, plan=plan), [run.config.epochs - 1] * epochs).times
            passes.append(statistics.median(later - earlier for earlier, later in pairwise(times)))
        whole, images = attempt.plan.steps_per_epoch, attempt.plan.global_batch
    del attempt
    free_memory(run.world)
    cold, warm = passes
    val, once = len(data.val) / images, len(data.test or ()) / images
    return cold * (whole + OF_EVALUATION * (val + once)), max(warm * (whole + OF_EVALUATION * val), 1e-6)
