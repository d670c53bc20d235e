"""Lays out line charts of one or more runs: SVG paths for the template, and tables of the values."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from zerovision.delivery.pages import THIN, isolate, number, percent, plain, plural
from zerovision.delivery.report.run_files import CPUS, CURVES, SYSTEM, History
from zerovision.training.base.points import IN_EVERY_LINE, SCORE_NAMES, merit, score_in

Chart = dict[str, Any]  # the result of `draw`
POINTS_PER_CHART = 1600  # over all lines; each point takes about 25 bytes on the page
VIEW = 1000  # side of the SVG's coordinate system, which is stretched to the chart's size
MOST_DOTS = 60
TABLE_ROWS = 32
LOG_SCALE_FROM = 50  # ratio of the largest to the smallest value
LABEL_GAP = 8.0  # percent of the chart's height between two labels at its right edge


class Line(NamedTuple):
    """One line of a chart."""

    name: str  # in the legend and in the table
    style: int  # index of the color and dash pattern, starting at 1
    x: np.ndarray  # float64 [N], in ascending order
    y: np.ndarray  # float64 [N]; a non-finite value leaves a gap
    switch: str  # a key: the legend toggles all lines on the page with the same key together
    is_faint: bool = False  # a thin line without dots


class Axis(NamedTuple):
    """The range of an axis, and its ticks as (position in percent, text)."""

    low: float
    high: float
    ticks: list[tuple[float, str]]
    is_log: bool = False

    def place(self, values: np.ndarray) -> np.ndarray:
        """Return the positions of values on the axis, 0 to 1."""
        scale = np.log if self.is_log else np.asarray
        return (scale(values) - scale(self.low)) / (scale(self.high) - scale(self.low))


class Frame(NamedTuple):
    """The caption, axes and marks of a chart."""

    caption: str = ""  # by default, it lists the last values
    x_name: str = "epoch"
    marks: Sequence[float] = ()  # values of x
    is_percent: bool = False  # whether the values are shares in 0..1 to show as percentages
    from_zero: bool = False  # whether the vertical axis starts at 0; otherwise, see `y_axis`
    is_x_log: bool = False  # whether the horizontal axis is logarithmic; otherwise, it starts at 0

    def write(self, value: float) -> str:
        """Format a value of a line as text."""
        return percent(value, decimals=2) if self.is_percent else number(value)

    def x_axis(self, low: float, high: float) -> Axis:
        """Return the horizontal axis for values from `low` to `high`."""
        return log_axis(low, high) if self.is_x_log else linear_axis(0.0, high, plain, is_tight=True)

    def y_axis(self, low: float, high: float) -> Axis:
        """Return the vertical axis for values from `low` to `high`."""
        start = 0.0 if self.from_zero else low
        if self.is_percent:
            return linear_axis(start, high, lambda share: f"{100 * share:.4g}{THIN}%", highest=1.0)
        if not self.from_zero and low > 0 and high / low > LOG_SCALE_FROM:
            return log_axis(low, high)
        return linear_axis(start, high, plain)


def draw(key: str, title: str, lines: Sequence[Line], frame: Frame) -> Chart | None:
    """Lay out a chart: return values for the template, and `data` for report.js; None if no line has a finite point.

    The key is unique on the page, and the title includes the unit. Lines without a finite point are left out.
    """
    columns = max(POINTS_PER_CHART // (2 * max(len(lines), 1)), 16)
    lines = [thin(line, columns) for line in lines if np.isfinite(line.y).any()]
    if not lines:
        return None
    values = np.concatenate([line.y[np.isfinite(line.y)] for line in lines])
    first, low, high = float(values[0]), float(values.min()), float(values.max())
    x_axis = frame.x_axis(min(float(line.x[0]) for line in lines), max(float(line.x[-1]) for line in lines))
    y_axis, write, caption = frame.y_axis(low, high), frame.write, frame.caption
    drawn = [_drawn(line, x_axis, y_axis, write) for line in lines]
    _spread_labels(drawn)
    if not caption and len(lines) == 1 and high - low > abs(high) / 100:  # a smaller range is not worth mentioning
        caption = f"From {write(first)} to {drawn[0]['last']}; between {write(low)} and {write(high)}."
    return {
        "key": key,
        "title": title,
        "caption": caption or f"At the end: {', '.join(isolate(one['name']) + ' ' + one['last'] for one in drawn)}.",
        "x_name": frame.x_name,
        "x_axis": x_axis,
        "y_axis": y_axis,
        "lines": drawn,
        "marks": [100 * place for place in x_axis.place(np.array(frame.marks)).tolist() if 0 <= place <= 1],
        "table": _tabulate(lines, write),
        "data": {
            "x": [x_axis.low, x_axis.high],
            "y": [y_axis.low, y_axis.high],
            "log": y_axis.is_log,
            "xLog": x_axis.is_log,
            "percent": frame.is_percent,
            "xName": frame.x_name,
            "lines": [{name: one[name] for name in ("name", "switch", "style", "x", "y")} for one in drawn],
        },
    }


def thin(line: Line, columns: int) -> Line:
    """Keep only the lowest and highest point in each of `columns` columns of equal width, and both end points.

    Non-finite values become NaN; a column without a finite value keeps one point.
    """
    x, y = line.x, np.where(np.isfinite(line.y), line.y, np.nan)
    if len(x) > 2 * columns:
        keep = {0, len(x) - 1}
        for inside in np.split(np.arange(len(x)), np.searchsorted(x, np.linspace(x[0], x[-1], columns + 1)[1:-1])):
            finite = inside[np.isfinite(y[inside])]
            keep |= {finite[y[finite].argmin()], finite[y[finite].argmax()]} if len(finite) else set(inside[:1])
        order = np.array(sorted(keep))
        x, y = x[order], y[order]
    return line._replace(x=x, y=y)


def linear_axis(
    low: float, high: float, write: Callable[[float], str], *, highest: float = math.inf, is_tight: bool = False
) -> Axis:
    """Return an axis with ticks at multiples of 1, 2 or 5 times a power of ten; a tight axis ends at the values."""
    if high <= low:
        spread = abs(high) * 0.1 or 1.0
        low, high = (low if is_tight else low - spread), high + spread
    power = 10.0 ** math.floor(math.log10((high - low) / 4))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= (high - low) / 4 * (1 - 1e-9))
    if not is_tight:
        low = math.floor(low / step + 1e-9) * step
        high = min(math.ceil(high / step - 1e-9) * step, highest)
    multiples = range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)
    return Axis(low, high, [(100 * (one * step - low) / (high - low), write(one * step)) for one in multiples])


def log_axis(low: float, high: float) -> Axis:
    """Return a logarithmic axis over whole powers of ten with at most seven ticks."""
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    last = max(last, first + 1)  # for a single value
    powers = range(first, last + 1, max(1, math.ceil((last - first) / 6)))
    ticks = [(100 * (power - first) / (last - first), number(10.0**power, 1)) for power in powers]
    return Axis(10.0**first, 10.0**last, ticks, is_log=True)


def _drawn(line: Line, x_axis: Axis, y_axis: Axis, write: Callable[[float], str]) -> dict[str, Any]:
    """Return a line's fields, its paths in a square of side `VIEW`, and its last value with the label's position."""
    finite = np.isfinite(line.y)
    across, down = VIEW * x_axis.place(line.x[finite]), VIEW * (1 - y_axis.place(line.y[finite]))
    points = [f"{_coordinate(x)} {_coordinate(y)}" for x, y in zip(across, down, strict=True)]
    follows = np.append(False, finite[:-1])[finite]  # whether the previous point is also finite
    path = "".join(f"{'L' if draws else 'M'}{point}" for point, draws in zip(points, follows, strict=True))
    has_dots = len(finite) == 1 or (len(finite) <= MOST_DOTS and not line.is_faint)
    return line._asdict() | {
        # A screen cannot show more than five digits; JSON has no NaN.
        "x": [float(f"{x:.5g}") for x in line.x],
        "y": [float(f"{y:.5g}") if math.isfinite(y) else None for y in line.y],
        "path": path,
        "dots": "".join(f"M{point}h0" for point in points) if has_dots else "",
        "last": write(float(line.y[finite][-1])),
        "label_top": 100 * float(down[-1]) / VIEW,
    }


def _spread_labels(drawn: Sequence[dict[str, Any]]) -> None:
    """Move the labels at the right edge apart, and keep them inside the chart."""
    order = sorted(drawn, key=lambda line: line["label_top"])
    for before, line in itertools.pairwise(order):
        line["label_top"] = max(line["label_top"], before["label_top"] + LABEL_GAP)
    for place, line in enumerate(reversed(order)):
        line["label_top"] = min(line["label_top"], 100 - place * LABEL_GAP)


def _tabulate(lines: Sequence[Line], write: Callable[[float], str]) -> dict[str, Any]:
    """Return `rows` of text at the x values of the sparsest line, and the number of rows `left_out`.

    A line's value at x is the value of its last point at or before x.
    """
    candidates = sorted((np.unique(line.x) for line in lines), key=len)
    places = next((found for found in candidates if len(found) > 2), candidates[0])
    chosen = np.unique(np.linspace(0, len(places) - 1, min(len(places), TABLE_ROWS)).round().astype(int))
    rows = [[number(place) if place % 1 else plain(place)] for place in places[chosen].tolist()]
    for line in lines:
        values = np.append(math.nan, line.y)[np.searchsorted(line.x, places[chosen], side="right")]
        for row, value in zip(rows, values.tolist(), strict=True):
            row.append("–" if math.isnan(value) else write(value))
    return {"rows": rows, "left_out": len(places) - len(rows)}


def _coordinate(value: float) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".")


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
    """Return the charts of a single run, without empty charts."""
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
    memory = [_line(history, "memory_bytes", "peak", 1), _line(history, "memory_allocated_bytes", "now", 2)]
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
    """Return the charts of several runs with one line per run, without empty charts."""
    charts = []
    for key, title in OVERLAID.items():
        lines = [
            _line(history, key, name, run % STYLES + 1, f"run{run}")
            for run, (history, name) in enumerate(zip(histories, names, strict=True))
        ]
        charts.append(draw(key, title, lines, Frame(from_zero=key in FROM_ZERO, is_percent=key in SHARES)))
    return [chart for chart in charts if chart is not None]


def _line(history: History, column: str, name: str, style: int, switch: str = "") -> Line:
    """Return a column of the logging points or of the epochs as a line plotted over epochs."""
    if column in (*CURVES, *SYSTEM, *CPUS):
        x, y = np.array(history.steps) / (history.steps_per_epoch or 1), np.array(history.columns[column])
    else:
        x = np.array(sorted(history.epochs), dtype=np.float64)
        y = np.array([history.epochs[epoch].get(column, np.nan) for epoch in sorted(history.epochs)])
    return Line(name, style, x, y, switch or column)


def _validation_loss(history: History) -> str:
    """Return a sentence about the first, the last and the lowest validation loss."""
    losses = [(epoch, history.epochs[epoch]["val_loss"]) for epoch in sorted(history.epochs)]
    if not losses:
        return ""
    first, last = (f"{number(loss, 3)} after epoch {epoch}" for epoch, loss in (losses[0], losses[-1]))
    if len(losses) == 1:
        return f"{first} on the validation images. "
    epoch, lowest = max(losses, key=lambda pair: merit("loss", pair[1]))
    return f"From {first} to {last} on the validation images; lowest in epoch {epoch} with {number(lowest, 3)}. "
