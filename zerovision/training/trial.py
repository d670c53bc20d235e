"""A short run beside the run, on its ranks: what `--learning-rate auto` and `--batch-size auto` measure with.

It is built as the run is, of the same data, in a folder inside the run's that is removed after it, and closed before
the run's own model is built: the training is the one that begins without it.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import json
import math
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from zerovision.training.base.errors import RunEnded
from zerovision.training.base.points import StepPoint
from zerovision.training.base.run_folder import RunFolder
from zerovision.training.base.run_logger import Loggers, RunLogger
from zerovision.training.config import CHANGEABLE_ON_RESUME, FIELDS, TrainConfig
from zerovision.training.data.sampler import BatchPlan
from zerovision.training.loop import train_one_epoch
from zerovision.training.observe.new_run import make_folders
from zerovision.training.observe.observer import Observers
from zerovision.training.setup import build
from zerovision.training.steps.carrier import Run
from zerovision.training.steps.watch import every_step, guard_of
from zerovision.training.world.collectives import agreed
from zerovision.training.world.world import World

MOST_BAD_STEPS = 10  # in a row: a trial has then seen enough


def trial_settings(config: TrainConfig, *more: str, **facts: int) -> dict[str, Any]:
    """Return what the result of a trial holds for, as JSON has it: the recipe's settings, the data, and more."""
    names = FIELDS.keys() - CHANGEABLE_ON_RESUME | {"data", "data_root", *more}
    return json.loads(json.dumps({name: getattr(config, name) for name in sorted(names)} | facts))


def earlier_result(file: Path, about: dict[str, Any]) -> dict[str, Any]:
    """Return what an earlier start has found, if it is of the same facts; {} if there is none."""
    with contextlib.suppress(OSError, ValueError, TypeError, LookupError):
        content = json.loads(file.read_text(encoding="utf-8"))
        return content if all(content[name] == value for name, value in about.items()) else {}
    return {}


class TrialStopped(Exception):
    """The run was asked to stop during a trial: every rank raises it at the same point."""


@contextmanager
def trial(run: Run, name: str) -> Iterator[Run]:
    """Build a run, and leave nothing of it behind; a collective.

    Args:
        run: that this is a trial for, with the settings to try.
        name: of the trial's folder inside the run's, which is removed.

    Raises:
        TrialStopped: instead, if the run was asked to stop.
    """
    world, folder = run.world, RunFolder(run.folder.path / name, "trial")
    if run.start.stop.poll_now(world):
        raise TrialStopped
    if world.is_main:
        shutil.rmtree(folder.log_dir, ignore_errors=True)  # of a trial that did not end
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
    """Return what a trial had, before the next model comes to the device; call it when nothing refers to the trial."""
    gc.collect()
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    with contextlib.suppress(AttributeError):  # of glibc alone
        ctypes.CDLL(None).malloc_trim(0)


def shortened(plan: BatchPlan, steps: int) -> tuple[BatchPlan, int]:
    """Return a plan, and the epochs of it, that have that many steps; fewer than `epochs` more, to be equally long."""
    epochs = math.ceil(steps / plan.steps_per_epoch)
    most = math.ceil(steps / epochs) * plan.global_batch
    return dataclasses.replace(plan, num_samples=min(plan.num_samples, most)), epochs


class KeptSteps(RunLogger):
    """Keeps the loss of each step, and when it was done, on every rank.

    Attributes:
        losses: in nats; None or NaN of a step that had none.
        times: in seconds.
    """

    def __init__(self) -> None:
        self.losses: list[float | None] = []
        self.times: list[float] = []

    def steps(self, point: StepPoint) -> None:
        self.losses.append(point.loss)
        self.times.append(time.perf_counter())


def train_shortly(run: Run, numbers: Sequence[int], *, only_head: bool = False) -> KeptSteps:
    """Train, and return what was kept of the steps; a collective.

    It ends early, too, after `MOST_BAD_STEPS` in a row that were not finite.

    Args:
        run: that was built for it, with a plan as of `shortened`.
        numbers: of the epochs whose images are used, each as far as the plan goes.
        only_head: whether the head alone is trained.

    Raises:
        TrialStopped: if the run was asked to stop, after the step that was under way.
    """
    state, signal, kept = run.state, 0, KeptSteps()
    run = run.changed(epochs=len(numbers), local_steps=1)
    guard = guard_of(dataclasses.replace(run, loggers=Loggers([])), MOST_BAD_STEPS)
    run = dataclasses.replace(run, loggers=Loggers([kept]))
    run = dataclasses.replace(run, observers=Observers(every_step(run, guard), run.clock))
    run.model.freezer.start_epoch(only_head=only_head)
    with contextlib.suppress(RunEnded):  # nothing but steps that are not finite
        for place, number in enumerate(numbers):
            state.progress = dataclasses.replace(state.progress, epoch=place, step=0)  # the schedule goes on
            signal = train_one_epoch(run, run.readers.train.epoch(number)).stop_signal
            state.sums.reset()
            if signal:
                break
    run.start.stop.close()
    if signal:
        raise TrialStopped
    return kept
