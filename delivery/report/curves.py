"""A chart as numbers: lines thinned without losing spikes, axes with round ticks, and paths for SVG."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from delivery.report.wording import isolate, number, plain

POINTS_PER_CHART = 1600  # over all lines; about 25 bytes each in the page
VIEW = 1000  # side of the SVG's own coordinates, which it stretches to the place there is
MOST_DOTS = 60
LOG_SCALE_FROM = 50  # ratio of the largest to the smallest value
TABLE_ROWS = 32
LABEL_GAP = 8.0  # percent of the chart's height between two names at its right edge


@dataclass(frozen=True)
class Line:
    """One line of a chart.

    Attributes:
        name: for people.
        style: which of the colours and dashes, from 1.
        x, y: the points, x ascending; y may hold what is not finite, where the line then has a gap.
        switch: what a legend switches together: the same in all charts for all lines of a run.
        dotted: whether the points themselves are marked.
        faint: whether the line is thin and pale, behind the others.
    """

    name: str
    style: int
    x: Sequence[float]
    y: Sequence[float]
    switch: str
    dotted: bool = False
    faint: bool = False


@dataclass(frozen=True)
class Axis:
    """Which values an axis spans, and its ticks: (place in percent, text)."""

    low: float
    high: float
    ticks: list[tuple[float, str]]
    is_log: bool = False

    def place(self, value: float) -> float:
        """Return where a value lies, 0 to 1."""
        low, high = (math.log(self.low), math.log(self.high)) if self.is_log else (self.low, self.high)
        return ((math.log(value) if self.is_log else value) - low) / (high - low)


@dataclass(frozen=True)
class Chart:
    """A chart ready to be drawn; see `draw`."""

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
    data: dict[str, Any] = field(repr=False)


def draw(
    key: str,
    title: str,
    lines: Sequence[Line],
    *,
    caption: str = "",
    x_name: str = "epoch",
    marks: Sequence[float] = (),
    write: Callable[[float], str] = number,
    write_tick: Callable[[float], str] = plain,
    from_zero: bool = False,
    highest: float | None = None,
    may_be_log: bool = False,
) -> Chart | None:
    """Lay out a chart; None where no line has a finite point.

    Args:
        key: unique in the page.
        title: a few words, with the unit.
        lines: what to draw.
        caption: a sentence or two that say what is to be seen; by default the last values.
        x_name: of the horizontal axis.
        marks: places on it to mark.
        write: a value for people.
        write_tick: a round value beside the vertical axis.
        from_zero: whether the vertical axis begins at 0.
        highest: where it ends at most.
        may_be_log: whether it is logarithmic where the values span much.
    """
    columns = max(POINTS_PER_CHART // (2 * max(len(lines), 1)), 16)
    kept = [(line, *thin(line.x, line.y, columns)) for line in lines]
    kept = [(line, x, y) for line, x, y in kept if any(value is not None for value in y)]
    if not kept:
        return None
    values = [value for _, _, y in kept for value in y if value is not None]
    x_axis = linear_axis(0.0, max(x[-1] for _, x, _ in kept), plain, is_tight=True)
    is_log = may_be_log and min(values) > 0 and max(values) / min(values) > LOG_SCALE_FROM
    if is_log:
        y_axis = log_axis(min(values), max(values))
    else:
        y_axis = linear_axis(0.0 if from_zero else min(values), max(values), write_tick, highest=highest)
    drawn = [_drawn(line, x, y, x_axis, y_axis, write) for line, x, y in kept]
    _spread_labels(drawn)
    header, rows, left_out = tabulate([(line.name, x, y) for line, x, y in kept], x_name, write)
    data = {
        "x": [x_axis.low, x_axis.high],
        "y": [y_axis.low, y_axis.high],
        "log": is_log,
        "percent": write(1.0).endswith("%"),
        "xName": x_name,
        "lines": [
            {"name": line.name, "switch": line.switch, "style": line.style, "x": _short(x), "y": _short(y)}
            for line, x, y in kept
        ],
    }
    if not caption and len(drawn) == 1:
        caption = (
            f"From {write(values[0])} to {drawn[0]['last']}; between {write(min(values))} and {write(max(values))}."
        )
    elif not caption:
        caption = f"In the end: {', '.join(isolate(line['name']) + ' ' + line['last'] for line in drawn)}."
    places = [100 * x_axis.place(mark) for mark in marks if x_axis.low <= mark <= x_axis.high]
    return Chart(key, title, caption, x_name, x_axis, y_axis, drawn, places, header, rows, left_out, data)


def thin(x: Sequence[float], y: Sequence[float], columns: int) -> tuple[list[float], list[float | None]]:
    """Keep the lowest and the highest point of each of so many columns of equal width, and both ends.

    Returns:
        The points that stay, in order; None for those that are not finite, where no point of their column is.
    """
    xs, ys = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    is_finite = np.isfinite(ys)
    if len(xs) > 2 * columns:
        edges = np.searchsorted(xs, np.linspace(xs[0], xs[-1], columns + 1)[1:-1])
        keep = {0, len(xs) - 1}
        for inside in np.split(np.arange(len(xs)), edges):
            good = inside[is_finite[inside]]
            if len(good):
                keep |= {int(good[ys[good].argmin()]), int(good[ys[good].argmax()])}
            elif len(inside):
                keep.add(int(inside[0]))
        order = np.array(sorted(keep))
        xs, ys, is_finite = xs[order], ys[order], is_finite[order]
    values: list[float | None] = [
        value if good else None for value, good in zip(ys.tolist(), is_finite.tolist(), strict=True)
    ]
    return xs.tolist(), values


def linear_axis(
    low: float,
    high: float,
    write: Callable[[float], str],
    *,
    highest: float | None = None,
    is_tight: bool = False,
) -> Axis:
    """Return an axis over the values with ticks at 1, 2 or 5 times a power of ten; a tight one ends with the values."""
    if high <= low:
        spread = abs(high) * 0.1 or 1.0
        low, high = (low, high + spread) if is_tight else (low - spread, high + spread)
    step = _round_step((high - low) / 4)
    if not is_tight:
        low = math.floor(low / step + 1e-9) * step
        high = math.ceil(high / step - 1e-9) * step
        high = min(high, highest) if highest is not None else high
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    ticks = [(100 * (place * step - low) / (high - low), write(place * step)) for place in range(first, last + 1)]
    return Axis(low, high, ticks)


def log_axis(low: float, high: float) -> Axis:
    """Return a logarithmic axis over whole powers of ten, at most seven of them named."""
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    every = max(1, math.ceil((last - first) / 6))
    powers = range(first, last + 1, every)
    ticks = [(100 * (power - first) / (last - first), number(10.0**power, 1)) for power in powers]
    return Axis(10.0**first, 10.0**last, ticks, is_log=True)


def tabulate(
    lines: Sequence[tuple[str, Sequence[float], Sequence[float | None]]], x_name: str, write: Callable[[float], str]
) -> tuple[list[str], list[list[str]], int]:
    """Return header, rows and the number of rows left out of a table of the lines at the places of the sparsest one.

    A line's value at a place is that of its last point up to there.
    """
    candidates = sorted((sorted(set(x)) for _, x, _ in lines), key=len)
    places = next((found for found in candidates if len(found) > 2), candidates[0])
    chosen = sorted({round(position) for position in np.linspace(0, len(places) - 1, min(len(places), TABLE_ROWS))})
    rows = []
    for place in (places[position] for position in chosen):
        cells = []
        for _, x, y in lines:
            last = int(np.searchsorted(x, place, side="right")) - 1
            value = y[last] if last >= 0 else None
            cells.append("–" if value is None else write(value))
        rows.append([number(place) if place % 1 else plain(place), *cells])
    return [x_name, *(name for name, _, _ in lines)], rows, len(places) - len(rows)


def _drawn(
    line: Line, x: list[float], y: list[float | None], x_axis: Axis, y_axis: Axis, write: Callable[[float], str]
) -> dict[str, Any]:
    places = [
        (VIEW * x_axis.place(across), None if up is None else VIEW * (1 - y_axis.place(up)))
        for across, up in zip(x, y, strict=True)
    ]
    steps, pen_is_down = [], False
    for across, down in places:
        if down is not None:
            steps.append(f"{'L' if pen_is_down else 'M'}{_place(across)} {_place(down)}")
        pen_is_down = down is not None
    has_dots = (line.dotted and len(places) <= MOST_DOTS) or len(places) == 1
    dots = [f"M{_place(across)} {_place(down)}h0" for across, down in places if down is not None] if has_dots else []
    last = next(value for value in reversed(y) if value is not None)
    return {
        "name": line.name,
        "style": line.style,
        "switch": line.switch,
        "faint": line.faint,
        "path": "".join(steps),
        "dots": "".join(dots),
        "last": write(last),
        "label_top": 100 * (1 - y_axis.place(last)),
    }


def _spread_labels(drawn: Sequence[dict[str, Any]]) -> None:
    """Move the names at the right edge apart, and keep them inside the chart."""
    order = sorted(drawn, key=lambda line: line["label_top"])
    for before, line in itertools.pairwise(order):
        line["label_top"] = max(line["label_top"], before["label_top"] + LABEL_GAP)
    limit = 100.0
    for line in reversed(order):
        line["label_top"] = min(line["label_top"], limit)
        limit = line["label_top"] - LABEL_GAP


def _round_step(smallest: float) -> float:
    """Return the next of 1, 2 or 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(smallest))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= smallest * (1 - 1e-9))


def _place(value: float) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".")


def _short(values: Sequence[float | None]) -> list[float | None]:
    """Keep five digits: what a screen can show."""
    return [None if value is None else float(f"{value:.5g}") for value in values]
