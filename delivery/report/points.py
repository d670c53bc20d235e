"""The points of a curve: thinned without losing spikes, and as a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from delivery.report.formatting import number, plain

TABLE_ROWS = 32


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
