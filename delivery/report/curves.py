"""A chart laid out for the template: its lines as paths of SVG, their names, their numbers as a table."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from delivery.report.axes import Axis, linear_axis, log_axis
from delivery.report.formatting import isolate, number, plain
from delivery.report.points import tabulate, thin

POINTS_PER_CHART = 1600  # over all lines; about 25 bytes each in the page
VIEW = 1000  # side of the SVG's own coordinates, which it stretches to the place there is
MOST_DOTS = 60
LOG_SCALE_FROM = 50  # ratio of the largest to the smallest value
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


class _Kept(NamedTuple):
    """A line and those of its points that stay."""

    line: Line
    x: list[float]
    y: list[float | None]


@dataclass(frozen=True)
class Chart:
    """A chart ready for the template.

    Attributes:
        key, title, caption, x_name: as given to `draw`.
        x_axis, y_axis: what is spanned.
        lines: of each line name, style, switch, faint, the paths of line and dots in a square of side `VIEW`, last
            (its last value in words) and label_top (percent of the height).
        marks: places on the horizontal axis, in percent.
        table_header, table: the numbers as text.
        left_out: rows that are not in the table.
        data: what the page's script reads values from.
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
    thinned = [(line, *thin(line.x, line.y, columns)) for line in lines]
    kept = [_Kept(line, x, y) for line, x, y in thinned if any(value is not None for value in y)]
    if not kept:
        return None
    values = [value for one in kept for value in one.y if value is not None]
    x_axis = linear_axis(0.0, max(one.x[-1] for one in kept), plain, is_tight=True)
    if may_be_log and min(values) > 0 and max(values) / min(values) > LOG_SCALE_FROM:
        y_axis = log_axis(min(values), max(values))
    else:
        y_axis = linear_axis(0.0 if from_zero else min(values), max(values), write_tick, highest=highest)
    drawn = [_drawn(one, x_axis, y_axis, write) for one in kept]
    _spread_labels(drawn)
    header, rows, left_out = tabulate([(one.line.name, one.x, one.y) for one in kept], x_name, write)
    if not caption and len(kept) == 1:
        caption = (
            f"From {write(values[0])} to {drawn[0]['last']}; between {write(min(values))} and {write(max(values))}."
        )
    return Chart(
        key=key,
        title=title,
        caption=caption or f"In the end: {', '.join(isolate(one['name']) + ' ' + one['last'] for one in drawn)}.",
        x_name=x_name,
        x_axis=x_axis,
        y_axis=y_axis,
        lines=drawn,
        marks=[100 * x_axis.place(mark) for mark in marks if x_axis.low <= mark <= x_axis.high],
        table_header=header,
        table=rows,
        left_out=left_out,
        data=_data(kept, x_axis, y_axis, x_name, is_percent=write(1.0).endswith("%")),
    )


def _data(kept: Sequence[_Kept], x_axis: Axis, y_axis: Axis, x_name: str, *, is_percent: bool) -> dict[str, Any]:
    """Return what page.js reads values from."""
    return {
        "x": [x_axis.low, x_axis.high],
        "y": [y_axis.low, y_axis.high],
        "log": y_axis.is_log,
        "percent": is_percent,
        "xName": x_name,
        "lines": [
            {
                "name": one.line.name,
                "switch": one.line.switch,
                "style": one.line.style,
                "x": _short(one.x),
                "y": _short(one.y),
            }
            for one in kept
        ],
    }


def _drawn(kept: _Kept, x_axis: Axis, y_axis: Axis, write: Callable[[float], str]) -> dict[str, Any]:
    """Return paths and texts of a line for the template."""
    line, x, y = kept
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


def _place(value: float) -> str:
    return f"{value:.1f}".rstrip("0").rstrip(".")


def _short(values: Sequence[float | None]) -> list[float | None]:
    """Keep five digits: what a screen can show."""
    return [None if value is None else float(f"{value:.5g}") for value in values]
