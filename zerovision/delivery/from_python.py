"""What a notebook or a script uses: `zerovision.train`, `evaluate` and `predict`, and what these return."""

from __future__ import annotations

import contextlib
import dataclasses
import html
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from zerovision.delivery import evaluate as evaluation
from zerovision.delivery import predict as prediction
from zerovision.delivery.end_of_run import leave_files
from zerovision.delivery.predict import Prediction
from zerovision.delivery.trained_model import slug
from zerovision.training.base.errors import USER_ERROR_EXIT_CODE, UserError
from zerovision.training.base.run_folder import EVALUATION, REPORT, WEIGHTS
from zerovision.training.base.units import percent
from zerovision.training.config import TrainConfig
from zerovision.training.config.check import OF_LAUNCHERS
from zerovision.training.config.command_line import settled
from zerovision.training.config.file import labels_of, read_preset, read_values
from zerovision.training.observe.evaluation import read_scores
from zerovision.training.observe.new_run import new_name, run_folder
from zerovision.training.run import run
from zerovision.training.world.signals import STOP_SIGNALS

CALL = "train()"  # in messages


@dataclass(frozen=True)
class Evaluation:
    """How good a model is on images.

    Attributes:
        top1: share of the images whose label is the most probable class, in 0..1.
        macro_f1: mean F1 of the classes.
        loss: mean, in nats.
        samples: images.
        scores: all that scores.json contains, see the documentation.
    """

    top1: float
    macro_f1: float
    loss: float
    samples: int
    scores: Mapping[str, Any]

    @classmethod
    def of(cls, scores: Mapping[str, Any]) -> Evaluation:
        """Return what is in scores.json."""
        return cls(scores["top1"], scores["macro"]["f1"], scores["loss"], scores["samples"], scores)

    def __getitem__(self, name: str) -> Any:
        """Return one of the scores, such as "top5"."""
        return self.scores[name]

    def _repr_html_(self) -> str:
        classes = [[one["name"], one["support"], percent(one["recall"]), percent(one["f1"])] for one in self["classes"]]
        head = f"{percent(self.top1)} of {self.samples} images right, macro F1 {percent(self.macro_f1)}"
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
        rows = [[one.image, one.error or ", ".join(map(_with_share, one.labels, one.probabilities))] for one in self]
        return _table(["image", "labels"], rows)


@dataclass(frozen=True)
class Result:
    """A training that has ended.

    Attributes:
        folder: of the run.
        exit_code: 0, or 128 and the number of a signal that stopped it: the same call with `resume="auto"` goes on.
        config: its settings.
        evaluation: of the best epoch on the validation images; None if it was stopped before the first.
    """

    folder: Path
    exit_code: int
    config: TrainConfig
    evaluation: Evaluation | None

    @property
    def weights(self) -> Path:
        """The file of the best epoch's weights."""
        return self.folder / WEIGHTS

    def evaluate(self, data: str | Path = "", **options: Any) -> Evaluation:
        """Evaluate the model, on other images if they are given; see `evaluate`."""
        return evaluate(self.folder, data, **options)

    def predict(self, images: str | Path | Iterable[str | Path], **options: Any) -> Predictions:
        """Label images; see `predict`."""
        return predict(self.folder, images, **options)

    def _repr_html_(self) -> str:
        report = self.folder / REPORT
        link = f' <a href="{html.escape(report.absolute().as_uri())}">report</a>' if report.exists() else ""
        stopped = f" stopped by signal {self.exit_code - 128};" if self.exit_code else ""
        shown_scores = self.evaluation._repr_html_() if self.evaluation else ""
        return f"<p><b>{html.escape(self.folder.name)}</b>:{stopped} {self.config.model_type}{link}</p>{shown_scores}"


def train(data: str | Path, *, gpus: int | None = None, **settings: Any) -> Result:
    """Train a network on images, as `scripts/train_distributed.py` or a launcher does.

    Args:
        data: what `--data` takes, such as a folder of photographs.
        gpus: ranks on this machine, a GPU each (CPU ranks if it has none), started by the launcher; None to train in
            this process.
        settings: the flags, with `_` for `-`: `epochs=5`, `model_type="resnet18"`; paths may be `Path`, and of several
            plug-ins a list.

    Returns:
        What the training has left; also if Ctrl-C or another signal stopped it.

    Raises:
        UserError: for a setting that is wrong or unknown, and for data that cannot be used.
        RuntimeError: if the training failed otherwise; what happened is on standard error.
    """
    config = _configured({"data": data} | settings, gpus)
    if not config.run_name:
        folder = run_folder(config, "new")
        name = new_name(folder.log_dir, slug(Path(config.data).name) or "run")
        config = dataclasses.replace(config, run_name=name)
    folder = run_folder(config)
    try:
        code = run(config, deliver=leave_files, gpus=gpus, raises=True)
    finally:
        with contextlib.suppress(OSError):
            folder.path.rmdir()  # if nothing is in it
    if code == USER_ERROR_EXIT_CODE:
        raise UserError("the training was refused: standard error has the reason.")
    if code not in (0, *(128 + number for number in STOP_SIGNALS)):
        raise RuntimeError(f"the training ended with exit code {code}: standard error has the reason")
    scores = read_scores(folder.path / EVALUATION)
    return Result(folder.path, code, config, Evaluation.of(scores) if scores else None)


def evaluate(model: str | Path, data: str | Path = "", **options: Any) -> Evaluation:
    """Evaluate a trained model, see `zerovision.delivery.evaluate.evaluate`."""
    return Evaluation.of(evaluation.evaluate(model, data, **options))


def predict(model: str | Path, images: str | Path | Iterable[str | Path], **options: Any) -> Predictions:
    """Label images, see `zerovision.delivery.predict.predict`, which yields predictions of any number of images."""
    return Predictions(prediction.predict(model, images, **options))


def _configured(settings: Mapping[str, Any], gpus: int | None) -> TrainConfig:
    """Return the checked configuration; raise a UserError for the first setting that is wrong."""
    values = {name: os.fspath(value) if isinstance(value, os.PathLike) else value for name, value in settings.items()}
    if isinstance(files := values.get("plugin"), (list, tuple)):
        values["plugin"] = ",".join(map(os.fspath, files))
    values = read_values(values, CALL)
    strategy = str(values.get("strategy"))
    if is_planned := gpus is not None and strategy in OF_LAUNCHERS:
        values["strategy"] = "ddp"  # until the launcher finds one
    config = settled(values, read_preset(values.get("preset", "")), labels_of(CALL))
    return dataclasses.replace(config, strategy=strategy) if is_planned else config


def _with_share(label: str, probability: float) -> str:
    return f"{label} {percent(probability)}"


def _table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return an HTML table of texts."""
    lines = [("th", head), *(("td", row) for row in rows)]
    cells = ("".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in line) for tag, line in lines)
    return f"<table>{''.join(f'<tr>{line}</tr>' for line in cells)}</table>"
