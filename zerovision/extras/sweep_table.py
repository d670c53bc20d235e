"""A sweep from its command line to its table: a row for each combination of values, the mean over seeds and folds."""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from zerovision.extras.settings import SweepSettings
from zerovision.extras.sweep import FAILED, SCRIPT, RunningSweep, SweepTrial, prepare
from zerovision.launch.arguments import with_flags
from zerovision.training.base.atomic_write import replacing
from zerovision.training.base.points import merit, show_score
from zerovision.training.base.run_folder import shown_path
from zerovision.training.base.small_files import write_csv
from zerovision.training.base.units import plural
from zerovision.training.world.signals import handling_stop_signals

REPEATS = ("seed", "split-seed", "fold")  # flags whose values are no choices: their trials have a mean


@dataclass(frozen=True)
class Combination:
    """All trials that differ in nothing but `REPEATS`.

    Attributes:
        values: by flag, without `REPEATS`.
        compared: those with a score that came to the most rungs, the best first.
        rank: rungs, and the mean as a number of which more is better.
    """

    values: dict[str, str]
    compared: list[SweepTrial]
    rank: tuple[int, float]

    def score(self, best_by: str) -> str:
        """Return mean ± standard deviation (n - 1), of shares in percent; of a single one itself."""
        scores = [one.score for one in self.compared if one.score is not None]
        if not scores:
            return "-"
        unit = 1 if best_by == "loss" else 100
        mean = f"{unit * statistics.mean(scores):.2f}"
        return mean if len(scores) < 2 else f"{mean} ± {unit * statistics.stdev(scores):.2f}"


def rows_of(running: RunningSweep) -> list[Combination]:
    """Return a row for each combination of values but `REPEATS`, those of the most rungs first, then the best mean."""
    groups: dict[tuple[tuple[str, str], ...], list[SweepTrial]] = {}
    for one in running.trials:
        key = tuple((flag, value) for flag, value in one.values.items() if flag not in REPEATS)
        groups.setdefault(key, []).append(one)
    rungs = running.rungs_reached()
    rows = [_combination(dict(key), group, rungs, running.best_by) for key, group in groups.items()]
    return sorted(rows, key=lambda row: row.rank, reverse=True)


def best_trial(rows: Sequence[Combination]) -> SweepTrial | None:
    """Return the best trial of the best combination, None if no trial has a score."""
    return next((one for row in rows[:1] for one in row.compared), None)


def _combination(
    values: dict[str, str], group: Sequence[SweepTrial], rungs: Mapping[int, int], best_by: str
) -> Combination:
    rung = max((rungs[one.number] for one in group if one.score is not None), default=-1)
    there = [one for one in group if rungs[one.number] == rung]
    compared = sorted((one for one in there if one.score is not None), key=lambda one: -merit(best_by, one.score))
    # A trial without a sound epoch spoils the mean.
    mean = statistics.fmean(merit(best_by, one.score) for one in there) if there else -math.inf
    return Combination(values, compared, (rung, mean))


def write_table(running: RunningSweep) -> Path:
    """Write sweep.csv, a line for each trial, into the sweep's folder; return the file."""

    def cells(one: SweepTrial) -> list[str | float]:
        score = "" if one.score is None else one.score
        return [one.run_name, *one.values.values(), one.epochs, score, one.state, round(one.seconds, 1)]

    file = running.folder / "sweep.csv"
    header = ["run", *running.trials[0].values, "epochs", running.best_by, "state", "seconds"]
    with replacing(file) as temporary:
        write_csv(temporary, header, map(cells, running.trials))
    return file


def run(given: SweepSettings) -> int:
    """Train the trials, print each as it comes to a rung, and print and write the table."""
    running, received = prepare(given), []

    def stop(number: int, _frame: object) -> None:
        received.append(number)
        running.stop()

    with handling_stop_signals(stop):
        for trial in running.run(given.jobs, Path(given.hostfile) if given.hostfile else None):
            score = (
                "no epoch"
                if trial.score is None
                else f"{show_score(running.best_by, trial.score)} after {plural(trial.epochs, 'epoch')}"
            )
            print(f"{trial.run_name}  {' '.join(trial.flags)}  {score}, {trial.state}", flush=True)
    rows = rows_of(running)
    best = best_trial(rows)
    command = shlex.join(["bash", f"scripts/{SCRIPT}", *with_flags(SCRIPT, given.words, best.flags)]) if best else ""
    table = write_table(running)
    for row in rows:
        print(
            f"{row.score(running.best_by):>14}  {' '.join(f'--{flag}={value}' for flag, value in row.values.items())}"
        )
    print(f"best         {command}\ntable        {shown_path(table)}")
    if received:
        return 128 + received[0]
    return int(any(trial.state.startswith(FAILED) for trial in running.trials))
