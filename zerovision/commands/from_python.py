"""The Python interface: `zerovision.train`, `evaluate` and `predict`, and what they return."""

from __future__ import annotations

import html
import os
import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerovision.delivery import evaluate as evaluation
from zerovision.delivery import predict as prediction
from zerovision.delivery.evaluation_files import leave_files
from zerovision.delivery.predict import Prediction
from zerovision.delivery.trained_model import read_run_config
from zerovision.planning.choose import Choices
from zerovision.planning.chosen_run import choose_run
from zerovision.planning.search import predicted_tensors
from zerovision.training.base.errors import USER_ERROR_EXIT_CODE, UserError
from zerovision.training.base.run_folder import CONFIG, EVALUATION, REPORT, WEIGHTS
from zerovision.training.base.units import percent
from zerovision.training.config import TrainConfig
from zerovision.training.config.file import labels_of, read_values
from zerovision.training.config.values import show_value
from zerovision.training.observe.evaluation import read_scores
from zerovision.training.run import run
from zerovision.training.steps.carrier import Start
from zerovision.training.world.machine import usable_gpus
from zerovision.training.world.signals import STOP_SIGNALS

CALL = "train()"  # name of the function in messages


@dataclass(frozen=True)
class Evaluation:
    """The scores of a model on a set of images.

    Attributes:
        top1: share of the images whose label is the most probable class, in 0..1.
        macro_f1: mean F1 of the classes.
        loss: mean loss in nats.
        samples: number of images.
        scores: the contents of scores.json; see the documentation.
    """

    top1: float
    macro_f1: float
    loss: float
    samples: int
    scores: Mapping[str, Any]

    @classmethod
    def of(cls, scores: Mapping[str, Any]) -> Evaluation:
        """Return the evaluation for the contents of scores.json."""
        return cls(scores["top1"], scores["macro"]["f1"], scores["loss"], scores["samples"], scores)

    def __getitem__(self, name: str) -> Any:
        """Return the score with this name, such as "top5"."""
        return self.scores[name]

    def _repr_html_(self) -> str:
        classes = [[one["name"], one["support"], percent(one["recall"]), percent(one["f1"])] for one in self["classes"]]
        head = f"{percent(self.top1)} of {self.samples} images correct, macro F1 {percent(self.macro_f1)}"
        return f"<p>{head}</p>{_table(['class', 'images', 'recall', 'F1'], classes)}"


class Predictions(Sequence[Prediction]):
    """The predictions of images, in order; a notebook shows them as a table."""

    def __init__(self, predictions: Iterable[Prediction]) -> None:
        self._predictions = [*predictions]

    def __len__(self) -> int:
        return len(self._predictions)

    def __getitem__(self, place: Any) -> Any:
        return self._predictions[place]

    def _repr_html_(self) -> str:
        labels = (", ".join(map("{} {}".format, one.labels, map(percent, one.probabilities))) for one in self)
        rows = ([one.image, one.error or text] for one, text in zip(self, labels, strict=True))
        return _table(["image", "labels"], rows)


@dataclass(frozen=True)
class Result:
    """A training run that has ended.

    Attributes:
        folder: the run's folder.
        exit_code: 0, or 128 plus the number of the signal that stopped the run; the same call with `resume="auto"`
            continues the run.
        config: the run's settings.
        evaluation: evaluation of the best epoch on the validation images; None if the run was stopped before its first
            evaluation.
        choices: for each chosen setting, the value and the reason; empty for a resumed run.
    """

    folder: Path
    exit_code: int
    config: TrainConfig
    evaluation: Evaluation | None
    choices: Choices

    @property
    def weights(self) -> Path:
        """The file of the best epoch's weights."""
        return self.folder / WEIGHTS

    def evaluate(self, data: str | Path = "", **options: Any) -> Evaluation:
        """Evaluate the model, on other images if `data` is given; see `evaluate`."""
        return evaluate(self.folder, data, **options)

    def predict(self, images: str | Path | Iterable[str | Path], **options: Any) -> Predictions:
        """Label images; see `predict`."""
        return predict(self.folder, images, **options)

    def _repr_html_(self) -> str:
        report = self.folder / REPORT
        link = f' <a href="{html.escape(report.absolute().as_uri())}">report</a>' if report.exists() else ""
        stopped = f" stopped by signal {self.exit_code - 128};" if self.exit_code else ""
        shown_scores = self.evaluation._repr_html_() if self.evaluation else ""
        head = f"<p><b>{html.escape(self.folder.name)}</b>:{stopped} {html.escape(self.config.model_type)}{link}</p>"
        choices = [[name, show_value(value), reason] for name, (value, reason) in self.choices.items()]
        return f"{head}{shown_scores}{_table(['setting', 'chosen', 'why'], choices) if choices else ''}"


def train(data: str | Path, *, gpus: int | None = None, effort: str = "", **settings: Any) -> Result:
    """Train a network on images. Settings that you leave out are chosen, as by `zerovision train`, and explained.

    Args:
        data: any value that `--data` accepts, such as a folder of photographs.
        gpus: number of ranks that the launcher starts on this machine, each with one GPU (or on the CPU if the machine
            has no GPU); None to train in this process, on one GPU if available.
        effort: how much time to spend: "seconds", "minutes", "hours" or "best"; by default, "minutes" or the
            effort that fits the setting `minutes`.
        settings: the trainer's flags, with `_` for `-`, such as `epochs=5` or `model_type="resnet18"`; each flag
            overrides a choice. Paths may be `Path` objects, and several plug-ins may be given as a list.

    Returns:
        The result of the run, even if SIGTERM or SIGUSR1 stopped it.

    Raises:
        UserError: for an invalid or unknown setting, and for data that cannot be used.
        KeyboardInterrupt: after Ctrl-C, once a checkpoint is saved.
        RuntimeError: if training failed for another reason, which is printed to standard error.
    """
    present = len(usable_gpus())
    ranks = gpus or 1
    facts = (ranks, min(present, ranks) if gpus is None else ranks if present else 0)
    given = {"data": data, **settings}
    values = {name: os.fspath(value) if isinstance(value, os.PathLike) else value for name, value in given.items()}
    if isinstance(files := values.get("plugin"), (list, tuple)):
        values["plugin"] = ",".join(map(os.fspath, files))
    chosen = choose_run(read_values(values, CALL), effort, facts, labels_of(CALL), is_launched=gpus is not None)
    code = chosen.train(
        lambda stage: run(stage, Start(plan_memory=predicted_tensors), leave_files, gpus=gpus, raises=True)
    )
    folder = chosen.folder
    if code == USER_ERROR_EXIT_CODE:
        raise UserError("training did not start: see standard error for the reason.")
    if code == 128 + signal.SIGINT:
        saved = f"run_name={folder.name!r} and resume='auto'"
        raise KeyboardInterrupt(f"run {folder.name} was stopped: to continue it, repeat the call with {saved}")
    if code not in (0, *(128 + number for number in STOP_SIGNALS)):
        raise RuntimeError(f"training ended with exit code {code}: see standard error for the reason")
    scores = read_scores(folder.path / EVALUATION)
    config = read_run_config(folder.path) if (folder.path / CONFIG).exists() else chosen.config
    return Result(folder.path, code, config, Evaluation.of(scores) if scores else None, chosen.choices)


def evaluate(model: str | Path, data: str | Path = "", **options: Any) -> Evaluation:
    """Evaluate a trained model; see `zerovision.delivery.evaluate.evaluate`."""
    return Evaluation.of(evaluation.evaluate(model, data, **options))


def predict(model: str | Path, images: str | Path | Iterable[str | Path], **options: Any) -> Predictions:
    """Label images; see `zerovision.delivery.predict.predict`, which yields predictions for any number of images."""
    return Predictions(prediction.predict(model, images, **options))


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return an HTML table with escaped text."""
    lines = [("th", head), *(("td", row) for row in rows)]
    cells = ("".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in line) for tag, line in lines)
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in cells)}</table>"
