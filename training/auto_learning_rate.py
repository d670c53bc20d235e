"""`--learning-rate auto`: a range test on the run's own ranks before the training.

The training is the one that begins with `--learning-rate` and the same number.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from typing import TYPE_CHECKING, Any

from training.checkpoint.atomic_write import write_json
from training.checkpoint.resume import RunStart
from training.checkpoint.store import FoundCheckpoint
from training.config import FIELDS, TrainConfig
from training.config_values import is_allowed
from training.errors import AgreedError, shown
from training.observe.heartbeat import HeartbeatWriter
from training.observe.loggers import Loggers, RunLogger
from training.observe.loggers.points import StepPoint
from training.observe.run_folder import LEARNING_RATE, RunFolder
from training.parallel.collectives import broadcast_object
from training.parallel.exchange import number, optional
from training.parallel.world import World
from training.recipe.range_test import FEWEST_STEPS, HIGHEST, LOWEST, describe_range_test, suggested, with_a_loss
from training.recipe.schedule import SCHEDULES, Schedule
from training.trial import Build, free_memory, shortened, train_shortly, trial, trial_settings

if TYPE_CHECKING:
    from training.run import RunContext

TEST_STEPS = 200
TEST_FOLDER = "range-test"


def choose_learning_rate(
    config: TrainConfig,
    folder: RunFolder,
    found: FoundCheckpoint | None,
    start: RunStart,
    world: World,
    build: Build,
) -> tuple[TrainConfig, list[str]]:
    """Return the configuration with a number for `--learning-rate auto`, and a note for the log; a collective.

    A run keeps the rate that it began with: that of its checkpoint, or of the test with these settings that its folder
    holds.

    Args:
        config: the run's configuration.
        folder: of the run.
        found: the checkpoint to resume from.
        start: which start of the run this is.
        world: the ranks.
        build: builds a run, for the test.

    Raises:
        UserError: on all ranks, if too few steps of the test had a loss, or it did not fall.
    """
    if config.learning_rate != "auto":
        return config, []
    if found is not None:
        rate, source = found.manifest.config.get("learning_rate"), "that of the checkpoint"
    else:
        earlier = _earlier_result(_settings(config, world), folder) if world.is_main else None
        rate = broadcast_object(earlier, optional(number), world)
        source = "found at the run's first start"
        if rate is None:
            rate, source = _test(config, folder, start, world, build), "a range test"
    if not isinstance(rate, float) or not is_allowed(rate, FIELDS["learning_rate"]):
        raise AgreedError(f"--learning-rate auto: {source} is {shown(rate)}, which is no rate: give one.")
    return dataclasses.replace(config, learning_rate=rate), [f"--learning-rate auto is {rate:g}: {source}"]


def _settings(config: TrainConfig, world: World) -> dict[str, Any]:
    images_per_step = config.micro_batch * config.gradient_accumulation_steps * world.size
    return trial_settings(config, "weights", "pretrained", images_per_step=images_per_step)


def _earlier_result(settings: dict[str, Any], folder: RunFolder) -> float | None:
    """Return the rate that a test of this run has found, None if there was none with these settings."""
    try:
        content = json.loads((folder.path / LEARNING_RATE).read_text(encoding="utf-8"))
        return float(content["suggested"]) if content["settings"] == settings else None
    except (OSError, ValueError, TypeError, LookupError):
        return None


def _test(config: TrainConfig, folder: RunFolder, start: RunStart, world: World, build: Build) -> float:
    """Run the test, write its curve into the run's folder and return the rate; a collective."""
    test_config = dataclasses.replace(config, learning_rate=HIGHEST, ema=0.0)
    with trial(test_config, folder.path / TEST_FOLDER, start, world, build) as context:
        curve = with_a_loss(_train(context, start.heartbeat))
    del context
    free_memory(world)
    if len(curve) < FEWEST_STEPS:
        raise AgreedError(
            f"--learning-rate auto: {len(curve)} steps of the range test had a loss, {FEWEST_STEPS} are needed: "
            "give a number."
        )
    if world.is_main:
        with contextlib.suppress(OSError):  # a full disk: the curve alone is missing
            result = describe_range_test(curve) | {"settings": _settings(config, world)}
            write_json(folder.path / LEARNING_RATE, result)
    rate = suggested(curve)
    if rate is None:
        raise AgreedError(
            f"--learning-rate auto: no rate from {LOWEST:g} to {HIGHEST:g} has clearly lowered the loss: give a number."
        )
    return rate


class _Points(RunLogger):
    """Keeps learning rate and loss of each step, on every rank."""

    def __init__(self) -> None:
        self.points: list[tuple[float, float | None]] = []

    def steps(self, point: StepPoint) -> None:
        self.points.append((point.learning_rate, point.loss))


def _train(context: RunContext, heartbeat: HeartbeatWriter) -> list[tuple[float, float | None]]:
    """Train for `TEST_STEPS` steps, or until none is applied any more; return rate and loss of each; a collective."""
    plan, epochs = shortened(context.plan, TEST_STEPS)
    steps, logged = epochs * plan.steps_per_epoch, _Points()
    schedule = Schedule(
        peak=HIGHEST,
        total_steps=steps,
        warmup_steps=0,
        final_scale=LOWEST / HIGHEST,
        head_steps=steps if context.head_epochs else 0,
        **SCHEDULES["sweep"](dataclasses.replace(context.config, final_learning_rate_scale=LOWEST / HIGHEST), 1),
    )
    is_head_first = context.head_epochs > 0
    # Over and over those before the run's last ones, in which nothing is mixed.
    mixed = context.config.epochs - context.config.mixup_off_epochs if context.config.mixup_off_epochs else epochs
    numbers = [number % max(mixed, 1) for number in range(epochs)]
    train_shortly(context, plan, numbers, schedule, Loggers([logged]), heartbeat, only_head=is_head_first)
    return logged.points
