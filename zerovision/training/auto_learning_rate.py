"""`--learning-rate auto`: tries learning rates in short trials on the run's own ranks before the training.

The trials differ only in the rate, which goes up or down from the default. The run then trains exactly as if the chosen
rate had been set with `--learning-rate`.

This is not a range test (Smith 2017, https://arxiv.org/abs/1506.01186, section 3.3), which raises the rate at every
step of a single run. The loss in a range test depends on the number of steps as much as on the rate, so the test would
choose far too low a rate for a network whose loss falls only after a while.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from zerovision.training.base.errors import AgreedError, shown
from zerovision.training.base.files import write_json
from zerovision.training.base.heartbeat import SLOW_PHASE
from zerovision.training.base.run_folder import LEARNING_RATE
from zerovision.training.base.units import plural
from zerovision.training.config import FIELDS
from zerovision.training.config.values import is_allowed
from zerovision.training.steps.carrier import Run
from zerovision.training.tasks.labels import GUESSES
from zerovision.training.trial import (
    TrialStopped,
    earlier_result,
    free_memory,
    shortened,
    train_shortly,
    trial,
    trial_settings,
)
from zerovision.training.world.collectives import broadcast_object

TRIAL_STEPS = 300  # per trial, or the number of steps of the run if it has fewer
FAR = 5  # a rate that is lower than the default by this factor is called far below the default
TRIAL_FOLDER = "learning-rate-trial"


LOWEST, HIGHEST = 1e-6, 1.0  # lowest and highest rate to try
FACTOR = math.sqrt(10)  # between one rate and the next
PATIENCE = 2  # number of rates to try without improvement as long as no rate has a loss below that of a guess
FEWEST_STEPS = 20
CLEARLY = 2.5  # number of standard errors by which a loss must be lower
BETTER = 0.02  # fraction by which a better rate must lower the loss

Losses = Sequence[float | None]  # one per step, in nats; None or NaN for a step without a loss


def choose_learning_rate(run: Run) -> Run:
    """Return the run with `--learning-rate auto` resolved to a number, and a note for the log; a collective.

    If no rate clearly lowers the loss, raise a UserError on all ranks.
    """
    config, world = run.config, run.world
    if config.learning_rate != "auto":
        return run
    images_per_step = config.micro_batch * config.gradient_accumulation_steps * world.data.size
    about = {"settings": trial_settings(config, "weights", "pretrained", images_per_step=images_per_step)}
    earlier = earlier_result(run.folder.path / LEARNING_RATE, about) if world.is_main else {}
    rate, source = broadcast_object(earlier.get("suggested"), world), "found at the run's first start"
    if rate is None:
        try:
            rate, source = _search(run, about)
        except TrialStopped:  # the run itself is about to end
            rate, source = FIELDS["learning_rate"].default, "the default, because the search was stopped"
    if not isinstance(rate, float) or not is_allowed(rate, FIELDS["learning_rate"]):
        raise AgreedError(f"--learning-rate auto: {source} is {shown(rate)}, which is not a rate: use a number.")
    return run.changed(learning_rate=rate).noting(f"--learning-rate auto is {rate:g}: {source}")


def _search(run: Run, about: dict[str, Any]) -> tuple[float, str]:
    """Return the best rate and a description, and write all losses and `about` into the run's folder; a collective."""
    config, world, classes = run.config, run.world, len(run.data.class_names)

    def say(text: str) -> None:
        if world.is_main and config.progress != "off":
            print(f"--learning-rate auto: {text}", flush=True)

    def measure(rate: float) -> list[float | None]:
        run.start.heartbeat.beat("start-up", allowed_s=SLOW_PHASE * config.hang_timeout)
        started = time.monotonic()
        with trial(run.changed(learning_rate=rate, ema=0.0), TRIAL_FOLDER) as attempt:
            losses = _train(attempt)
        del attempt
        free_memory(world)
        end, seconds = final_loss(losses), time.monotonic() - started
        found = f"has a loss of {end:.3f} after {plural(len(losses), 'step')}" if math.isfinite(end) else "diverges"
        say(f"{rate:g} {found} ({seconds:.0f} s)")
        return losses

    say("short trainings with different rates find it; one line each")

    usual = config.default_rate
    rate, tried = find_rate(usual, LOWEST, HIGHEST, GUESSES[config.loss](max(classes, 2)), measure)
    if world.is_main:
        with contextlib.suppress(OSError):  # e.g. on a full disk: only the file of losses is then missing
            write_json(run.folder.path / LEARNING_RATE, describe_search(rate, tried) | about)
    if rate is None:
        raise AgreedError(
            f"--learning-rate auto: no rate from {min(tried):g} to {max(tried):g} clearly lowered the loss within "
            f"{len(tried[usual])} steps: use a number (the default is {usual:g})."
        )
    far = f"far below the default, {usual:g}; " if rate < usual / FAR else ""
    return rate, f"{far}final losses of short trainings: {in_words(tried)}"


def _train(run: Run) -> list[float | None]:
    """Train a short version of the run; return each step's loss, or none if steps kept being skipped; a collective."""
    config, whole = run.config, run.schedule
    plan, epochs = shortened(run.plan, max(FEWEST_STEPS, min(TRIAL_STEPS, whole.total_steps)))
    is_head_first = run.model.head_epochs > 0
    schedule = whole.shortened(epochs * plan.steps_per_epoch, only_head=is_head_first)
    # Cycle through the epochs that precede the run's last ones, in which no images are mixed.
    mixed = config.epochs - config.mixup_off_epochs if config.mixup_off_epochs else epochs
    numbers = [number % max(mixed, 1) for number in range(epochs)]
    small = dataclasses.replace(run, plan=plan, schedule=schedule)
    losses = train_shortly(small, numbers, only_head=is_head_first).losses
    steps = epochs * plan.steps_per_epoch
    # A training that ended early has lost, although most of its last steps may have a loss.
    return losses if len(losses) == steps else [None] * steps


def find_rate(
    first: float, lowest: float, highest: float, guess: float, measure: Callable[[float], Losses]
) -> tuple[float | None, dict[float, Losses]]:
    """Return the best rate (None if even that rate does not lower the loss), and the losses of each rate tried.

    From the first rate, the search goes up as long as rates get better; if no higher rate is better, it goes down. Each
    call of `measure` starts from the same weights and uses the same images. Differences above `guess`, the loss of a
    uniform guess in nats, mean nothing, because a network reaches this loss by learning to predict the same
    probabilities for every image.
    """
    best, tried = first, {first: measure(first)}
    for factor in (FACTOR, 1 / FACTOR):
        rate, in_vain = best, 0
        while in_vain < (1 if final_loss(tried[best]) < guess else PATIENCE):
            rate = float(f"{rate * factor:.2g}")
            if not lowest <= rate <= highest or rate in tried:
                break
            tried[rate] = measure(rate)
            best, in_vain = (rate, 0) if is_better(tried[rate], tried[best], guess) else (best, in_vain + 1)
    # Compare with the first losses of all rates: at too high a rate, even these exceed the loss of the initial weights.
    return best if has_fallen(tried[best], [guess, *map(first_loss, tried.values())]) else None, tried


def final_loss(losses: Losses) -> float:
    """Return the mean of the last losses, or infinity if at least half are missing, as happens with too high a rate."""
    last = _finite(losses[-_few(losses) :])
    return statistics.fmean(last) if 2 * len(last) > _few(losses) else math.inf


def first_loss(losses: Losses) -> float:
    """Return the mean of the first losses, or infinity if all of them are missing."""
    first = _finite(losses[: _few(losses)])
    return statistics.fmean(first) if first else math.inf


def is_better(losses: Losses, others: Losses, guess: float) -> bool:
    """Return whether `losses` end clearly lower than `others`, judged by their differences at the same steps."""
    ours, theirs = final_loss(losses), final_loss(others)
    if math.isinf(ours) or math.isinf(theirs):
        return ours < theirs
    pairs = zip(losses[-_few(losses) :], others[-_few(others) :], strict=True)
    saved = _finite([other - own for own, other in pairs if own is not None and other is not None])
    error = statistics.stdev(saved) / math.sqrt(len(saved)) if len(saved) > 1 else 0.0
    return min(theirs, guess) - ours > max(CLEARLY * error, BETTER * theirs)


def has_fallen(losses: Losses, before: Iterable[float]) -> bool:
    """Return whether the final loss is clearly below all losses in `before`, given the scatter from step to step."""
    steps = _finite(losses)
    if math.isinf(final_loss(losses)) or len(steps) < FEWEST_STEPS // 2:
        return False
    variance = statistics.fmean((after - before) ** 2 for before, after in pairwise(steps)) / 2
    return min(before) - final_loss(losses) > CLEARLY * math.sqrt(2 * variance / _few(losses))


def _few(losses: Losses) -> int:
    return max(len(losses) // 5, 1)


def _finite(losses: Losses) -> list[float]:
    return [loss for loss in losses if loss is not None and math.isfinite(loss)]


def describe_search(rate: float | None, tried: Mapping[float, Losses]) -> dict[str, Any]:
    """Return the contents of `learning_rate.json`, in which losses that are not finite are null."""
    rows = []
    for tried_rate, losses in sorted(tried.items()):
        numbers = [loss if loss is not None and math.isfinite(loss) else None for loss in (final_loss(losses), *losses)]
        rows.append([tried_rate, numbers[0], numbers[1:]])
    return {"suggested": rate, "columns": ["learning_rate", "final_loss", "losses"], "tried": rows}


def in_words(tried: Mapping[float, Losses]) -> str:
    """Return the final loss of each rate as text, in ascending order of the rates."""
    return ", ".join(f"{rate:g}: {final_loss(losses):.3f}" for rate, losses in sorted(tried.items()))
