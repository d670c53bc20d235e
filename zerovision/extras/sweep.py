"""Trains with several values of flags, from a grid or drawn at random; can stop all but the better trials early.

Early stopping is successive halving (Jamieson and Talwalkar 2016, arXiv:1502.07943). Trials resume exactly, so nothing
is trained twice, and a trial that reaches the last epoch equals an ordinary run. The final table has a row for each
combination of values, with the mean over seeds and folds.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import random
import re
import shlex
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

from zerovision.extras.settings import SweepSettings
from zerovision.launch.arguments import check_training, read_arguments, with_flags
from zerovision.launch.hosts import read_hostfile
from zerovision.launch.rendezvous import NO_NODES_CODE
from zerovision.training.base.control_groups import usable_cores
from zerovision.training.base.errors import DIVERGED_EXIT_CODE, UserError, one_line, shown
from zerovision.training.base.files import errors_of_writing, replacing, write_csv, write_json
from zerovision.training.base.heartbeat import CALLER_VARIABLE
from zerovision.training.base.points import best_epoch, merit, score_in, show_score
from zerovision.training.base.run_folder import LAUNCH, METRICS, REPORT, as_typed, shown_path
from zerovision.training.base.units import plural
from zerovision.training.observe.new_run import run_folder
from zerovision.training.world.machine import usable_gpus
from zerovision.training.world.signals import handling_stop_signals

LAUNCHER = LAUNCH / "launch.py"
SCRIPT, MULTI_NODE = "launch_distributed.sh", "launch_multi_node.sh"
MOST_TRIALS = 1000
DRAWS = 100  # per trial, because the same combination may be drawn again
POLL_SECONDS = 0.2
PLACES = 3  # significant digits of a drawn number
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_VARIED = re.compile(r"(?:--)?([a-z][a-z0-9_-]*)=(.+)", re.DOTALL)
_NUMBER = r"([-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?)"
_RANGE = re.compile(rf"(.*:)?{_NUMBER}\.\.{_NUMBER}(:log)?")
LINE = "sweep.json"
OF_LINE = ("name", "words", "vary", "trials", "halving", "seed")  # fields that identify a sweep
KEPT = ("epochs", "score", "state", "seconds")  # fields of a trial that are saved for the next start
FAILED = "exit code"  # start of a failed trial's state
REPEATS = ("seed", "split-seed", "folds")  # flags whose values are averaged over, not compared


@dataclass
class SweepTrial:
    """One combination of values."""

    number: int  # counted from 1
    values: dict[str, str]  # by flag, without dashes
    run_name: str
    folder: Path  # of the run
    epochs: int = 0  # trained so far
    score: float | None = None  # best so far, by `--best-by`; None before the first epoch
    state: str = "waiting"  # or "paused", "finished", "diverged", or why the trial failed
    seconds: float = 0.0  # total duration of the trial's launches from this machine

    @property
    def flags(self) -> list[str]:
        """The flags that are specific to this trial."""
        return [f"--{flag}={value}" for flag, value in self.values.items()]


class Place(NamedTuple):
    """GPUs or cores of a machine that train one trial after another."""

    variables: dict[str, str]  # environment variables that select the GPUs, or set the number of threads
    host: str = ""  # '' for this machine


@dataclass
class RunningSweep:
    """A sweep run from this machine, with the state of every trial."""

    sweep: SweepSettings
    trials: list[SweepTrial]
    folder: Path  # with the command line and the trials' states and output
    epochs: int  # of a complete training run
    best_by: str  # the score by which trials are chosen, a key of `SCORE_NAMES`
    ranks: int  # of each trial
    _is_stopped: bool = False
    _places: list[Place] = field(default_factory=list)

    def run(self) -> Iterator[SweepTrial]:
        """Train the remaining trials, and yield each trial when it reaches a rung, or raise a UserError."""
        found = _places(self.ranks, self.sweep)
        self._places, places = [*found], SimpleQueue[Place | None]()
        for place in found:
            places.put(place)
        with errors_of_writing(self.folder):  # only now, so that a mistake does not use up the sweep's name
            self.folder.mkdir(parents=True, exist_ok=True)
            if not (self.folder / LINE).exists():
                with replacing(self.folder / LINE) as temporary:
                    write_json(temporary, _line_of(self.sweep))
        going = list(self.trials)
        for until in self.rungs():
            with ThreadPoolExecutor(len(found)) as pool:
                yield from pool.map(lambda trial, until=until: self._train(trial, until, places), going)
            if self._is_stopped or until == self.epochs:
                return
            going = self._better(self._arrived(going, until), going)

    def _is_there(self, trial: SweepTrial, until: int) -> bool:
        """Return whether a trial is complete up to the end of epoch `until`."""
        return trial.state in ("finished", "diverged") or (until < self.epochs and trial.epochs >= until)

    def _arrived(self, going: list[SweepTrial], until: int) -> list[SweepTrial]:
        """Return the trials that have reached a rung, best first."""
        there = [trial for trial in going if self._is_there(trial, until)]
        return sorted(there, key=lambda trial: merit(self.best_by, _progress(trial.folder, until)[1]), reverse=True)

    def _better(self, there: list[SweepTrial], going: list[SweepTrial]) -> list[SweepTrial]:
        """Return the best trials in `there`, which continue after a rung: one for every `halving` trials in `going`."""
        return there[: math.ceil(len(going) / self.sweep.halving)]

    def rungs_reached(self) -> dict[int, int]:
        """Return the number of rungs that each trial has reached; only the trials with the most rungs are compared.

        Unlike epochs, rungs do not depend on how early a trial stopped, or on how few epochs it was to be trained.
        """
        reached, going = {trial.number: 0 for trial in self.trials}, self.trials
        for rung, until in enumerate(self.rungs(), 1):
            there = self._arrived(going, until)
            reached |= {trial.number: rung for trial in there}
            late = [one for one in going if one not in there and not one.state.startswith(FAILED)]
            if late or until == self.epochs:
                break
            going = self._better(there, going)
        return reached

    def rungs(self) -> list[int]:
        """Return the epochs after which only the better trials continue, followed by the last epoch."""
        share = self.sweep.halving
        if not share:
            return [self.epochs]
        most = int(math.log(len(self.trials), share) + 1e-9)
        return sorted({max(1, math.ceil(self.epochs / share**rung)) for rung in range(most + 1)})

    def stop(self) -> None:
        """Tell running trials to save and exit, and start no more; never blocks, because signal handlers call this."""
        self._is_stopped = True

    def _train(self, trial: SweepTrial, until: int, places: SimpleQueue[Place | None]) -> SweepTrial:
        """Train a trial up to the end of epoch `until` unless it is already complete; store a failure as its state.

        No more trials are started on a machine that cannot be reached.
        """
        if self._is_stopped or self._is_there(trial, until):
            return trial
        while place := places.get():
            try:
                is_lost = self._start(trial, until, place) == NO_NODES_CODE and place.host != ""
            except BaseException:
                places.put(place)  # other trials wait for a place
                raise
            if not is_lost:
                places.put(place)
                break
            print(f"{place.host}: {trial.state}: it gets no more trials", file=sys.stderr, flush=True)
            self._places.remove(place)
            if not self._places:
                places.put(None)
        else:
            places.put(None)
            trial.state = f"{FAILED} {NO_NODES_CODE}: no machine is left"
        with replacing(_state_file(self.folder, trial)) as temporary:
            write_json(temporary, {name: getattr(trial, name) for name in ("values", "run_name", *KEPT)})
        return trial

    def _start(self, trial: SweepTrial, until: int, place: Place) -> int:
        """Train a trial at a place; return the launcher's exit code."""
        words = with_flags(SCRIPT, self.sweep.words, [*trial.flags, f"--run-name={trial.run_name}", "--resume=auto"])
        if place.host:
            words = [*words[:2], "1", *words[2:], f"--hosts={place.host}"]
        command = [sys.executable, str(LAUNCHER), MULTI_NODE if place.host else SCRIPT, *words]
        variables = os.environ | place.variables | {CALLER_VARIABLE: str(os.getpid())}
        start = time.monotonic()
        output = self.folder / f"{trial.number:03}.log"
        if self._is_stopped:
            return 0
        with output.open("ab") as log:
            process = subprocess.Popen(command, env=variables, stdout=log, stderr=log, start_new_session=True)
        is_asked, epochs = False, EpochLines(trial.folder)
        while process.poll() is None:
            if not is_asked and (self._is_stopped or (until < self.epochs and len(epochs.look()) >= until)):
                process.send_signal(signal.SIGTERM)  # the checkpoint keeps steps past the epoch
                is_asked = True
            time.sleep(POLL_SECONDS)
        trial.seconds += time.monotonic() - start
        trial.epochs, trial.score = _progress(trial.folder)
        if process.returncode == DIVERGED_EXIT_CODE:
            trial.state = "diverged"
        elif process.returncode == 0:
            trial.state = "finished"
        elif is_asked or self._is_stopped:
            trial.state = "paused"
        else:
            lines = output.read_text(errors="replace").splitlines()
            errors = [line for line in lines if "error" in line.lower()] or lines or ["no output"]
            trial.state = f"{FAILED} {process.returncode}: {one_line(errors[-1])[:200]}"
        return process.returncode


def prepare(sweep: SweepSettings) -> RunningSweep:
    """Check the command lines of a sweep and all its trials, and load the state of an earlier start.

    Raises:
        UserError: for anything that the trainer would reject, or if another sweep has the same name.
    """
    if not _NAME.fullmatch(sweep.name):
        raise UserError(f"sweep {shown(sweep.name)}: expected a name of letters, digits, '-', '_' and '.'.")
    arguments = read_arguments(SCRIPT, sweep.words, {})
    config = check_training(arguments.training)
    if config.run_name or config.resume != "never":
        raise UserError("--run-name and --resume: a sweep sets them itself for each of its runs: leave them out.")
    logs = run_folder(config, "x").log_dir
    folder = logs / "sweeps" / sweep.name
    combinations = _combinations(sweep)
    trials = []
    for number, values in enumerate(combinations, 1):
        name = f"{sweep.name}-{number:0{len(str(len(combinations)))}}"
        trial = SweepTrial(number, values, name, logs / "runs" / name)
        own = check_training(read_arguments(SCRIPT, with_flags(SCRIPT, sweep.words, trial.flags), {}).training)
        if own.best_by != config.best_by:
            raise UserError(
                f"--vary: {' '.join(trial.flags)} is compared by {own.best_by}, other trials by {config.best_by}: "
                "use the same --best-by for all."
            )
        if sweep.halving and own.epochs != config.epochs:
            raise UserError("--halving needs the same --epochs in all trials: use either --halving or --vary epochs.")
        trials.append(trial)
    try:
        if not (folder / LINE).exists():
            if taken := next((trial for trial in trials if (trial.folder / METRICS).exists()), None):
                raise UserError(f"sweep {sweep.name}: a run {shown(taken.run_name)} already exists: use another name.")
        elif json.loads((folder / LINE).read_text()) != _line_of(sweep):
            raise UserError(
                f"sweep {sweep.name} was started with other arguments ({shown_path(folder / LINE)}): use those, "
                "or another name."
            )
        for trial in trials:
            if (state := _state_file(folder, trial)).exists():
                saved = json.loads(state.read_text())
                if (saved["values"], saved["run_name"]) != (trial.values, trial.run_name):
                    raise ValueError(f"{state.name} is of another combination")
                vars(trial).update({name: saved[name] for name in KEPT})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"sweep {sweep.name}: {folder} cannot be used ({one_line(error)}).") from None
    return RunningSweep(sweep, trials, folder, config.epochs, config.best_by, arguments.ranks_per_node)


def _line_of(sweep: SweepSettings) -> dict[str, Any]:
    """Return what identifies the sweep, as JSON."""
    return json.loads(json.dumps({name: getattr(sweep, name) for name in OF_LINE}))


def _combinations(sweep: SweepSettings) -> list[dict[str, str]]:
    """Return the values of each trial by flag; drawn ones are in the order of their first draw."""
    varied: dict[str, Any] = {}
    for text in sweep.vary or ():
        found = _VARIED.fullmatch(text)
        if not found or found[1] in varied:
            raise UserError(f"--vary {shown(text)}: expected FLAG=VALUE,VALUE or FLAG=LOW..HIGH[:log], each flag once.")
        varied[found[1]] = _values(found[1], found[2])
    if not varied:
        raise UserError("name the flags to vary, such as --vary learning-rate=0.001,0.003,0.01.")
    if not sweep.trials:
        if ranges := [flag for flag, values in varied.items() if callable(values)]:
            raise UserError(f"--vary {ranges[0]}: a range needs --trials, the number of combinations to draw.")
        grid = list(itertools.islice(itertools.product(*varied.values()), MOST_TRIALS + 1))
        if len(grid) > MOST_TRIALS:
            raise UserError(f"more than {MOST_TRIALS} combinations: add --trials, the number to draw.")
        return [dict(zip(varied, values, strict=True)) for values in grid]
    draws, drawn = random.Random(sweep.seed), dict[tuple[str, ...], dict[str, str]]()
    for _ in range(DRAWS * sweep.trials):
        one = {flag: values(draws) if callable(values) else draws.choice(values) for flag, values in varied.items()}
        drawn.setdefault(tuple(one.values()), one)
    return [*drawn.values()][: sweep.trials]


def _values(flag: str, text: str) -> list[str] | Callable[[random.Random], str]:
    """Return the values of a list, or a function that draws from a range."""
    if not (found := _RANGE.fullmatch(text)):
        return text.split("|" if "|" in text else ",")
    before, *ends, is_log = found.groups(default="")  # keep what precedes the range, as in loss=bce:0.1..0.5
    low, high = map(float, ends)
    if not low < high or (is_log and low <= 0) or math.isinf(high - low):
        raise UserError(f"--vary {flag}={shown(text)}: expected LOW..HIGH with LOW < HIGH, and LOW above 0 for :log.")
    is_whole = all(end.lstrip("-").isdecimal() for end in ends)

    def draw(draws: random.Random) -> str:
        if is_whole and not is_log:
            return f"{before}{draws.randint(int(low), int(high))}"
        value = math.exp(draws.uniform(math.log(low), math.log(high))) if is_log else draws.uniform(low, high)
        return before + (str(round(value)) if is_whole else f"{value:.{PLACES}g}")

    return draw


def _places(ranks: int, sweep: SweepSettings) -> list[Place]:
    """Return places of `ranks` ranks: `jobs` here, or as many as the hostfile's slots allow, or raise a UserError."""
    if sweep.hostfile:
        return [
            _on_gpus(range(job * ranks, (job + 1) * ranks), host)
            for host, count in read_hostfile(Path(sweep.hostfile), nodes=0, slots=ranks).items()
            for job in range(count // ranks)
        ]
    gpus, jobs = usable_gpus(), sweep.jobs
    if gpus and ranks * jobs > len(gpus):
        raise UserError(
            f"--jobs {jobs}: {jobs} trials of {plural(ranks, 'GPU')} need {ranks * jobs}, but {len(gpus)} are present: "
            f"use at most {len(gpus) // ranks}."
        )
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, usable_cores() // (ranks * jobs)))
    return [
        _on_gpus(gpus[job * ranks : (job + 1) * ranks]) if gpus else Place({"OMP_NUM_THREADS": threads})
        for job in range(jobs)
    ]


def _on_gpus(gpus: Sequence[int | str], host: str = "") -> Place:
    return Place({"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}, host)


class EpochLines:
    """Collects the epochs that a run has trained and evaluated, reading each line of metrics.jsonl only once."""

    def __init__(self, run: Path) -> None:
        self._file, self._read_bytes, self._lines = run / METRICS, 0, list[dict[str, Any]]()

    def look(self) -> list[dict[str, Any]]:
        """Return the lines of all epochs so far."""
        with contextlib.suppress(OSError, ValueError), self._file.open("rb") as lines:  # missing or damaged
            lines.seek(self._read_bytes)
            for line in itertools.takewhile(lambda line: line.endswith(b"\n"), lines):  # the rest is being written
                self._read_bytes += len(line)
                if b'"epoch"' in line and (point := json.loads(line)).get("kind") == "epoch":
                    self._lines.append(point)
        return self._lines


def _progress(folder: Path, until: float = math.inf) -> tuple[int, float | None]:
    """Return the number of epochs, up to `until`, that a run has trained and evaluated, and their best score."""
    epochs = [line for line in EpochLines(folder).look() if line["epoch"] <= until]
    best = best_epoch(epochs)
    return max((line["epoch"] for line in epochs), default=0), score_in(best)[1] if best else None


def _state_file(folder: Path, trial: SweepTrial) -> Path:
    return folder / f"{trial.number:03}.json"


class Combination(NamedTuple):
    """All trials that differ only in `REPEATS`."""

    values: dict[str, str]  # by flag, without `REPEATS`
    compared: list[SweepTrial]  # trials with a score that reached the most rungs, best first
    rank: tuple[int, float]  # the number of rungs reached, and the mean score, negated if lower is better

    def score(self, best_by: str) -> str:
        """Return the scores' mean ± standard deviation (n - 1), with shares in percent; no ± for a single score."""
        scores = [one.score for one in self.compared if one.score is not None]
        if not scores:
            return "-"
        unit = 1 if best_by == "loss" else 100
        mean = f"{unit * statistics.mean(scores):.2f}"
        return mean if len(scores) < 2 else f"{mean} ± {unit * statistics.stdev(scores):.2f}"


def rows_of(running: RunningSweep) -> list[Combination]:
    """Return a row for each combination of values except `REPEATS`, best first by rungs reached and then by mean."""
    groups: dict[tuple[tuple[str, str], ...], list[SweepTrial]] = {}
    for one in running.trials:
        key = tuple((flag, value) for flag, value in one.values.items() if flag not in REPEATS)
        groups.setdefault(key, []).append(one)
    rungs, rows = running.rungs_reached(), []
    for key, group in groups.items():
        rung = max((rungs[one.number] for one in group if one.score is not None), default=-1)
        there = [one for one in group if rungs[one.number] == rung]
        merits = {one.number: merit(running.best_by, one.score) for one in there}
        compared = sorted((one for one in there if one.score is not None), key=lambda one: -merits[one.number])
        # A trial without a usable score makes the mean infinitely bad.
        rows.append(Combination(dict(key), compared, (rung, statistics.fmean(merits.values()) if there else -math.inf)))
    return sorted(rows, key=lambda row: row.rank, reverse=True)


def best_trial(rows: Sequence[Combination]) -> SweepTrial | None:
    """Return the best trial of the best combination; None if no trial has a score."""
    return next(iter(rows[0].compared), None)


def write_table(running: RunningSweep) -> Path:
    """Write sweep.csv, with one line per trial, into the sweep's folder, and return its path."""
    file = running.folder / "sweep.csv"
    header = ["run", *running.trials[0].values, "epochs", running.best_by, "state", "seconds"]
    rows = (
        [one.run_name, *one.values.values(), one.epochs, one.score, one.state, round(one.seconds, 1)]
        for one in running.trials
    )
    with replacing(file) as temporary:
        write_csv(temporary, header, rows)
    return file


def write_page(running: RunningSweep, rows: Sequence[Combination]) -> Path | None:
    """Write a report that shows the best trials side by side, and return its path; None if there is no report."""
    from zerovision.delivery.report.page import MOST_RUNS, write_report  # imported late: takes a second

    folders = [one.folder for row in rows for one in row.compared][:MOST_RUNS]
    page = running.folder / REPORT
    try:
        if folders:
            write_report(folders, page)
    except UserError as error:  # the sweep itself succeeded
        print(f"note: no report: {error}")
        return None
    return page if folders else None


def run(given: SweepSettings) -> int:
    """Train the trials, print each trial when it reaches a rung, and print and write the table."""
    running, received = prepare(given), []
    if (count := len(running.trials)) < given.trials:
        print(f"note: --trials {given.trials} drew only {plural(count, 'different combination')}")

    def stop(number: int, _frame: object) -> None:
        received.append(number)
        running.stop()

    with handling_stop_signals(stop):
        for trial in running.run():
            score = (
                "no epoch"
                if trial.score is None
                else f"{show_score(running.best_by, trial.score)} after {plural(trial.epochs, 'epoch')}"
            )
            print(f"{trial.run_name}  {' '.join(trial.flags)}  {score}, {trial.state}", flush=True)
    rows = rows_of(running)
    best = best_trial(rows)
    command = shlex.join(["bash", f"scripts/{SCRIPT}", *with_flags(SCRIPT, given.words, best.flags)]) if best else ""
    for row in rows:
        print(
            f"{row.score(running.best_by):>14}  {' '.join(f'--{flag}={value}' for flag, value in row.values.items())}"
        )
    print(f"best         {as_typed(command)}\ntable        {shown_path(write_table(running))}")
    if page := write_page(running, rows):
        print(f"report       {shown_path(page)}")
    if received:
        return 128 + received[0]
    return int(any(trial.state.startswith(FAILED) for trial in running.trials))
