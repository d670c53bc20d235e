"""Puts the page together, and writes it so that a reader never sees half of it."""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Sequence
from pathlib import Path

import jinja2
from markupsafe import Markup

from delivery.report import formatting
from delivery.report.content import PageRun, read_page_runs
from delivery.report.side_by_side import differences, side_by_side
from delivery.report.training_curves import overlaid_charts, single_run_charts
from training.checkpoint.atomic_write import replacing
from training.errors import UserError

TEMPLATE = Path(__file__).resolve().parent / "template"
RELOAD_SECONDS = 4


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
    environment.filters |= {"clip": formatting.clip, "count": formatting.count, "percent": formatting.percent}
    script = (TEMPLATE / "page.js").read_text(encoding="utf-8")
    return environment.get_template("page.html").render(
        runs=runs,
        is_single=is_single,
        title=names[0] if is_single else f"{len(runs)} runs compared",
        charts=charts,
        figures=side_by_side([run.figures for run in runs]),
        times=side_by_side([run.time.parts if run.time else [] for run in runs]),
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
        written=formatting.moment(time.time()),
    )


def _replace(output: Path, content: bytes) -> None:
    """Write a file under another name, and rename it."""
    try:
        if output.is_dir():
            raise UserError(f"'{output}' is a folder: give a file, such as {output / 'report.html'}.")
        with replacing(output) as new:
            new.write_bytes(content)
    except OSError as error:
        raise UserError(f"'{output}' cannot be written: {error.strerror}. Give --output another file.") from None
