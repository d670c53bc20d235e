"""The curves of one run, or of several on top of each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from delivery.report.curves import Chart, Line, draw
from delivery.report.formatting import number, percent, plural
from delivery.report.history import History

STYLES = 8  # colours, each with a dash of its own


def single_run_charts(history: History) -> list[Chart]:
    """Return the charts of one run, those that have points."""
    marks, best = restart_marks(history), history.best_epoch
    best_words = f"The best epoch is {best['epoch']}, with a top-1 of {percent(best['val_top1'], 2)}. " if best else ""
    restarts = f"Dotted verticals mark {plural(len(marks), 'resume')}. " if marks else ""
    charts = [
        draw(
            "loss",
            "Loss",
            [
                Line("training, by step", 8, _step_places(history), history.columns["loss"], "steps", faint=True),
                _by_epoch(history, "training, by epoch", "train_loss", 1),
                _by_epoch(history, "validation", "val_loss", 2),
            ],
            caption=f"{_fall(history)}{restarts}The training loss includes label smoothing and augmentation, the "
            "validation loss neither.",
            marks=marks,
            may_be_log=True,
        ),
        draw(
            "accuracy",
            "Accuracy",
            [
                _by_epoch(history, "training top-1", "train_top1", 1),
                _by_epoch(history, "validation top-1", "val_top1", 2),
                _by_epoch(history, "validation top-5", "val_top5", 3),
            ],
            caption=f"{best_words}{restarts}",
            marks=marks,
            **_PERCENT,
        ),
    ]
    for key, title, options in _BY_STEP:
        line = Line(title.lower(), 1, _step_places(history), history.columns[key], key)
        charts.append(draw(key, title, [line], marks=marks, **options))
    return [chart for chart in charts if chart is not None]


def overlaid_charts(histories: Sequence[History], names: Sequence[str]) -> list[Chart]:
    """Return the charts of several runs, a line for each run in each of them."""
    pairs = list(zip(histories, names, strict=True))
    charts = []
    for key, title, options in _BY_EPOCH:
        lines = [
            Line(name, run % STYLES + 1, _epoch_places(history), _epoch_values(history, key), f"run{run}", dotted=True)
            for run, (history, name) in enumerate(pairs)
        ]
        charts.append(draw(key, title, lines, **options))
    for key, title, options in (("loss", "Training loss", {"may_be_log": True}), *_BY_STEP):
        lines = [
            Line(name, run % STYLES + 1, _step_places(history), history.columns[key], f"run{run}")
            for run, (history, name) in enumerate(pairs)
        ]
        charts.append(draw(key, title, lines, **options))
    return [chart for chart in charts if chart is not None]


def restart_marks(history: History) -> list[float]:
    """Return where, in epochs, the run was resumed."""
    if not history.steps_per_epoch:
        return []
    return [int(line["step"]) / history.steps_per_epoch for line in history.events if line["kind"] == "resume"]


def _by_epoch(history: History, name: str, key: str, style: int) -> Line:
    return Line(name, style, _epoch_places(history), _epoch_values(history, key), key, dotted=True)


def _step_places(history: History) -> list[float]:
    """Return the logging points in epochs."""
    return [step / (history.steps_per_epoch or 1) for step in history.steps]


def _epoch_places(history: History) -> list[float]:
    return [float(line["epoch"]) for line in _sorted(history)]


def _epoch_values(history: History, key: str) -> list[float]:
    return [line[key] for line in _sorted(history)]


def _sorted(history: History) -> list[dict[str, Any]]:
    return [history.epochs[number] for number in sorted(history.epochs)]


def _fall(history: History) -> str:
    if not history.epochs:
        return ""
    lines = _sorted(history)
    if len(lines) == 1:
        return f"{number(lines[0]['val_loss'], 3)} after epoch {lines[0]['epoch']} on the validation images. "
    lowest = min(lines, key=lambda line: line["val_loss"])
    return (
        f"From {number(lines[0]['val_loss'], 3)} after epoch {lines[0]['epoch']} to "
        f"{number(lines[-1]['val_loss'], 3)} after epoch {lines[-1]['epoch']} on the validation images; "
        f"lowest in epoch {lowest['epoch']} with {number(lowest['val_loss'], 3)}. "
    )


def _percent_tick(value: float) -> str:
    return percent(value, 1).replace(".0", "")


_PERCENT: dict[str, Any] = {"write": lambda value: percent(value, 2), "write_tick": _percent_tick, "highest": 1.0}
_BY_STEP: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("learning_rate", "Learning rate", {"from_zero": True}),
    ("images_per_second", "Images per second", {"from_zero": True, "write": lambda value: number(value, 3)}),
    ("gradient_norm", "Gradient norm", {"may_be_log": True}),
)
_BY_EPOCH: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("val_top1", "Validation top-1", _PERCENT),
    ("val_loss", "Validation loss", {"may_be_log": True}),
    ("train_top1", "Training top-1", _PERCENT),
    ("val_top5", "Validation top-5", _PERCENT),
)
