"""The run that `zerovision train DATA` and `zerovision.train(data)` make of what is given: what is not, is chosen."""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from zerovision.planning.choose import EFFORTS, MINUTES, Choices, choose, has_head_first, of_head, values_of
from zerovision.training.base.errors import UserError, unknown_name
from zerovision.training.base.plugins import load_plugins
from zerovision.training.base.run_folder import CHOICE, RunFolder
from zerovision.training.config import FLAG_OF, TrainConfig
from zerovision.training.config.check import check_launched
from zerovision.training.config.command_line import settled
from zerovision.training.config.file import read_preset
from zerovision.training.config.saved import saved_settings
from zerovision.training.config.values import launch_command, show_value
from zerovision.training.observe.new_run import named_after_data, refuse_existing, run_folder

LEAST_MINUTES = 0.1  # that are left for a run


@dataclass(frozen=True)
class ChosenRun:
    """A run, or two, of which the first trains the head alone.

    Attributes:
        stages: their settings; the last one is the run that was asked for.
        choices: what was chosen, by setting, with the reason; empty for a run that goes on.
        lines: say so, and what repeats it.
        began: when the minutes began, in seconds since 1970.
    """

    stages: Sequence[TrainConfig]
    choices: Choices = field(default_factory=dict)
    lines: Sequence[str] = ()
    began: float = field(default_factory=time.time)

    @property
    def config(self) -> TrainConfig:
        """The settings of the run that was asked for."""
        return self.stages[-1]

    @property
    def folder(self) -> RunFolder:
        """Where it is."""
        return run_folder(self.config)

    def train(self, train: Callable[[TrainConfig], int]) -> int:
        """Print what was chosen, and train; return the exit code.

        Args:
            train: trains with a configuration, and returns its exit code.
        """
        try:
            if self.lines:
                print("\n".join(self.lines), flush=True)
            return next((code for stage in self.stages if (code := train(self._in_time(stage)))), 0)
        finally:
            with contextlib.suppress(OSError):
                self.folder.path.rmdir()  # if nothing is in it
            if self.lines and self.folder.path.is_dir():
                with contextlib.suppress(OSError):
                    (self.folder.path / CHOICE).write_text("\n".join(self.lines) + "\n", encoding="utf-8")

    def _in_time(self, stage: TrainConfig) -> TrainConfig:
        """Return its settings with the minutes that are left."""
        if not stage.minutes or stage.solver == "lbfgs":
            return stage
        left = stage.minutes - (time.time() - self.began) / 60
        return replace(stage, minutes=round(max(left, LEAST_MINUTES), 2))


def choose_run(
    given: Mapping[str, Any], effort: str, ranks: tuple[int, int], label_of: Mapping[str, str], *, is_launched: bool
) -> ChosenRun:
    """Return the run of what is given, with a folder of its own; a run that goes on keeps what it has.

    Args:
        given: settings of the user, by field, the data among them.
        effort: one of `EFFORTS`; '' for the one that the minutes allow.
        ranks: how many train, and how many of them have a GPU each.
        label_of: as of `check_config`.
        is_launched: whether a launcher starts the ranks, which may be asked for the strategy.

    Raises:
        UserError: for a setting that is wrong, and for data that cannot be read.
    """
    began, values = time.time(), {**given}
    if values.get("plugin"):
        values["plugin"] = load_plugins(values["plugin"])
    preset = read_preset(values.get("preset", ""))
    resume = values.get("resume", "never")
    if resume in ("auto", "must") and not values.get("run_name"):
        raise UserError(f"{label_of['resume']} {resume} goes on with a run: add {label_of['run_name']}.")
    if saved_settings(values):
        return ChosenRun([settled(values, preset, label_of, is_launched=is_launched)], began=began)
    if effort and effort not in EFFORTS:
        raise unknown_name("effort", effort, EFFORTS)
    from zerovision.planning.choose_facts import gather  # imports torch

    if values["data"].startswith("hf:"):
        values.setdefault("download", True)  # which is what the user has asked for
    asked = {**preset, **values}
    effort = effort or _effort_of(asked)
    facts = gather(asked, effort, ranks[1])
    choices = choose(facts, asked, effort)
    config = settled({**values_of(choices), **values}, preset, label_of, is_launched=is_launched)
    heads = [TrainConfig(**of_head(vars(config)))] if has_head_first(facts, vars(config), asked.keys()) else []
    heads = [check_launched(head, FLAG_OF) for head in heads]
    stages = [config := named_after_data(config)]  # makes a folder: by now all is well
    for head in heads:
        stages = with_head(replace(head, run_name=f"{config.run_name}-head"), config)
    for stage in stages:
        refuse_existing(stage, run_folder(stage))
    return ChosenRun(stages, choices, describe(facts, choices, stages, ranks[0]), began)


def _effort_of(given: Mapping[str, Any]) -> str:
    """Return the effort for what the user allows, `minutes` if that is nothing."""
    minutes = given.get("minutes") or MINUTES["minutes"]
    return next((effort for effort in EFFORTS if minutes <= MINUTES[effort]), EFFORTS[-2])


def with_head(head: TrainConfig, config: TrainConfig) -> list[TrainConfig]:
    """Return a run of the head alone, and the run of all, which starts from it."""
    return [head, replace(config, weights=str(run_folder(head).weights), pretrained=False)]


def describe(facts: Any, choices: Choices, stages: Sequence[TrainConfig], ranks: int) -> list[str]:
    """Return what was chosen and why, and the launcher's line, or lines, that repeat it."""
    of_reason: dict[str, list[str]] = {}
    for name, (value, reason) in choices.items():
        of_reason.setdefault(reason, []).append(f"{FLAG_OF[name][2:]} {show_value(value)}")
    lines = [f"{facts.images} images to learn from, {facts.classes or 'lists of'} classes; run {stages[-1].run_name}"]
    lines += [f"  {', '.join(settings)}: {reason}" for reason, settings in of_reason.items()]
    if len(stages) > 1:
        lines.append("  the head alone first, at its exact optimum, then all: few images, trained weights")
    name = f"{stages[-1].run_name}-again"
    repeated = [replace(stages[-1], run_name=name)]
    if len(stages) > 1:
        repeated = with_head(replace(stages[0], run_name=f"{name}-head"), repeated[0])
    commands = [shlex.join(launch_command(stage, ranks, ranks)) for stage in repeated]
    return [*lines, "to repeat it: " + " && \\\n  ".join(commands)]
