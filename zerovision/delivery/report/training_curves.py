"""The charts of one run, and those of several runs on top of each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from zerovision.delivery.pages import number, percent, plural
from zerovision.delivery.report.charts import Chart, Frame, Line, draw
from zerovision.delivery.report.run_files import CPUS, CURVES, SYSTEM, History
from zerovision.training.base.points import IN_EVERY_LINE, SCORE_NAMES, merit, score_in

STYLES = 8  # colors, each with a dash pattern of its own
OVERLAID = {
    "val_top1": "Validation top-1",
    "val_loss": "Validation loss",
    "train_top1": "Training top-1",
    "val_top5": "Validation top-5",
    "loss": "Training loss",
    "learning_rate": "Learning rate",
    "images_per_second": "Images per second",
    "gradient_norm": "Gradient norm",
}
FROM_ZERO = ("learning_rate", "images_per_second")
SHARES = ("val_top1", "train_top1", "val_top5")


def single_run_charts(history: History) -> list[Chart]:
    """Return the charts of one run that have points."""
    resumes = [int(line["step"]) for line in history.events if line["kind"] == "resume"]
    marks = [step / history.steps_per_epoch for step in resumes] if history.steps_per_epoch else []
    marked = f"Dotted vertical lines mark {plural(len(marks), 'resume')}. " if marks else ""
    best = history.best_epoch
    name, score = score_in(best) if best else ("top1", 0.0)
    label, value = SCORE_NAMES.get(name, name), number(score) if name == "loss" else percent(score, 2)
    best_epoch = f"The best epoch is {best['epoch']}, with {label} {value}. " if best else ""
    augmented = "The training loss includes label smoothing and augmentation; the validation loss does not."
    loss = [
        _line(history, "loss", "training, by step", 8, "steps")._replace(is_faint=True),
        _line(history, "train_loss", "training, by epoch", 1),
        _line(history, "val_loss", "validation", 2),
    ]
    accuracy = [
        _line(history, "train_top1", "training top-1", 1),
        _line(history, "val_top1", "validation top-1", 2),
        _line(history, "val_top5", "validation top-5", 3),
        *([] if name in IN_EVERY_LINE else [_line(history, "score", f"validation {label}", 5)]),
    ]
    charts = [
        draw("loss", "Loss", loss, Frame(_validation_loss(history) + marked + augmented, marks=marks)),
        draw("accuracy", "Accuracy", accuracy, Frame(best_epoch + marked, marks=marks, is_percent=True)),
    ]
    for key in ("learning_rate", "images_per_second", "gradient_norm"):
        title = OVERLAID[key]
        line = _line(history, key, title.lower(), 1)
        charts.append(draw(key, title, [line], Frame(marks=marks, from_zero=key in FROM_ZERO)))
    memory = [
        _line(history, "memory_bytes", "peak", 1),
        _line(history, "memory_allocated_bytes", "now", 2),
    ]
    disk = [_line(history, "disk_free_bytes", "free", 1)]
    names = ("cores of the idlest machine", "cores of the busiest machine")
    cpus = [_line(history, column, name, style) for column, name, style in zip(CPUS, names, (3, 4), strict=True)]
    if np.array_equal(cpus[0].y, cpus[1].y, equal_nan=True):  # one machine
        cpus = [cpus[0]._replace(name="cores of the machine, by all programs")]
    use = [_line(history, "gpu_utilization", "GPU", 1), _line(history, "data_wait_share", "waiting for data", 2), *cpus]
    memory, disk = ([line._replace(y=line.y / 1e9) for line in lines] for lines in (memory, disk))
    charts.append(draw("memory", "Memory of rank 0 (GB)", memory, Frame(marks=marks, from_zero=True)))
    charts.append(draw("use", "Use of cores, GPU and time", use, Frame(marks=marks, from_zero=True, is_percent=True)))
    charts.append(draw("disk", "Free space on the run's disk (GB)", disk, Frame(marks=marks, from_zero=True)))
    return [chart for chart in charts if chart is not None]


def rate_search_chart(result: Mapping[str, Any] | None) -> Chart | None:
    """Return the chart of a learning rate search from `auto_learning_rate.describe_search`."""
    if result is None:
        return None
    rates, final_losses = np.array([row[:2] for row in result["tried"]], dtype=np.float64).T
    lines = [Line("final training loss", 1, rates, final_losses, "rate-search")]
    marks = [] if result["suggested"] is None else [float(result["suggested"])]
    caption = "Short trainings that differed only in the learning rate; " + (
        f"the dotted vertical line marks the suggested {number(marks[0], 2)}."
        if marks
        else "none clearly lowered the loss, so no rate is suggested."
    )
    return draw("rate_search", "Learning rates", lines, Frame(caption, "learning rate", marks, is_x_log=True))


def overlaid_charts(histories: Sequence[History], names: Sequence[str]) -> list[Chart]:
    """Return the charts that have points, with one line per run."""
    charts = []
    for key, title in OVERLAID.items():
        lines = [
            _line(history, key, name, run % STYLES + 1, f"run{run}")
            for run, (history, name) in enumerate(zip(histories, names, strict=True))
        ]
        charts.append(draw(key, title, lines, Frame(from_zero=key in FROM_ZERO, is_percent=key in SHARES)))
    return [chart for chart in charts if chart is not None]


def _line(history: History, column: str, name: str, style: int, switch: str = "") -> Line:
    """Return a column of the logging points or of the epochs as a line over epochs."""
    if column in (*CURVES, *SYSTEM, *CPUS):
        x, y = np.array(history.steps) / (history.steps_per_epoch or 1), np.array(history.columns[column])
    else:
        x = np.array(sorted(history.epochs), dtype=np.float64)
        y = np.array([history.epochs[epoch].get(column, np.nan) for epoch in sorted(history.epochs)])
    return Line(name, style, x, y, switch or column)


def _validation_loss(history: History) -> str:
    """Return a sentence on the first, the last and the lowest validation loss."""
    losses = [(epoch, history.epochs[epoch]["val_loss"]) for epoch in sorted(history.epochs)]
    if not losses:
        return ""
    first, last = (f"{number(loss, 3)} after epoch {epoch}" for epoch, loss in (losses[0], losses[-1]))
    if len(losses) == 1:
        return f"{first} on the validation images. "
    epoch, lowest = max(losses, key=lambda pair: merit("loss", pair[1]))
    return f"From {first} to {last} on the validation images; lowest in epoch {epoch} with {number(lowest, 3)}. "
