"""Puts the page together, and writes it so that a reader never sees half of it."""

from __future__ import annotations

import base64
import hashlib
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from delivery.report import wording
from delivery.report.curves import Chart
from delivery.report.facts import (
    Figure,
    Setting,
    command_to_repeat,
    describe,
    differences,
    key_figures,
    settings,
    surroundings,
)
from delivery.report.incidents import Incidents, find_incidents
from delivery.report.judgement import AVERAGES, ClassTable, Confusion, calibration_chart, class_table, confusion
from delivery.report.run_files import METRICS, RunFiles, read_run
from delivery.report.samples import MOST_PICTURES, Sample, wrong_samples
from delivery.report.spending import Part, Spending, spend_memory, spend_time
from delivery.report.status import Status, find_status
from delivery.report.training_curves import STYLES, overlaid_charts, single_run_charts
from training.errors import UserError

TEMPLATE = Path(__file__).resolve().parent / "template"
MOST_RUNS = 12
MOST_RUNS_WITH_MATRIX = 4
PICTURES_OF_ALL_RUNS = 48
RELOAD_SECONDS = 4


@dataclass(frozen=True)
class Evaluation:
    """What is shown of a run's evaluation."""

    scores: dict[str, Any]
    classes: ClassTable
    calibration: Chart | None
    confusion: Confusion
    wrong: list[Sample]
    wrong_count: int


@dataclass(frozen=True)
class PageRun:
    """What is shown of a run; None for what it does not have."""

    key: str
    name: str
    style: int
    folder: str
    description: str
    command: str
    status: Status
    notes: list[str]
    figures: list[Figure]
    time: Spending | None
    memory: Spending | None
    incidents: Incidents
    evaluation: Evaluation | None
    settings: list[Setting]
    surroundings: list[Setting]
    files: RunFiles


def write_report(folders: Sequence[Path], output: Path, *, is_watched: bool = False) -> bool:
    """Write the page about one run or several.

    Args:
        folders: of the runs.
        output: the HTML file; it is replaced in one step.
        is_watched: whether it will be written again while a run is going on: then the page looks for that.

    Returns:
        Whether a run is still going on.

    Raises:
        UserError: where a run's files are damaged, or the page cannot be written.
    """
    runs = read_page_runs(folders)
    is_going_on = any(run.status.is_going_on for run in runs)
    page = render(runs, is_live=is_watched and is_going_on)
    _replace(output, page.encode("utf-8", errors="replace"))
    return is_going_on


def read_page_runs(folders: Sequence[Path]) -> list[PageRun]:
    """Read runs, and lay out what is shown of each.

    Raises:
        UserError: where there are too many, or the files of one are damaged.
    """
    if len(folders) > MOST_RUNS:
        raise UserError(f"{len(folders)} runs: a page holds at most {MOST_RUNS}. Give fewer.")
    names = [folder.name for folder in folders]
    names = [str(folder) if names.count(name) > 1 else name for name, folder in zip(names, folders, strict=True)]
    return [
        _page_run(position, name, read_run(folder), len(folders))
        for position, (name, folder) in enumerate(zip(names, folders, strict=True))
    ]


def render(runs: Sequence[PageRun], *, is_live: bool) -> str:
    """Return the page as HTML.

    Args:
        runs: what is shown of each.
        is_live: whether the page loads itself again every few seconds.
    """
    histories, names = [run.files.history for run in runs], [run.name for run in runs]
    is_single = len(runs) == 1
    charts = single_run_charts(histories[0]) if is_single else overlaid_charts(histories, names)
    calibrations = [run.evaluation.calibration for run in runs if run.evaluation]
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(TEMPLATE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        name: getattr(wording, name) for name in ("clip", "count", "number", "percent", "plural", "size")
    }
    script = (TEMPLATE / "page.js").read_text(encoding="utf-8")
    return environment.get_template("page.html").render(
        runs=runs,
        is_single=is_single,
        title=names[0] if is_single else f"{len(runs)} runs compared",
        charts=charts,
        figures=_side_by_side(runs),
        times=_times_side_by_side(runs),
        setting_differences=differences([run.settings for run in runs]),
        surrounding_differences=differences([run.surroundings for run in runs]),
        data={
            "charts": {chart.key: chart.data for chart in [*charts, *calibrations] if chart is not None},
            "reloadSeconds": RELOAD_SECONDS if is_live else 0,
        },
        reload_seconds=RELOAD_SECONDS if is_live else 0,
        style=Markup((TEMPLATE / "style.css").read_text(encoding="utf-8")),
        script=Markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        written=wording.moment(time.time()),
        averages=AVERAGES,
    )


def _page_run(position: int, name: str, run: RunFiles, count: int) -> PageRun:
    key = f"run{position}"
    with _damage_named(run.folder / "evaluation" / "scores.json"):
        evaluation = _evaluation(key, run, count) if run.scores is not None else None
        figures = key_figures(run)
    with _damage_named(run.folder / METRICS):
        status, incidents = find_status(run), find_incidents(run.history)
        time_spent, memory = spend_time(run.history), spend_memory(run.history)
    with _damage_named(run.folder / "environment.json"):
        description, command, made_with = describe(run), command_to_repeat(run), surroundings(run)
    return PageRun(
        key=key,
        name=name,
        style=position % STYLES + 1,
        folder=str(run.folder),
        description=description,
        command=command,
        status=status,
        notes=run.notes,
        figures=figures,
        time=time_spent,
        memory=memory,
        incidents=incidents,
        evaluation=evaluation,
        settings=settings(run),
        surroundings=made_with,
        files=run,
    )


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    """Name the file in which something is missing, or is not what it should be."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise UserError(f"'{path}' is damaged ({error!r}). Restore it, or remove it.") from None


def _evaluation(key: str, run: RunFiles, count: int) -> Evaluation:
    scores = run.scores or {}
    return Evaluation(
        scores=scores,
        classes=class_table(scores),
        calibration=calibration_chart(f"calibration-{key}", scores),
        confusion=confusion(scores, with_matrix=count <= MOST_RUNS_WITH_MATRIX),
        wrong=wrong_samples(run, min(MOST_PICTURES, PICTURES_OF_ALL_RUNS // count)),
        wrong_count=sum(samples for true, said, samples in scores["confusion"] if true != said),
    )


def _side_by_side(runs: Sequence[PageRun]) -> list[tuple[str, list[Figure | None]]]:
    """Return each key figure by name with that of every run, None where a run lacks it."""
    by_name = [{figure.name: figure for figure in run.figures} for run in runs]
    names = dict.fromkeys(name for figures in by_name for name in figures)
    return [(name, [figures.get(name) for figures in by_name]) for name in names]


def _times_side_by_side(runs: Sequence[PageRun]) -> list[tuple[str, list[Part | None]]]:
    """Return each part of the time by name with that of every run, None where a run lacks it."""
    by_name = [{part.name: part for part in run.time.parts} if run.time else {} for run in runs]
    names = dict.fromkeys(name for parts in by_name for name in parts)
    return [(name, [parts.get(name) for parts in by_name]) for name in names]


def _replace(output: Path, content: bytes) -> None:
    """Write a file under another name, and rename it."""
    new = output.with_name(f".{output.name[:100]}.{os.getpid()}.new")
    try:
        if output.is_dir():
            raise UserError(f"'{output}' is a folder: give a file, such as {output / 'report.html'}.")
        try:
            new.write_bytes(content)
            os.replace(new, output)
        finally:
            new.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"'{output}' cannot be written: {error.strerror}. Give --output another file.") from None
