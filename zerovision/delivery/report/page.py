"""Writes the report page, once or whenever a run logs, and tests whether runs differ significantly."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from zerovision.delivery import pages
from zerovision.delivery.pages import clip, number, plural
from zerovision.delivery.report import run_facts
from zerovision.delivery.report.charts import STYLES, overlaid_charts, rate_search_chart, single_run_charts
from zerovision.delivery.report.per_class import MOST_IMAGES, calibration_chart, class_table, confusion, sample_images
from zerovision.delivery.report.run_facts import find_incidents
from zerovision.delivery.report.run_files import names_of, read_run
from zerovision.delivery.settings import ReportSettings
from zerovision.delivery.trained_model import find_run, read_json
from zerovision.training.base.errors import UserError, printable
from zerovision.training.base.files import errors_of_writing, replacing
from zerovision.training.base.run_folder import (
    ENVIRONMENT,
    EVALUATION,
    LEARNING_RATE,
    METRICS,
    REPORT,
    SCORES,
    TYPICAL,
    WORST,
)

RELOAD_SECONDS = 4
MOST_RUNS = STYLES  # so that no two lines look the same
MOST_RUNS_WITH_MATRIX = 4
IMAGES_OF_ALL_RUNS = 32  # sample images of each kind
POLL_SECONDS = 2.0
LARGEST_SHARE_OF_TIME = 0.1  # of the time may be spent on writing, because training needs the processor
# A run writes its evaluation after its last log line, so the page is rewritten until the files stop changing.
POLLS_AFTER_THE_END = 3
POLLS_WITHOUT_CHANGE = 30  # then the page is rewritten, because the run may have crashed
SIGNIFICANT = 0.05  # p-value below which two runs are reported to differ


def run(settings: ReportSettings) -> int:
    """Write the page, keep it up to date with --watch, and return the exit code."""
    folders = [*dict.fromkeys(map(find_run, settings.runs))]
    default = folders[0] / REPORT if len(folders) == 1 else Path(REPORT)
    output = Path(os.path.expanduser(settings.output)) if settings.output else default
    if settings.watch:
        watch(folders, output)
    else:
        write_report(folders, output)
    for sentence in compare(folders):
        print(printable(sentence))
    print(f"report       {output}")
    return 0


def write_report(folders: Sequence[Path], output: Path, *, is_watched: bool = False) -> bool:
    """Write the page for one or more runs.

    Args:
        folders: the runs' folders.
        output: the HTML file, replaced atomically.
        is_watched: whether the page will be rewritten while a run trains; if so, it reloads itself.

    Returns:
        Whether a run is still training.

    Raises:
        UserError: if a run's files are damaged, there are too many runs, or the page cannot be written.
    """
    if len(folders) > MOST_RUNS:
        raise UserError(f"{len(folders)} runs are too many: a page shows at most {MOST_RUNS}.")
    runs = [
        _page_run(place, name, folder, len(folders))
        for place, (name, folder) in enumerate(zip(names_of(folders), folders, strict=True))
    ]
    is_running = any(run["status"].is_running for run in runs)
    page = _render(runs, compare(folders), is_live=is_watched and is_running).encode("utf-8", errors="replace")
    with errors_of_writing(output, "Use another --output file."):
        if output.is_dir():
            raise UserError(f"'{output}' is a folder: use a file, such as {output / 'report.html'}.")
        with replacing(output, follows=True) as new:
            new.write_bytes(page)
    return is_running


def watch(folders: Sequence[Path], output: Path) -> None:
    """Write the page now and whenever the runs' files change, until all runs end or Ctrl-C; see `write_report`."""
    seen, unchanged, start = _signature(folders), 0, time.perf_counter()
    is_running = write_report(folders, output, is_watched=True)
    if not is_running:
        return
    writing_seconds = time.perf_counter() - start
    print(f"watching (Ctrl-C to stop): open {output}")
    try:
        while is_running or unchanged < POLLS_AFTER_THE_END:
            time.sleep(max(POLL_SECONDS, writing_seconds / LARGEST_SHARE_OF_TIME))
            now = _signature(folders)
            seen, unchanged = now, unchanged + 1 if now == seen else 0
            if unchanged % POLLS_WITHOUT_CHANGE == 0:
                start = time.perf_counter()
                is_running = write_report(folders, output, is_watched=True)
                writing_seconds = time.perf_counter() - start
    except KeyboardInterrupt:
        pass
    write_report(folders, output)  # without automatic reloading


def _signature(folders: Sequence[Path]) -> list[tuple[int, int]]:
    """Return the size and modification time of each file that the runs write; zeros for missing files."""
    found = []
    for folder in folders:
        for path in (folder / METRICS, folder / EVALUATION / SCORES, folder / EVALUATION / f"{WORST}.csv"):
            try:
                status = path.stat()
                found.append((status.st_size, status.st_mtime_ns))
            except OSError:
                found.append((0, 0))
    return found


def _page_run(position: int, name: str, folder: Path, runs: int) -> dict[str, Any]:
    """Return the values that the template shows for a run."""
    run, key = read_run(folder), f"run{position}"
    history = run.history
    shown = {"key": key, "name": name, "style": position % STYLES + 1, "folder": str(folder), "notes": run.notes}
    shown |= {"history": history, "settings": run_facts.settings(run), "evaluation": None}
    with _damage_named(folder / LEARNING_RATE):
        shown["rate_search"] = rate_search_chart(run.rate_search)
    most = min(MOST_IMAGES, IMAGES_OF_ALL_RUNS // runs)
    with _damage_named(folder / EVALUATION / SCORES):
        shown["figures"] = [*run_facts.key_figures(run)]
        if run.scores is not None:
            shown["evaluation"] = {
                "classes": class_table(run.scores),
                "calibration": calibration_chart(f"calibration-{key}", run.scores),
                "confusion": None
                if "task" in run.scores  # several labels per image: no confusion matrix
                else confusion(run.scores, with_matrix=runs <= MOST_RUNS_WITH_MATRIX),
                "images": sample_images(folder, run.scores, WORST, most),
                "typical": sample_images(folder, run.scores, TYPICAL, most),
            }
    with _damage_named(folder / METRICS):
        shown |= {"status": run_facts.find_status(run), "incidents": find_incidents(history)}
        shown["memory"] = run_facts.memory_breakdown(history.memory_bytes_per_rank)
        shown["time"] = run_facts.time_breakdown(history)
    with _damage_named(folder / ENVIRONMENT):
        shown |= {"description": run_facts.describe(run), "command": run_facts.command_of(run)}
        shown["environment"] = run_facts.environment_facts(run)
    return shown


@contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    """Raise a UserError that names the file if a value in it is missing or of the wrong type."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, OSError) as error:
        raise UserError(f"'{path}' is damaged ({error!r}). Restore it, or remove it.") from None


def _render(runs: Sequence[dict[str, Any]], comparisons: Sequence[str], *, is_live: bool) -> str:
    """Return the page as HTML; a live page reloads itself every few seconds."""
    histories, names = [run["history"] for run in runs], [run["name"] for run in runs]
    is_single = len(runs) == 1
    charts = single_run_charts(histories[0]) if is_single else overlaid_charts(histories, names)
    charts += [runs[0]["rate_search"]] if is_single and runs[0]["rate_search"] else []
    calibrations = [run["evaluation"]["calibration"] for run in runs if run["evaluation"]]
    reload_seconds = RELOAD_SECONDS if is_live else 0
    return pages.render(
        pages.TEMPLATE / "report.html",
        pages.TEMPLATE / "report.js",
        runs=runs,
        is_single=is_single,
        title=names[0] if is_single else f"{len(runs)} runs compared",
        charts=charts,
        comparisons=comparisons,
        figures=run_facts.side_by_side([run["figures"] for run in runs]),
        times=run_facts.side_by_side([run["time"].rows if run["time"] else [] for run in runs]),
        setting_differences=run_facts.differences([run["settings"] for run in runs]),
        environment_differences=run_facts.differences([run["environment"] for run in runs]),
        data={
            "charts": {chart["key"]: chart["data"] for chart in [*charts, *calibrations] if chart is not None},
            "reloadSeconds": reload_seconds,
        },
        reload_seconds=reload_seconds,
        written=pages.date_and_time(time.time()),
    )


class Judged(NamedTuple):
    """A hash of the images of an evaluation, and whether the model classifies each image correctly, bool [N]."""

    images: str
    right: np.ndarray


def compare(folders: Sequence[Path]) -> list[str]:
    """Return a sentence for each later run that compares it with the first, or raise a UserError for damaged scores."""
    if len(folders) < 2:
        return []
    names, judged = [clip(name) for name in names_of(folders)], [_read_judged(folder) for folder in folders]
    return [_compare(names[0], judged[0], *other) for other in zip(names[1:], judged[1:], strict=True)]


def mcnemar(right: np.ndarray, other: np.ndarray) -> tuple[int, int, float]:
    """Return how many images only the first model gets right, how many only the second gets right, and the p-value.

    `right` and `other` are bool [N]. In the exact form of McNemar's test (1947, https://doi.org/10.1007/BF02295996),
    models that do not differ are equally likely to be right when only one of them is. Dietterich 1998
    (https://doi.org/10.1162/089976698300017197) recommends the test for models that were trained only once.
    """
    from scipy.stats import binomtest  # takes seconds, and a page of one run does not need it

    alone, other_alone = int((right & ~other).sum()), int((other & ~right).sum())
    either = alone + other_alone
    return alone, other_alone, float(binomtest(alone, either).pvalue) if either else 1.0


def _compare(name: str, judged: Judged | None, other_name: str, other: Judged | None) -> str:
    pair = f"{name} and {other_name}"
    if judged is None or other is None:
        lacking = name if judged is None else other_name
        return f"{pair} are not compared: scripts/evaluate.py {lacking} writes which images it classifies correctly."
    if (judged.images, len(judged.right)) != (other.images, len(other.right)):
        return f"{pair} are not compared: they were evaluated on different images."
    alone, other_alone, chance = mcnemar(judged.right, other.right)
    verdict = "differ" if chance < SIGNIFICANT else "do not differ significantly"
    return (
        f"{pair} {verdict}: of {plural(len(judged.right), 'image')}, {name} alone is right on {alone} and {other_name} "
        f"alone on {other_alone} (McNemar's exact test, p = {number(chance, 2)})."
    )


def _read_judged(folder: Path) -> Judged | None:
    path = folder / EVALUATION / SCORES
    found = read_json(path).get("judged") if path.is_file() else None
    with _damage_named(path):
        return None if found is None else Judged(str(found["images"]), np.array([*found["right"]]) == "1")
