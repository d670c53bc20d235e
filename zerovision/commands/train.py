"""`train DATA`: chooses the missing settings with reasons, starts the launcher, and suggests the next commands."""

from __future__ import annotations

import contextlib
import inspect
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerovision.launch.arguments import LAUNCHERS, SETTINGS, setting_parser
from zerovision.planning.choose import EFFORTS
from zerovision.planning.chosen_run import choose_run
from zerovision.training.base.errors import UserError, shown
from zerovision.training.base.heartbeat import end_with_caller
from zerovision.training.base.lasting_output import outlast_readers
from zerovision.training.base.run_folder import EVALUATION, TEST_EVALUATION, RunFolder, as_typed, shown_path
from zerovision.training.base.settings import MOST_GPUS_PER_NODE
from zerovision.training.base.units import percent
from zerovision.training.config import FLAG_OF, WORDS
from zerovision.training.config.command_line import OneLineParser, training_parser
from zerovision.training.config.values import read_words
from zerovision.training.launched_run import launch_words
from zerovision.training.world.machine import usable_gpus


@dataclass(frozen=True)
class TrainSettings:
    """Trains a classifier on photographs, choosing every setting that you leave out and printing the reason.

    python scripts/train.py ~/photos                       # one folder of images per class
    python scripts/train.py ~/photos --minutes 20          # for at most 20 minutes
    python scripts/train.py labels.csv --effort hours      # a larger network
    python scripts/train.py ~/photos --epochs 30 --model-type timm:resnet50

    DATA is any value that the trainer's --data accepts: a folder, a table, tar or Parquet files, hf:ORG/NAME or digits.
    You can add any flag of the trainer and of bash scripts/launch_distributed.sh; each flag overrides a choice. To list
    all flags, run bash scripts/launch_distributed.sh --help all.
    """

    given: Mapping[str, Any]  # settings by field of `TrainConfig`
    effort: str
    gpus: int  # 0: all GPUs, or one CPU rank
    launcher_flags: Sequence[str]

    @classmethod
    def read(cls, words: Sequence[str]) -> TrainSettings:
        """Read the command line, or raise a UserError; exit after `--help`."""
        parser = OneLineParser("train", inspect.getdoc(cls))
        parser.add_argument("data", metavar="DATA", help="Data to train on: any value of --data.")
        parser.add_choice("--effort", EFFORTS, default="", help="How much time to spend; default: minutes.")
        parser.add_number("--gpus", 0, MOST_GPUS_PER_NODE, default=0, help="GPUs or CPU ranks; 0: all GPUs, or 1 rank.")
        own, others = parser.parse_known(words)
        if not words[0] == own.data:
            raise UserError(f"{shown(words[0])} comes before DATA: put the folder or the table first, then the flags.")
        flags = training_parser()
        values, rest = flags.parse_known(others)
        if unknown := setting_parser(LAUNCHERS["launch_distributed.sh"]).parse_known(rest)[1]:
            flags.parse(unknown, [*parser.flags, *SETTINGS])
        given = read_words({name: word for name, word in vars(values).items() if name in WORDS}, FLAG_OF)
        if values.config:
            from zerovision.training.config.file import read_config_file

            given = read_config_file(Path(values.config)) | given
        if given.get("data", own.data) != own.data:
            raise UserError(f"--data is {shown(given['data'])}, but DATA is {shown(own.data)}: use only one of them.")
        return cls(given | {"data": own.data}, own.effort, own.gpus, rest)


def run(settings: TrainSettings) -> int:
    """Train; return the launcher's exit code."""
    from zerovision.launch.launch import main as launch

    end_with_caller()
    outlast_readers()
    present = len(usable_gpus())
    ranks = settings.gpus or present or 1
    chosen = choose_run(settings.given, settings.effort, (ranks, ranks if present else 0), FLAG_OF, is_launched=True)
    code = chosen.train(
        lambda stage: launch(["launch_distributed.sh", *launch_words(stage, ranks), *settings.launcher_flags])
    )
    if not code and chosen.folder.path.is_dir():  # not after DRY_RUN=1
        print("\n".join(outcome(chosen.folder, has_numbers=chosen.config.decode == "numbers")), flush=True)
    return code


def outcome(folder: RunFolder, *, has_numbers: bool) -> list[str]:
    """Return the scores of a run's model, its weakest class, and the next commands.

    If the images are not 8-bit (`has_numbers`), no export can contain their preprocessing.
    """
    from zerovision.delivery.intervals import interval_of
    from zerovision.delivery.trained_model import find_run
    from zerovision.training.observe.evaluation import read_scores

    lines, run = [], shown_path(folder.path)
    with contextlib.suppress(UserError):
        if find_run(folder.name).samefile(folder.path):  # commands find the run by its name
            run = folder.name
    run = shlex.quote(run)
    of_test = read_scores(folder.path / TEST_EVALUATION)
    scores = of_test or read_scores(folder.path / EVALUATION)
    if scores:
        kind = "of the test part" if of_test else "held out, which were also used to choose the epoch"
        interval = interval_of(scores, "top1")
        sure = f" (95 % interval: {percent(interval[0])} to {percent(interval[1])})" if interval else ""
        lines.append(f"accuracy     {percent(scores['top1'])} of {scores['samples']} images {kind}{sure}")
        known = [one for one in scores["classes"] if one["support"]]
        worst = min(known, key=lambda one: (one["recall"], -one["support"]))
        lines.append(
            f"worst class  {worst['name']}: {percent(worst['recall'])} of its {worst['support']} images are recognized"
        )
    commands = [
        f"next         python scripts/evaluate.py {run}  # the same scores in full, with the worst images",
        f"             python scripts/predict.py {run} PHOTO  # a new photo, or a folder",
        f"             python scripts/export.py {run} --format onnx{'' if has_numbers else ' --with-preprocessing'}",
    ]
    return [*lines, *map(as_typed, commands)]
