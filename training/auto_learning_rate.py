"""`--learning-rate auto`: short trainings on the run's own ranks before the training, each with another rate.

The training is the one that begins with `--learning-rate` and the same number.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

from training.base.atomic_write import write_json
from training.base.errors import AgreedError, shown
from training.base.heartbeat import SLOW_PHASE, HeartbeatWriter
from training.base.points import StepPoint
from training.base.run_folder import LEARNING_RATE, RunFolder
from training.base.run_logger import Loggers, RunLogger
from training.config import FIELDS, TrainConfig
from training.config.values import is_allowed
from training.prepare import Prepared, RunStart
from training.recipe.loss import GUESSES
from training.recipe.rate_search import FEWEST_STEPS, HIGHEST, LOWEST, describe_search, find_rate, in_words
from training.setup import Run
from training.trial import free_memory, shortened, train_shortly, trial, trial_settings
from training.world.collectives import broadcast_object
from training.world.exchange import number, optional
from training.world.world import World

TRIAL_STEPS = 300  # at most as many as the run has
FAR = 5  # from the default, by which a rate is said to be below it
TRIAL_FOLDER = "learning-rate-trial"


def choose_learning_rate(prepared: Prepared, start: RunStart) -> Prepared:
    """Return the run with a number for `--learning-rate auto`, and a note for the log; a collective.

    A run keeps the rate that it began with: that of its checkpoint, or of the search with these settings that its
    folder holds.

    Args:
        prepared: the run.
        start: which start of the run this is.

    Raises:
        UserError: on all ranks, if no rate has clearly lowered the loss.
    """
    config, world, found = prepared.config, prepared.world, prepared.found
    if config.learning_rate != "auto":
        return prepared
    if found is not None:
        rate, source = found.manifest.config.get("learning_rate"), "that of the checkpoint"
    else:
        earlier = _earlier_result(_settings(config, world), prepared.folder) if world.is_main else None
        rate = broadcast_object(earlier, optional(number), world)
        source = "found at the run's first start"
        if rate is None:
            rate, source = _search(prepared, start)
    if not isinstance(rate, float) or not is_allowed(rate, FIELDS["learning_rate"]):
        raise AgreedError(f"--learning-rate auto: {source} is {shown(rate)}, which is no rate: give one.")
    return prepared.decide(f"--learning-rate auto is {rate:g}: {source}", learning_rate=rate)


def _settings(config: TrainConfig, world: World) -> dict[str, Any]:
    images_per_step = config.micro_batch * config.gradient_accumulation_steps * world.data.size
    return trial_settings(config, "weights", "pretrained", images_per_step=images_per_step)


def _earlier_result(settings: dict[str, Any], folder: RunFolder) -> float | None:
    """Return the rate that an earlier start of this run has found, None if there was none with these settings."""
    try:
        content = json.loads((folder.path / LEARNING_RATE).read_text(encoding="utf-8"))
        return float(content["suggested"]) if content["settings"] == settings else None
    except (OSError, ValueError, TypeError, LookupError):
        return None


def _search(prepared: Prepared, start: RunStart) -> tuple[float, str]:
    """Return the best rate and what was tried in words, and write all losses into the run's folder; a collective."""
    config, world, classes = prepared.config, prepared.world, len(prepared.data.class_names)

    def measure(rate: float) -> list[float | None]:
        start.heartbeat.beat("start-up", allowed_s=SLOW_PHASE * config.hang_timeout)
        with trial(prepared.changed(learning_rate=rate, ema=0.0), TRIAL_FOLDER) as context:
            losses = _train(context, start.heartbeat)
        del context
        free_memory(world)
        return losses

    usual: float = FIELDS["learning_rate"].default  # type: ignore[assignment]  # it has one
    rate, tried = find_rate(usual, LOWEST, HIGHEST, GUESSES[config.loss](max(classes, 2)), measure)
    if world.is_main:
        with contextlib.suppress(OSError):  # a full disk: the losses alone are missing
            result = describe_search(rate, tried) | {"settings": _settings(config, world)}
            write_json(prepared.folder.path / LEARNING_RATE, result)
    if rate is None:
        raise AgreedError(
            f"--learning-rate auto: no rate from {min(tried):g} to {max(tried):g} has clearly lowered the loss within "
            f"{len(tried[usual])} steps: give a number (the default is {usual:g})."
        )
    far = f"far below the default, {usual:g}; " if rate < usual / FAR else ""
    return rate, f"{far}final losses of short trainings: {in_words(tried)}"


class _Losses(RunLogger):
    """Keeps the loss of each step, on every rank."""

    def __init__(self) -> None:
        self.losses: list[float | None] = []

    def steps(self, point: StepPoint) -> None:
        self.losses.append(point.loss)


def _train(context: Run, heartbeat: HeartbeatWriter) -> list[float | None]:
    """Train the run in small, or until no step is applied any more; return the loss of each step; a collective."""
    run = context.schedule
    plan, epochs = shortened(context.plan, max(FEWEST_STEPS, min(TRIAL_STEPS, run.total_steps)))
    is_head_first, logged = context.head_epochs > 0, _Losses()
    schedule = run.shortened(epochs * plan.steps_per_epoch, only_head=is_head_first)
    # Over and over those before the run's last ones, in which nothing is mixed.
    mixed = context.config.epochs - context.config.mixup_off_epochs if context.config.mixup_off_epochs else epochs
    numbers = [number % max(mixed, 1) for number in range(epochs)]
    train_shortly(context, plan, numbers, schedule, Loggers([logged]), heartbeat, only_head=is_head_first)
    return logged.losses
