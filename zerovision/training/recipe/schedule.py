"""The learning rate as a function of the step."""

from __future__ import annotations

import dataclasses
import math
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from zerovision.models import USUAL_RATE, model_spec
from zerovision.training.base.errors import UserError, check_name, shown
from zerovision.training.base.units import number_in
from zerovision.training.recipe import read_tune

if TYPE_CHECKING:  # at run time, `recipe.settings` imports a table from this module
    from zerovision.training.recipe.settings import RecipeSettings


def _cosine(progress: float) -> float:
    """Return the cosine decay (Loshchilov and Hutter 2017, https://arxiv.org/abs/1608.03983, eq. 5)."""
    return 0.5 * (1 + math.cos(math.pi * progress))


def _polynomial(progress: float, power: float = 1.0) -> float:
    return (1 - progress) ** power


SMALLEST, FEWEST_EPOCHS, MOST_EPOCHS = sys.float_info.min, 0.1, 1e6  # limits of the numbers in `--schedule`
FEWEST_WARMUP_STEPS = 50  # at a network's own high rate, at which the first steps would be unstable

# The rate's distance from its final value, which falls from 1 to 0, as a function of the share of the decay completed.
SHAPES: dict[str, Callable[[float], float]] = {
    "cosine": _cosine,
    "linear": _polynomial,
    "sqrt": lambda progress: 1 - math.sqrt(progress),  # best after a stable rate: Haegele et al. 2024, arXiv:2405.18392
}


@dataclass(frozen=True)
class Schedule:
    """A learning rate schedule: linear warm-up, a stable rate until `stable_steps`, decay, and the final rate.

    With `base_batch_size`, the peak follows the linear scaling rule of Goyal et al. 2017
    (https://arxiv.org/abs/1706.02677, section 2.1): peak = learning_rate * global_batch / base_batch_size.

    Attributes:
        peak: highest rate.
        total_steps: number of optimizer steps of the run.
        warmup_steps: number of steps until the peak.
        final_scale: final rate as a share of the peak.
        head_steps: number of steps in which the backbone is frozen.
        shape: shape of the decay, as in `SHAPES`.
        stable_steps: number of steps before the decay, if larger than `warmup_steps`.
        cooldown_steps: number of steps at the final rate, at the end of the run.
        drops: steps at which the rate is multiplied by `drop_rate`, in ascending order.
        drop_rate: factor on the rate at each of `drops`.
    """

    peak: float
    total_steps: int
    warmup_steps: int
    final_scale: float
    head_steps: int = 0
    shape: Callable[[float], float] = _cosine
    stable_steps: int = 0
    cooldown_steps: int = 0
    drops: tuple[int, ...] = ()
    drop_rate: float = 1.0

    def shortened(self, total_steps: int, *, only_head: bool) -> Schedule:
        """Return the schedule scaled to another number of steps, which all train either only the head or all layers."""
        share = total_steps / self.total_steps
        return dataclasses.replace(
            self,
            total_steps=total_steps,
            warmup_steps=round(share * self.warmup_steps),
            head_steps=total_steps if only_head else 0,
            stable_steps=round(share * self.stable_steps),
            cooldown_steps=round(share * self.cooldown_steps),
            drops=tuple(round(share * drop) for drop in self.drops),
        )

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of optimizer step `step`, counted from 0 over the whole run."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        first, last = max(self.warmup_steps, self.stable_steps), self.total_steps - self.cooldown_steps
        progress = 1.0 if step >= last else max(step - first, 0) / max(1, last - first)
        scale = self.final_scale + (1 - self.final_scale) * self.shape(progress)
        return self.peak * scale * self.drop_rate ** bisect_right(self.drops, step)

    def set_learning_rates(self, groups: Iterable[dict[str, Any]], step: int) -> None:
        """Set the learning rate of every parameter group for optimizer step `step`.

        The rate of the backbone's groups is 0 while only the head is trained.
        """
        for group in groups:
            is_frozen = step < self.head_steps and group["is_backbone"]
            group["lr"] = 0.0 if is_frozen else self.learning_rate(step) * group["rate_scale"]


def has_slow_backbone(config: RecipeSettings) -> bool:
    """Return whether a pretrained backbone is trained below a new head, at a learning rate of its own."""
    return model_spec(config.model_type).always_pretrained and read_tune(config.tune)[0] in ("full", "layers")


def head_epochs_of(config: RecipeSettings) -> int:
    """Return the number of epochs in which only the new head is trained."""
    return config.head_epochs if has_slow_backbone(config) else 0


def build_schedule(config: RecipeSettings, steps_per_epoch: int, global_batch: int, head_epochs: int) -> Schedule:
    """Build the schedule of a run.

    Args:
        config: the run's configuration.
        steps_per_epoch: number of optimizer steps per epoch.
        global_batch: number of images per optimizer step, over all ranks and micro-steps.
        head_epochs: number of epochs in which only the new head is trained; 0 to train all layers from the start.
    """
    assert config.learning_rate != "auto"  # already chosen
    if config.warmup_epochs == "auto":
        warmup_steps = min(steps_per_epoch, config.epochs * steps_per_epoch // 10)
        if config.learning_rate == config.default_rate > USUAL_RATE:
            warmup_steps = max(warmup_steps, FEWEST_WARMUP_STEPS)
    else:
        warmup_steps = round(config.warmup_epochs * steps_per_epoch)
    fields = {
        "final_scale": config.final_learning_rate_scale,
        "cooldown_steps": round(config.cooldown_epochs * steps_per_epoch),
    }
    return Schedule(
        peak=config.learning_rate * (global_batch / config.base_batch_size if config.base_batch_size else 1.0),
        total_steps=config.epochs * steps_per_epoch,
        warmup_steps=warmup_steps,
        head_steps=head_epochs * steps_per_epoch,
        **(fields | schedule_fields(config, steps_per_epoch)),
    )


def stable_epochs(config: RecipeSettings) -> int:
    """Return the number of epochs before the decay of wsd that are the same in a longer run; 0 for other schedules."""
    return schedule_fields(config, 1).get("stable_steps", 0)


def _polynomial_fields(_config: RecipeSettings, _steps: int, power: str = "1") -> dict[str, Any]:
    return {"shape": partial(_polynomial, power=number_in(power, SMALLEST, 100))}


def _step_fields(config: RecipeSettings, steps: int, at: str = "auto", factor: str = "0.1") -> dict[str, Any]:
    """Return the fields for drops as in PyTorch's `MultiStepLR` and `StepLR`; epochs include the warm-up."""
    if "," in at:
        epochs = sorted(number_in(word, 0.0, MOST_EPOCHS) for word in at.removesuffix(",").split(","))
    else:
        every = config.epochs / 3 if at == "auto" else number_in(at, FEWEST_EPOCHS, MOST_EPOCHS)
        epochs = [every * number for number in range(1, math.ceil(round(config.epochs / every, 6)))]
    drops = tuple(round(epoch * steps) for epoch in epochs)
    return {"final_scale": 1.0, "drops": drops, "drop_rate": number_in(factor, SMALLEST, 1)}


def _stable_fields(config: RecipeSettings, steps: int, decay: str = "auto", shape: str = "sqrt") -> dict[str, Any]:
    epochs_of_decay = config.epochs / 5 if decay == "auto" else number_in(decay, FEWEST_EPOCHS, MOST_EPOCHS)
    epochs = max(0, math.floor(round(config.epochs - (config.cooldown_epochs + epochs_of_decay), 6)))
    return {"shape": SHAPES[shape], "stable_steps": epochs * steps}


class Form(NamedTuple):
    """A form of learning rate decay."""

    fields: Callable[..., dict[str, Any]]  # of `Schedule`, from settings, steps per epoch, and the words after the name
    usage: str  # the name of the form, and the options that may follow it


_STEPS = "step:30,60:0.1 to decay at epochs 30 and 60, or step:30:0.1 to decay every 30 epochs"
SCHEDULES = {
    "cosine": Form(lambda _config, _steps: {"shape": _cosine}, "cosine"),
    "linear": Form(lambda _config, _steps: {"shape": _polynomial}, "linear"),
    "polynomial": Form(_polynomial_fields, "polynomial:POWER with 0 < POWER <= 100, such as polynomial:2"),
    "step": Form(_step_fields, f"step:EPOCHS:FACTOR with 0 < FACTOR <= 1, such as {_STEPS}"),
    "constant": Form(lambda _config, _steps: {"final_scale": 1.0}, "constant"),
    "wsd": Form(_stable_fields, "wsd:EPOCHS:SHAPE with SHAPE sqrt, linear or cosine, such as wsd:5:sqrt"),
}


def schedule_fields(config: RecipeSettings, steps_per_epoch: int) -> dict[str, Any]:
    """Return the fields of `Schedule` that `--schedule` sets.

    Raises:
        UserError: for an unknown schedule, or for invalid options after its name.
    """
    name, *words = config.schedule.split(":")
    check_name("schedule", name, SCHEDULES)
    try:
        return SCHEDULES[name].fields(config, steps_per_epoch, *words)
    except (KeyError, TypeError, ValueError):  # an unknown shape, too many words or an invalid number
        usage = SCHEDULES[name].usage
        alone = "" if ":" in usage else " alone"
        raise UserError(f"schedule {shown(config.schedule)}: expected {usage}{alone}.") from None


def given_decay(text: str) -> float:
    """Return the epochs given for the decay of wsd, which must fit into the run; 0 for 'auto' or another schedule."""
    name, decay, *_ = *text.split(":"), "auto"
    return 0.0 if name != "wsd" or decay == "auto" else float(decay)


def schedule_notes(schedule: Schedule) -> list[str]:
    """Return notes for the log if most of the run is warm-up, or if a step schedule has drops after the run's end."""
    notes = []
    if 2 * schedule.warmup_steps > schedule.total_steps:
        notes.append(
            f"the learning rate warms up in {min(schedule.warmup_steps, schedule.total_steps)} of "
            f"{schedule.total_steps} steps: to train at the full rate, use a lower --warmup-epochs or more --epochs"
        )
    if schedule.drop_rate != 1:
        late = sum(drop >= schedule.total_steps for drop in schedule.drops)
        if late == len(schedule.drops):
            notes.append("no decay of --schedule step falls within the run: the rate stays constant")
        elif late:
            notes.append(f"{late} of the {len(schedule.drops)} decays of --schedule step come after the run's end")
    return notes
