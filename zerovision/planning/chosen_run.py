"""The run that `zerovision train DATA` or `zerovision.train(data)` starts: given and chosen settings."""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from zerovision.planning.choose import EFFORTS, MINUTES, Choices, choose, has_head_first, of_head, values_of
from zerovision.training.base.errors import UserError, check_name
from zerovision.training.base.plugins import load_plugins
from zerovision.training.base.run_folder import CHOICE, RunFolder
from zerovision.training.config import FLAG_OF, WORDS, TrainConfig
from zerovision.training.config.check import check_launched
from zerovision.training.config.command_line import settled
from zerovision.training.config.file import read_preset
from zerovision.training.config.saved import saved_settings
from zerovision.training.config.values import launch_command, word_of
from zerovision.training.observe.new_run import named_after_data, refuse_existing, run_folder

LEAST_MINUTES = 0.1  # the time limit of a stage that starts when no time is left


@dataclass(frozen=True)
class ChosenRun:
    """One run, or two runs, the first of which trains only the head.

    Attributes:
        stages: the settings of each run; the last run is the requested one.
        choices: the chosen settings and their reasons; empty for a resumed run.
        lines: messages about the choices, and the command that repeats them.
        began: when the time limit started to run, in seconds since 1970.
    """

    stages: Sequence[TrainConfig]
    choices: Choices = field(default_factory=dict)
    lines: Sequence[str] = ()
    began: float = field(default_factory=time.time)

    @property
    def config(self) -> TrainConfig:
        """The settings of the requested run."""
        return self.stages[-1]

    @property
    def folder(self) -> RunFolder:
        """The folder of the run."""
        return run_folder(self.config)

    def train(self, train: Callable[[TrainConfig], int]) -> int:
        """Print the choices, and train; return the exit code.

        Args:
            train: function that trains with a configuration and returns the exit code.
        """
        try:
            if self.lines:
                print("\n".join(self.lines), flush=True)
            return next((code for stage in self.stages if (code := train(self._in_time(stage)))), 0)
        finally:
            with contextlib.suppress(OSError):
                self.folder.path.rmdir()  # fails unless the folder is empty
            if self.lines and self.folder.path.is_dir():
                with contextlib.suppress(OSError):
                    (self.folder.path / CHOICE).write_text("\n".join(self.lines) + "\n", encoding="utf-8")

    def _in_time(self, stage: TrainConfig) -> TrainConfig:
        """Return the stage's settings, with the remaining minutes as the time limit."""
        if not stage.minutes or stage.solver == "lbfgs":
            return stage
        left = stage.minutes - (time.time() - self.began) / 60
        return replace(stage, minutes=round(max(left, LEAST_MINUTES), 2))


def choose_run(
    given: Mapping[str, Any], effort: str, ranks: tuple[int, int], label_of: Mapping[str, str], *, is_launched: bool
) -> ChosenRun:
    """Return the run for the given settings, with its own folder; a resumed run keeps its settings.

    Args:
        given: the user's settings by field, including the data.
        effort: one of `EFFORTS`; '' to derive it from the minutes.
        ranks: number of ranks, and number of ranks with a GPU.
        label_of: see `check_config`.
        is_launched: whether a launcher starts the ranks; it may choose the strategy.

    Raises:
        UserError: for a wrong setting, and for data that cannot be read.
    """
    began, values = time.time(), {**given}
    if values.get("plugin"):
        values["plugin"] = load_plugins(values["plugin"])
    preset = read_preset(values.get("preset", ""))
    resume = values.get("resume", "never")
    if resume in ("auto", "must") and not values.get("run_name"):
        raise UserError(f"{label_of['resume']} {resume} continues a run: add {label_of['run_name']}.")
    if saved_settings(values):
        return ChosenRun([settled(values, preset, label_of, is_launched=is_launched)], began=began)
    if effort:
        check_name("effort", effort, EFFORTS)
    from zerovision.planning.choose_facts import gather  # imports torch

    if values["data"].startswith("hf:"):
        values.setdefault("download", True)  # the user requests it by naming such data
    asked = {**preset, **values}
    effort = effort or _effort_of(asked)
    facts = gather(asked, effort, ranks[1])
    choices = choose(facts, asked, effort)
    config = settled({**values_of(choices), **values}, preset, label_of, is_launched=is_launched)
    heads = [TrainConfig(**of_head(vars(config)))] if has_head_first(facts, vars(config), asked.keys()) else []
    heads = [check_launched(head, FLAG_OF) for head in heads]
    stages = [config := named_after_data(config)]  # creates a folder, and therefore comes after all checks
    for head in heads:
        stages = with_head(replace(head, run_name=f"{config.run_name}-head"), config)
    for stage in stages:
        refuse_existing(stage, run_folder(stage))
    return ChosenRun(stages, choices, describe(facts, choices, stages, ranks[0]), began)


def _effort_of(given: Mapping[str, Any]) -> str:
    """Return the effort that fits the time that the user allows; by default, "minutes"."""
    minutes = given.get("minutes") or MINUTES["minutes"]
    return next((effort for effort in EFFORTS if minutes <= MINUTES[effort]), EFFORTS[-2])


def with_head(head: TrainConfig, config: TrainConfig) -> list[TrainConfig]:
    """Return the settings of a run that trains only the head, and of a full run that starts from its weights."""
    return [head, replace(config, weights=str(run_folder(head).weights), pretrained=False)]


def describe(facts: Any, choices: Choices, stages: Sequence[TrainConfig], ranks: int) -> list[str]:
    """Return the choices with reasons, and the launcher commands that repeat them."""
    of_reason: dict[str, list[str]] = {}
    values = vars(TrainConfig()) | values_of(choices)
    for name in (name for name in choices if name in WORDS):
        of_reason.setdefault(choices[name][1], []).append(f"{FLAG_OF[name][2:]} {word_of(values, name)}")
    lines = [f"{facts.images} images, {facts.classes or 'lists of'} classes; run {stages[-1].run_name}"]
    lines += [f"  {', '.join(settings)}: {reason}" for reason, settings in of_reason.items()]
    name = f"{stages[-1].run_name}-again"
    repeated = [replace(stages[-1], run_name=name)]
    if len(stages) > 1:
        lines.append("  first only the head, to its exact optimum, then all layers: few images, trained weights")
        repeated = with_head(replace(stages[0], run_name=f"{name}-head"), repeated[0])
    commands = [shlex.join(launch_command(stage, ranks, ranks)) for stage in repeated]
    return [*lines, "to repeat it: " + " && \\\n  ".join(commands)]
