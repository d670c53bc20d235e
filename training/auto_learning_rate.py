"""`--learning-rate auto`: a range test on the run's own ranks before the training.

The test is a run of its own, in a folder inside the run's that is removed after it: model, optimizer and loaders are
built for it and closed again, so that the training is the one that begins with `--learning-rate` and the same number.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import math
import shutil
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from training.checkpoint.atomic_write import write_json
from training.checkpoint.resume import FIRST_START, RunStart
from training.checkpoint.store import FoundCheckpoint
from training.config import FIELDS, TrainConfig
from training.config_values import is_allowed
from training.errors import AgreedError, RunEnded, shown
from training.loop import train_one_epoch
from training.observe.heartbeat import HeartbeatWriter
from training.observe.loggers import Loggers, RunLogger
from training.observe.loggers.points import StepPoint
from training.observe.run_folder import LEARNING_RATE, RunFolder
from training.observe.step_metrics import Timing
from training.parallel.collectives import broadcast_object
from training.parallel.exchange import number, optional
from training.parallel.signals import StopRequest
from training.parallel.world import World
from training.recipe.nonfinite_steps import NonFiniteGuard
from training.recipe.range_test import FEWEST_STEPS, HIGHEST, LOWEST, describe_range_test, suggested, with_a_loss
from training.recipe.schedule import SCHEDULES, Schedule
from training.state import Progress, TrainContext

if TYPE_CHECKING:
    from training.run import RunContext

TEST_STEPS = 200
TEST_FOLDER = "range-test"
MOST_BAD_STEPS = 10  # in a row, at the highest rates: the test has seen enough


def choose_learning_rate(
    config: TrainConfig,
    folder: RunFolder,
    found: FoundCheckpoint | None,
    start: RunStart,
    world: World,
    build: Callable[[TrainConfig, World, RunStart], RunContext],
) -> tuple[TrainConfig, list[str]]:
    """Return the configuration with a number for `--learning-rate auto`, and a note for the log; a collective.

    A run keeps the rate that it began with: that of its checkpoint, or of the test that its folder holds.

    Args:
        config: the run's configuration.
        folder: of the run.
        found: the checkpoint to resume from.
        start: which start of the run this is.
        world: the ranks.
        build: builds a run, for the test.

    Raises:
        UserError: on all ranks, if too few steps of the test had a loss.
    """
    if config.learning_rate != "auto":
        return config, []
    if found is not None:
        rate, source = found.manifest.config.get("learning_rate"), "that of the checkpoint"
    else:
        rate = broadcast_object(_earlier_result(folder) if world.is_main else None, optional(number), world)
        source = "found at the run's first start"
        if rate is None:
            rate, source = _test(config, folder, start, world, build), f"a range test of {TEST_STEPS} steps"
    if not isinstance(rate, float) or not is_allowed(rate, FIELDS["learning_rate"]):
        raise AgreedError(f"--learning-rate auto: {source} is {shown(rate)}, which is no rate: give one.")
    return dataclasses.replace(config, learning_rate=rate), [f"--learning-rate auto is {rate:g}: {source}"]


def _earlier_result(folder: RunFolder) -> float | None:
    """Return the rate that a test of this run has found, None if there was none."""
    try:
        return float(json.loads((folder.path / LEARNING_RATE).read_text(encoding="utf-8"))["suggested"])
    except (OSError, ValueError, TypeError, LookupError):
        return None


def _test(
    config: TrainConfig,
    folder: RunFolder,
    start: RunStart,
    world: World,
    build: Callable[[TrainConfig, World, RunStart], RunContext],
) -> float:
    """Run the test, write its curve into the run's folder and return the rate; a collective."""
    place = folder.path / TEST_FOLDER
    if world.is_main:
        shutil.rmtree(place, ignore_errors=True)  # of a test that did not end
    test_config = dataclasses.replace(
        config,
        learning_rate=HIGHEST,
        log_dir=str(place),
        run_name="test",
        resume="never",
        ema=0.0,
        compile="off",
        progress="off",
        tensorboard=False,
        profile=0,
    )
    context = build(test_config, world, RunStart(start.origin, FIRST_START.heartbeat))
    curve = with_a_loss(_train(context, start.heartbeat))
    context.close()
    del context
    gc.collect()  # before the run's own model comes to the device
    if world.device.type == "cuda":
        torch.cuda.empty_cache()
    if len(curve) < FEWEST_STEPS:
        raise AgreedError(
            f"--learning-rate auto: {len(curve)} steps of the range test had a loss, {FEWEST_STEPS} are needed: "
            "give a number."
        )
    if world.is_main:
        shutil.rmtree(place, ignore_errors=True)
        with contextlib.suppress(OSError):  # a full disk: the curve alone is missing
            write_json(folder.path / LEARNING_RATE, describe_range_test(curve))
    return suggested(curve)


class _Points(RunLogger):
    """Keeps learning rate and loss of each step, on every rank."""

    def __init__(self) -> None:
        self.points: list[tuple[float, float | None]] = []

    def steps(self, point: StepPoint) -> None:
        self.points.append((point.learning_rate, point.loss))


def _train(context: RunContext, heartbeat: HeartbeatWriter) -> list[tuple[float, float | None]]:
    """Train for `TEST_STEPS` steps, or until none is applied any more; return rate and loss of each; a collective."""
    world, state, logged = context.world, context.state, _Points()
    samples = min(context.plan.num_samples, TEST_STEPS * context.plan.global_batch)
    plan = dataclasses.replace(context.plan, num_samples=samples)
    epochs = math.ceil(TEST_STEPS / plan.steps_per_epoch)
    steps = epochs * plan.steps_per_epoch
    schedule = Schedule(
        peak=HIGHEST,
        total_steps=steps,
        warmup_steps=0,
        final_scale=LOWEST / HIGHEST,
        head_steps=steps if context.head_epochs else 0,
        **SCHEDULES["sweep"](dataclasses.replace(context.config, final_learning_rate_scale=LOWEST / HIGHEST), 1),
    )
    name_of = context.data.train.source.name
    loop = TrainContext(
        world=world,
        plan=plan,
        schedule=schedule,
        num_classes=len(context.data.class_names),
        image_shape=context.data.image_shape,
        seed=context.config.seed,
        loss=context.loss,
        log_every_steps=1,
        epochs=epochs,
        loggers=Loggers([logged]),
        stop=StopRequest(),  # a signal waits for the end of the test
        guard=NonFiniteGuard(state.engine, world, Loggers([]), MOST_BAD_STEPS, name_of),
        heartbeat=heartbeat,
        timing=Timing(),
        averages=context.averages,
    )
    context.freezer.start_epoch(only_head=context.head_epochs > 0)
    with contextlib.suppress(RunEnded):  # nothing but steps that are not finite
        for epoch in range(epochs):
            state.progress = Progress(epoch=epoch)
            train_one_epoch(state, context.train_loader.epoch(epoch), loop)
            state.sums.reset()
    loop.stop.close()
    return logged.points
