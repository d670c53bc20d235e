"""`train DATA`: chooses what is not given, says why, starts the launcher, and says what comes next."""

from __future__ import annotations

import contextlib
import inspect
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from zerovision.launch.arguments import LAUNCHERS, SETTINGS, setting_parser
from zerovision.planning.choose import EFFORTS, MINUTES, choose, has_head_first, of_head, values_of
from zerovision.training.base.errors import UserError, shown
from zerovision.training.base.heartbeat import end_with_caller
from zerovision.training.base.lasting_output import outlast_readers
from zerovision.training.base.places import as_typed
from zerovision.training.base.plugins import load_plugins
from zerovision.training.base.run_folder import CHOICE, EVALUATION, TEST_EVALUATION, RunFolder, shown_path
from zerovision.training.base.settings import MOST_GPUS_PER_NODE
from zerovision.training.base.units import percent
from zerovision.training.config import FIELDS, FLAG_OF, TrainConfig
from zerovision.training.config.check import check_config
from zerovision.training.config.command_line import OneLineParser, training_parser
from zerovision.training.config.values import launch_command, show_value
from zerovision.training.launched_run import launch_words
from zerovision.training.observe.new_run import run_folder
from zerovision.training.world.gpus import usable_gpus

LONGEST_NAME = 60
LEAST_MINUTES = 0.1  # that are left for a run


@dataclass(frozen=True)
class TrainSettings:
    """Trains a classifier on photographs. It chooses every setting that you leave out, and says why.

    python scripts/train.py ~/photos                       # a folder of images for each class
    python scripts/train.py ~/photos --minutes 20          # no longer than that
    python scripts/train.py labels.csv --effort hours      # a larger network
    python scripts/train.py ~/photos --epochs 30 --model-type timm:resnet50

    DATA is whatever the trainer's --data takes: a folder, a table, tar or Parquet files, hf:ORG/NAME, digits. All flags
    of the trainer are taken as well (docs/reference/flags.md lists them), and those of
    bash scripts/launch_distributed.sh: each one given overrides a choice.
    """

    given: Mapping[str, Any]  # of `TrainConfig`
    effort: str
    gpus: int  # 0: all, or one CPU rank
    launcher_flags: Sequence[str]
    started: float

    @classmethod
    def read(cls, words: Sequence[str]) -> TrainSettings:
        """Read the command line.

        Raises:
            UserError: for whatever cannot be parsed.
            SystemExit: after `--help`.
        """
        started = time.time()
        parser = OneLineParser("train", inspect.getdoc(cls))
        parser.add_argument("data", metavar="DATA", help="What to train on.")
        parser.add_choice("--effort", EFFORTS, default="", help="How much to spend; default: minutes.")
        parser.add_number("--gpus", 0, MOST_GPUS_PER_NODE, default=0, help="GPUs, or CPU ranks; 0: all GPUs, or one.")
        own, others = parser.parse_known(words)
        if not words[0] == own.data:
            raise UserError(f"{shown(words[0])} comes before DATA: give the folder or the table first, then flags.")
        flags = training_parser()
        values, rest = flags.parse_known(others)
        if unknown := setting_parser(LAUNCHERS["launch_distributed.sh"]).parse_known(rest)[1]:
            flags.parse(unknown, [*parser.flags, *SETTINGS])
        given = {name: value for name, value in vars(values).items() if name in FIELDS}
        if values.config or given.get("preset"):
            from zerovision.training.config.file import read_config_file, read_preset

            of_file = read_config_file(Path(values.config)) if values.config else {}
            given = read_preset((of_file | given).get("preset", "")) | of_file | given
        if given.get("plugin"):
            given["plugin"] = load_plugins(given["plugin"])
        if given.get("resume", "never") != "never":
            raise UserError("--resume goes on with a run, for which nothing is chosen: type the line that it printed.")
        if given.get("data", own.data) != own.data:
            raise UserError(f"--data {shown(given['data'])}, but DATA is {shown(own.data)}: give one.")
        return cls(given | {"data": own.data}, own.effort, own.gpus, rest, started)


def run(settings: TrainSettings) -> int:
    """Train; return the launcher's exit code."""
    end_with_caller()
    outlast_readers()
    from zerovision.planning.choose_facts import gather  # imports torch

    given, effort = settings.given, settings.effort or _effort_of(settings.given)
    present = len(usable_gpus())
    gpus = settings.gpus or present
    if "download" not in given and given["data"].startswith("hf:"):
        given = {"download": True, **given}  # which is what the user has asked for
    facts = gather(given, effort, gpus if present else 0)
    choices = choose(facts, given, effort)
    config = _named(check_config(TrainConfig(**{**values_of(choices), **given}), FLAG_OF))
    folder, values = run_folder(config), vars(config)
    stages = [config]
    if has_head_first(facts, values, given.keys()):
        head = replace(TrainConfig(**of_head(values)), run_name=f"{config.run_name}-head")
        stages = with_head(check_config(head, FLAG_OF), config)
    lines = describe(facts, choices, stages, gpus or 1)
    print("\n".join(lines), flush=True)
    try:
        for stage in stages:
            if code := _launch(stage, gpus or 1, settings):
                return code
    finally:
        if folder.path.is_dir():
            with contextlib.suppress(OSError):
                (folder.path / CHOICE).write_text("\n".join(lines) + "\n", encoding="utf-8")
    print("\n".join(outcome(folder, given["data"])), flush=True)
    return 0


def _effort_of(given: Mapping[str, Any]) -> str:
    """Return the effort for what the user allows, `minutes` if that is nothing."""
    minutes = given.get("minutes") or MINUTES["minutes"]
    return next((effort for effort in EFFORTS if minutes <= MINUTES[effort]), EFFORTS[-2])


def _named(config: TrainConfig) -> TrainConfig:
    """Return the configuration with the name of its data for the run: photos, or photos-2 if there is one already."""
    from zerovision.delivery.trained_model import slug

    if config.run_name:
        return config
    stem = Path(os.path.expanduser(config.data.rstrip("/"))).name.partition(".")[0] or "run"
    name = slug(stem.rpartition(":")[2]).strip("-_")[:LONGEST_NAME] or "run"
    number, taken = 1, run_folder(config, name).path.exists
    while taken():
        number += 1
        taken = run_folder(config, f"{name}-{number}").path.exists
    return replace(config, run_name=name if number == 1 else f"{name}-{number}")


def with_head(head: TrainConfig, config: TrainConfig) -> list[TrainConfig]:
    """Return a run of the head alone, and the run of all, which starts from it."""
    return [head, replace(config, weights=str(run_folder(head).weights), pretrained=False)]


def describe(facts: Any, choices: Mapping[str, tuple[Any, str]], stages: Sequence[TrainConfig], gpus: int) -> list[str]:
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
    commands = [shlex.join(launch_command(stage, gpus, gpus)) for stage in repeated]
    return [*lines, "to repeat it: " + " && \\\n  ".join(commands)]


def _launch(config: TrainConfig, gpus: int, settings: TrainSettings) -> int:
    """Train as scripts/launch_distributed.sh does, in what is left of the minutes; return the exit code."""
    from zerovision.launch.launch import main as launch

    if config.minutes and config.solver != "lbfgs":
        left = config.minutes - (time.time() - settings.started) / 60
        config = replace(config, minutes=round(max(left, LEAST_MINUTES), 2))
    return launch(["launch_distributed.sh", *launch_words(config, gpus), *settings.launcher_flags])


def outcome(folder: RunFolder, data: str) -> list[str]:
    """Return how good the model of a run is, its weakest class, and the commands that come next."""
    from zerovision.delivery.intervals import interval_of
    from zerovision.training.observe.evaluation import read_scores

    lines, run = [], shlex.quote(shown_path(folder.path))
    of_test = read_scores(folder.path / TEST_EVALUATION)
    scores = of_test or read_scores(folder.path / EVALUATION)
    if scores:
        kind = "of the test part" if of_test else "held out, which chose the epoch"
        interval = interval_of(scores, "top1")
        sure = f" (95 % sure: {percent(interval[0])} to {percent(interval[1])})" if interval else ""
        lines.append(f"accuracy     {percent(scores['top1'])} of {scores['samples']} images {kind}{sure}")
        known = [one for one in scores["classes"] if one["support"]]
        worst = min(known, key=lambda one: (one["recall"], -one["support"]))
        lines.append(
            f"worst class  {worst['name']}: {percent(worst['recall'])} of its {worst['support']} images are recognized"
        )
    commands = {
        "evaluate": f"{run}  # the same scores in full, with the worst images",
        "predict": f"{run} {shlex.quote(data) if os.path.isdir(os.path.expanduser(data)) else 'PHOTO'}",
        "export": f"{run} --format onnx",
    }
    lines += [
        f"{'next' if name == 'evaluate' else '':13}" + as_typed(f"python scripts/{name}.py {rest}")
        for name, rest in commands.items()
    ]
    return lines
