"""The charts of one run, and those of several runs on top of each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from delivery.report.charts import Chart, Line, draw
from delivery.report.formatting import number, percent, plural
from delivery.report.history import CURVES, History

STYLES = 8  # colours, each with a dash pattern of its own
_BY_EPOCH: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("val_top1", "Validation top-1", {"is_percent": True}),
    ("val_loss", "Validation loss", {"may_be_log": True}),
    ("train_top1", "Training top-1", {"is_percent": True}),
    ("val_top5", "Validation top-5", {"is_percent": True}),
)
_BY_STEP: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("loss", "Training loss", {"may_be_log": True}),
    ("learning_rate", "Learning rate", {"from_zero": True}),
    ("images_per_second", "Images per second", {"from_zero": True}),
    ("gradient_norm", "Gradient norm", {"may_be_log": True}),
)


def single_run_charts(history: History) -> list[Chart]:
    """Return the charts of one run that have points."""
    resumes = [int(line["step"]) for line in history.events if line["kind"] == "resume"]
    marks = [step / history.steps_per_epoch for step in resumes] if history.steps_per_epoch else []
    marked = f"Dotted verticals mark {plural(len(marks), 'resume')}. " if marks else ""
    best = history.best_epoch
    best_epoch = f"The best epoch is {best['epoch']}, with a top-1 of {percent(best['val_top1'], 2)}. " if best else ""
    loss = [
        _line(history, "loss", "training, by step", 8, "steps", faint=True),
        _line(history, "train_loss", "training, by epoch", 1),
        _line(history, "val_loss", "validation", 2),
    ]
    accuracy = [
        _line(history, "train_top1", "training top-1", 1),
        _line(history, "val_top1", "validation top-1", 2),
        _line(history, "val_top5", "validation top-5", 3),
    ]
    caption = (
        f"{_validation_loss(history)}{marked}The training loss includes label smoothing and augmentation, the "
        "validation loss neither."
    )
    charts = [
        draw("loss", "Loss", loss, caption=caption, marks=marks, may_be_log=True),
        draw("accuracy", "Accuracy", accuracy, caption=best_epoch + marked, marks=marks, is_percent=True),
    ]
    for key, title, options in _BY_STEP[1:]:
        charts.append(draw(key, title, [_line(history, key, title.lower(), 1)], marks=marks, **options))
    return [chart for chart in charts if chart is not None]


def overlaid_charts(histories: Sequence[History], names: Sequence[str]) -> list[Chart]:
    """Return the charts of several runs that have points, with a line for each run."""
    charts = []
    for key, title, options in (*_BY_EPOCH, *_BY_STEP):
        lines = [
            _line(history, key, name, run % STYLES + 1, f"run{run}")
            for run, (history, name) in enumerate(zip(histories, names, strict=True))
        ]
        charts.append(draw(key, title, lines, **options))
    return [chart for chart in charts if chart is not None]


def _line(history: History, column: str, name: str, style: int, switch: str = "", *, faint: bool = False) -> Line:
    """Return a column of the history as a line over epochs."""
    switch = switch or column
    if column in CURVES:
        x = np.asarray(history.steps) / (history.steps_per_epoch or 1)
        return Line(name, style, x, np.asarray(history.columns[column]), switch, faint=faint)
    epochs = sorted(history.epochs)
    values = np.array([history.epochs[epoch][column] for epoch in epochs])
    return Line(name, style, np.array(epochs, dtype=np.float64), values, switch, dotted=True)


def _validation_loss(history: History) -> str:
    """Return a sentence on the first, last and lowest validation loss."""
    losses = [(epoch, history.epochs[epoch]["val_loss"]) for epoch in sorted(history.epochs)]
    if not losses:
        return ""
    first, last = (f"{number(loss, 3)} after epoch {epoch}" for epoch, loss in (losses[0], losses[-1]))
    if len(losses) == 1:
        return f"{first} on the validation images. "
    epoch, lowest = min(losses, key=lambda pair: pair[1])
    return f"From {first} to {last} on the validation images; lowest in epoch {epoch} with {number(lowest, 3)}. "
