"""A sweep as a table and a page: each combination's mean and deviation, and parallel coordinates of all trials."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from training.base.atomic_write import replacing
from training.base.points import SCORE_NAMES, merit
from training.base.small_files import csv_line

PAGE = Path(__file__).with_name("sweep_page.html.j2")
REPEATS = ("seed", "split-seed", "fold")  # flags whose values are no choices: their trials have a mean
WIDTH, HEIGHT, MARGIN = 900, 340, 50  # of the picture, pixels


@dataclass(frozen=True)
class TrialResult:
    """A trial as the page shows it.

    Attributes:
        run_name: of its run.
        values: by flag.
        epochs: trained.
        score: of the best epoch, None before the first.
        state: in words.
        seconds: of its trainings.
        rung: how many rungs it has come to, see `launch.sweep.RunningSweep.rungs_reached`.
    """

    run_name: str
    values: Mapping[str, str]
    epochs: int
    score: float | None
    state: str
    seconds: float
    rung: int = 1


@dataclass(frozen=True)
class Combination:
    """All trials that differ in nothing but `REPEATS`.

    Attributes:
        values: by flag, without `REPEATS`.
        compared: those with a score that came to the most rungs, the best first.
        epochs: that all of these were trained for.
        states: of all trials in words, each once.
        rank: rungs, and the mean as a number of which more is better.
    """

    values: dict[str, str]
    compared: list[TrialResult]
    epochs: int
    states: str
    rank: tuple[int, float]

    @property
    def scores(self) -> list[float]:
        """The scores of the trials that are compared."""
        return [one.score for one in self.compared if one.score is not None]

    def score(self, best_by: str) -> str:
        """Return mean ± standard deviation (n - 1), of shares in percent; of a single one itself."""
        if not self.scores:
            return "-"
        unit = 1 if best_by == "loss" else 100
        mean = f"{unit * statistics.mean(self.scores):.2f}"
        return mean if len(self.scores) < 2 else f"{mean} ± {unit * statistics.stdev(self.scores):.2f}"


def rows_of(results: Sequence[TrialResult], best_by: str) -> list[Combination]:
    """Return a row for each combination of values but `REPEATS`, those of the most rungs first, then the best mean."""
    groups: dict[tuple[tuple[str, str], ...], list[TrialResult]] = {}
    for one in results:
        key = tuple((flag, value) for flag, value in one.values.items() if flag not in REPEATS)
        groups.setdefault(key, []).append(one)
    rows = [_combination(dict(key), group, best_by) for key, group in groups.items()]
    return sorted(rows, key=lambda row: row.rank, reverse=True)


def best_trial(results: Sequence[TrialResult], best_by: str) -> TrialResult | None:
    """Return the best trial of the best combination, None if no trial has a score."""
    return next((one for row in rows_of(results, best_by)[:1] for one in row.compared), None)


def _combination(values: dict[str, str], group: Sequence[TrialResult], best_by: str) -> Combination:
    rung = max((one.rung for one in group if one.score is not None), default=-1)
    there = [one for one in group if one.rung == rung]
    compared = sorted((one for one in there if one.score is not None), key=lambda one: -merit(best_by, one.score))
    # A trial without a sound epoch spoils the mean.
    mean = statistics.fmean(merit(best_by, one.score) for one in there) if there else -math.inf
    epochs = min(one.epochs for one in compared or group)
    return Combination(values, compared, epochs, ", ".join(dict.fromkeys(one.state for one in group)), (rung, mean))


def write_sweep(folder: Path, name: str, results: Sequence[TrialResult], best_by: str, command: str) -> Path:
    """Write sweep.csv, a line for each trial, and sweep.html into the sweep's folder; return the page.

    Args:
        folder: of the sweep.
        name: of the sweep.
        results: of all trials.
        best_by: the score, a key of `SCORE_NAMES`.
        command: that trains the best trial alone; empty if none has a score.
    """
    flags = list(results[0].values)
    with replacing(folder / "sweep.csv") as temporary, temporary.open("w", encoding="utf-8", newline="") as stream:
        stream.write(csv_line(["run", *flags, "epochs", best_by, "state", "seconds"]))
        for one in results:
            numbers = [one.epochs, "" if one.score is None else one.score, one.state, round(one.seconds, 1)]
            stream.write(csv_line([one.run_name, *one.values.values(), *numbers]))
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    page = environment.from_string(PAGE.read_text(encoding="utf-8")).render(
        name=name,
        rows=rows_of(results, best_by),
        best_by=best_by,
        score_name=SCORE_NAMES[best_by] + ("" if best_by == "loss" else ", %"),
        flags=[flag for flag in flags if flag not in REPEATS],
        results=results,
        axes=_axes(flags, results, best_by),
        lines=_lines(flags, results, best_by),
        size=(WIDTH, HEIGHT, MARGIN),
        command=command,
    )
    with replacing(folder / "sweep.html") as temporary:
        temporary.write_text(page, encoding="utf-8", errors="replace")
    return folder / "sweep.html"


def _places(values: Sequence[str]) -> dict[str, float]:
    """Return where each value lies on its axis, from 0 to 1: numbers by their rank, as words by their order."""
    try:
        ordered = sorted(set(values), key=float)
    except ValueError:
        ordered = list(dict.fromkeys(values))
    return {value: place / max(len(ordered) - 1, 1) for place, value in enumerate(ordered)}


def _axes(flags: Sequence[str], results: Sequence[TrialResult], best_by: str) -> list[dict[str, Any]]:
    """Return name, x, and the labelled ticks of each axis."""
    scores = [merit(best_by, one.score) for one in results if one.score is not None]
    axes: list[dict[str, Any]] = []
    for number, flag in enumerate(flags):
        places = _places([one.values[flag] for one in results])
        shown = list(places.items())
        if len(shown) > 8:
            shown = [shown[0], shown[-1]]
        axes.append({"name": flag, "x": _x(number, len(flags)), "ticks": [(_y(at), text) for text, at in shown]})
    bounds = [merit(best_by, bound) for bound in (min(scores), max(scores))] if scores else []
    texts = [f"{bound:.3f}" if best_by == "loss" else f"{100 * bound:.1f} %" for bound in bounds]
    ends = [(_y(place), text) for place, text in enumerate(texts)]
    return [*axes, {"name": SCORE_NAMES[best_by], "x": _x(len(flags), len(flags)), "ticks": ends}]


def _lines(flags: Sequence[str], results: Sequence[TrialResult], best_by: str) -> list[dict[str, Any]]:
    """Return the points and the name of each trial with a score, the best last, so that it lies on top."""
    best, merits = best_trial(results, best_by), [merit(best_by, one.score) for one in results if one.score is not None]
    if best is None:
        return []
    low, spread = min(merits), (max(merits) - min(merits)) or 1.0
    places = [_places([one.values[flag] for one in results]) for flag in flags]
    lines = []
    for one in sorted((one for one in results if one.score is not None), key=lambda one: one is best):
        at = [places[number][one.values[flag]] for number, flag in enumerate(flags)]
        at.append((merit(best_by, one.score) - low) / spread)
        points = " ".join(f"{_x(number, len(flags)):.1f},{_y(place):.1f}" for number, place in enumerate(at))
        lines.append({"points": points, "name": one.run_name, "is_best": one is best})
    return lines


def _x(number: int, last: int) -> float:
    return MARGIN + number / last * (WIDTH - 2 * MARGIN)


def _y(place: float) -> float:
    return HEIGHT - MARGIN - place * (HEIGHT - 2 * MARGIN)
