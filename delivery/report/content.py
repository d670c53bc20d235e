"""What is shown of each run, laid out from its files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from delivery.report.curves import Chart
from delivery.report.incidents import Incidents, find_incidents
from delivery.report.per_class import ClassTable, Confusion, calibration_chart, class_table, confusion
from delivery.report.run_facts import (
    Figure,
    Setting,
    command_to_repeat,
    describe,
    key_figures,
    settings,
    surroundings,
)
from delivery.report.run_files import RunFiles, read_run
from delivery.report.samples import MOST_PICTURES, Sample, wrong_samples
from delivery.report.status import Status, find_status
from delivery.report.time_and_memory import Spending, spend_memory, spend_time
from delivery.report.training_curves import STYLES
from training.errors import UserError
from training.observe.run_folder import ENVIRONMENT, EVALUATION, METRICS, SCORES

MOST_RUNS = STYLES  # so that no two lines look the same
MOST_RUNS_WITH_MATRIX = 4
PICTURES_OF_ALL_RUNS = 48


@dataclass(frozen=True)
class Evaluation:
    """What is shown of a run's evaluation."""

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


def _page_run(position: int, name: str, run: RunFiles, count: int) -> PageRun:
    key = f"run{position}"
    with _damage_named(run.folder / EVALUATION / SCORES):
        evaluation = _evaluation(key, run, count) if run.scores is not None else None
        figures = key_figures(run)
    with _damage_named(run.folder / METRICS):
        status, incidents = find_status(run), find_incidents(run.history)
        time_spent, memory = spend_time(run.history), spend_memory(run.history)
    with _damage_named(run.folder / ENVIRONMENT):
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
        classes=class_table(scores),
        calibration=calibration_chart(f"calibration-{key}", scores),
        confusion=confusion(scores, with_matrix=count <= MOST_RUNS_WITH_MATRIX),
        wrong=wrong_samples(run, min(MOST_PICTURES, PICTURES_OF_ALL_RUNS // count)),
        wrong_count=sum(samples for true, said, samples in scores["confusion"] if true != said),
    )
