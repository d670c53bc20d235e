"""Line charts: SVG paths for the template, and the numbers as a table."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from delivery.report.formatting import THIN, isolate, number, percent, plain

POINTS_PER_CHART = 1600  # over all lines; about 25 bytes each in the page
VIEW = 1000  # side of the SVG's own coordinates, which are stretched to the chart's size
MOST_DOTS = 60
TABLE_ROWS = 32
LOG_SCALE_FROM = 50  # ratio of the largest to the smallest value
LABEL_GAP = 8.0  # percent of the chart's height between two labels at its right edge


@dataclass(frozen=True)
class Line:
    """One line of a chart.

    Attributes:
        name: shown in the legend and in the table.
        style: index of colour and dash pattern, from 1.
        x, y: the points, float [N], x ascending; a value of y that is not finite leaves a gap.
        switch: all lines of the page with the same value are toggled together by the legend.
        dotted: whether the points are marked.
        faint: whether the line is thin.
    """

    name: str
    style: int
    x: np.ndarray
    y: np.ndarray
    switch: str
    dotted: bool = False
    faint: bool = False


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


@dataclass(frozen=True)
class Chart:
    """A chart as the template takes it.

    Attributes:
        lines: of each its `Line` fields, the SVG paths of line and dots in a square of side `VIEW`, the last value
            as text, and label_top, the position of its label in percent of the height.
        marks: positions of the vertical marks in percent.
        left_out: the number of rows that are not in the table.
        data: what page.js reads values from.
    """

    key: str
    title: str
    caption: str
    x_name: str
    x_axis: Axis
    y_axis: Axis
    lines: list[dict[str, Any]]
    marks: list[float]
    table_header: list[str]
    table: list[list[str]]
    left_out: int
    data: dict[str, Any]


def draw(
    key: str,
    title: str,
    lines: Sequence[Line],
    *,
    caption: str = "",
    x_name: str = "epoch",
    marks: Sequence[float] = (),
    is_percent: bool = False,
    from_zero: bool = False,
    may_be_log: bool = False,
) -> Chart | None:
    """Lay out a chart; None if no line has a finite point.

    Args:
        key: unique in the page.
        title: a few words, with the unit.
        lines: those without a finite point are left out.
        caption: by default the last values.
        x_name: of the horizontal axis.
        marks: values of x to mark.
        is_percent: whether the values are shares of 0..1, to be written in percent.
        from_zero: whether the vertical axis begins at 0.
        may_be_log: whether it is logarithmic if the values span more than a factor of `LOG_SCALE_FROM`.
    """
    columns = max(POINTS_PER_CHART // (2 * max(len(lines), 1)), 16)
    thinned = [(line, *thin(line.x, line.y, columns)) for line in lines]
    lines = [dataclasses.replace(line, x=x, y=y) for line, x, y in thinned if np.isfinite(y).any()]
    if not lines:
        return None
    write: Callable[[float], str] = _percent if is_percent else number
    values = [value for line in lines for value in line.y[np.isfinite(line.y)].tolist()]
    x_axis = linear_axis(0.0, max(float(line.x[-1]) for line in lines), plain, is_tight=True)
    if may_be_log and min(values) > 0 and max(values) / min(values) > LOG_SCALE_FROM:
        y_axis = log_axis(min(values), max(values))
    else:
        tick, highest = (_percent_tick, 1.0) if is_percent else (plain, math.inf)
        y_axis = linear_axis(0.0 if from_zero else min(values), max(values), tick, highest=highest)
    drawn = [_drawn(line, x_axis, y_axis, write) for line in lines]
    _spread_labels(drawn)
    if not caption and len(lines) == 1:
        caption = (
            f"From {write(values[0])} to {drawn[0]['last']}; between {write(min(values))} and {write(max(values))}."
        )
    rows, left_out = _tabulate(lines, write)
    in_script = ("name", "switch", "style", "x", "y")
    return Chart(
        key=key,
        title=title,
        caption=caption or f"Last values: {', '.join(isolate(one['name']) + ' ' + one['last'] for one in drawn)}.",
        x_name=x_name,
        x_axis=x_axis,
        y_axis=y_axis,
        lines=drawn,
        marks=[100 * place for place in x_axis.place(np.array(marks)).tolist() if 0 <= place <= 1],
        table_header=[x_name, *(line.name for line in lines)],
        table=rows,
        left_out=left_out,
        data={
            "x": [x_axis.low, x_axis.high],
            "y": [y_axis.low, y_axis.high],
            "log": y_axis.is_log,
            "percent": is_percent,
            "xName": x_name,
            "lines": [{name: one[name] for name in in_script} for one in drawn],
        },
    )


def thin(
    x: Sequence[float] | np.ndarray, y: Sequence[float] | np.ndarray, columns: int
) -> tuple[np.ndarray, np.ndarray]:
    """Keep the lowest and the highest point of each of so many columns of equal width, and both ends.

    Returns:
        x and y of the points that stay; what is not finite is NaN, and stays if its column has nothing else.
    """
    xs, ys = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    ys = np.where(np.isfinite(ys), ys, np.nan)
    if len(xs) > 2 * columns:
        edges = np.searchsorted(xs, np.linspace(xs[0], xs[-1], columns + 1)[1:-1])
        keep = {0, len(xs) - 1}
        for inside in np.split(np.arange(len(xs)), edges):
            finite = inside[np.isfinite(ys[inside])]
            keep |= {finite[ys[finite].argmin()], finite[ys[finite].argmax()]} if len(finite) else set(inside[:1])
        order = np.array(sorted(keep))
        xs, ys = xs[order], ys[order]
    return xs, ys


def linear_axis(
    low: float, high: float, write: Callable[[float], str], *, highest: float = math.inf, is_tight: bool = False
) -> Axis:
    """Return an axis with ticks at multiples of 1, 2 or 5 times a power of ten; a tight one ends with the values."""
    if high <= low:
        spread = abs(high) * 0.1 or 1.0
        low, high = (low if is_tight else low - spread), high + spread
    power = 10.0 ** math.floor(math.log10((high - low) / 4))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= (high - low) / 4 * (1 - 1e-9))
    if not is_tight:
        low = math.floor(low / step + 1e-9) * step
        high = min(math.ceil(high / step - 1e-9) * step, highest)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    ticks = [(100 * (place * step - low) / (high - low), write(place * step)) for place in range(first, last + 1)]
    return Axis(low, high, ticks)


def log_axis(low: float, high: float) -> Axis:
    """Return a logarithmic axis over whole powers of ten with at most seven ticks."""
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    powers = range(first, last + 1, max(1, math.ceil((last - first) / 6)))
    ticks = [(100 * (power - first) / (last - first), number(10.0**power, 1)) for power in powers]
    return Axis(10.0**first, 10.0**last, ticks, is_log=True)


def _drawn(line: Line, x_axis: Axis, y_axis: Axis, write: Callable[[float], str]) -> dict[str, Any]:
    """Return a line's fields, paths and texts for the template."""
    across, down = VIEW * x_axis.place(line.x), VIEW * (1 - y_axis.place(line.y))
    finite = np.isfinite(line.y)
    points = [f"{_coordinate(x)} {_coordinate(y)}" for x, y in zip(across[finite], down[finite], strict=True)]
    follows = np.concatenate([[False], finite[:-1]])[finite]  # whether the point before is finite too
    path = "".join(f"{'L' if draws else 'M'}{point}" for point, draws in zip(points, follows, strict=True))
    has_dots = (line.dotted and len(finite) <= MOST_DOTS) or len(finite) == 1
    return dataclasses.asdict(line) | {
        "x": _five_digits(line.x),
        "y": _five_digits(line.y),
        "path": path,
        "dots": "".join(f"M{point}h0" for point in points) if has_dots else "",
        "last": write(float(line.y[finite][-1])),
        "label_top": float(down[finite][-1]) * 100 / VIEW,
    }


def _spread_labels(drawn: Sequence[dict[str, Any]]) -> None:
    """Move the labels at the right edge apart, and keep them inside the chart."""
    order = sorted(drawn, key=lambda line: line["label_top"])
    for before, line in itertools.pairwise(order):
        line["label_top"] = max(line["label_top"], before["label_top"] + LABEL_GAP)
    for place, line in enumerate(reversed(order)):
        line["label_top"] = min(line["label_top"], 100 - place * LABEL_GAP)


def _tabulate(lines: Sequence[Line], write: Callable[[float], str]) -> tuple[list[list[str]], int]:
    """Return the rows of a table at the places of the sparsest line, and the number of rows left out.

    A line's value at a place is that of its last point up to there.
    """
    candidates = sorted((np.unique(line.x) for line in lines), key=len)
    places = next((found for found in candidates if len(found) > 2), candidates[0])
    chosen = np.unique(np.linspace(0, len(places) - 1, min(len(places), TABLE_ROWS)).round().astype(int))
    rows = []
    for place in places[chosen].tolist():
        last = [int(np.searchsorted(line.x, place, side="right")) - 1 for line in lines]
        values = [line.y[at] if at >= 0 else math.nan for line, at in zip(lines, last, strict=True)]
        cells = ["–" if math.isnan(value) else write(value) for value in values]
        rows.append([number(place) if place % 1 else plain(place), *cells])
    return rows, len(places) - len(rows)


def _percent(value: float) -> str:
    return percent(value, 2)


def _percent_tick(value: float) -> str:
    return f"{100 * value:.4g}{THIN}%"


def _coordinate(value: float) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".")


def _five_digits(values: np.ndarray) -> list[float | None]:
    """Keep what a screen can show; None for what is not finite, which JSON cannot express."""
    return [float(f"{value:.5g}") if math.isfinite(value) else None for value in values.tolist()]
