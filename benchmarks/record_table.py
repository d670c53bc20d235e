"""The table of all records, made from records/*/*/record.json, between two comments of docs/dev/records.md."""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any

from scipy import stats

BEGIN, END = "<!-- records: made by benchmarks/record.py --table -->", "<!-- end of records -->"
COLUMNS = (
    "record", "top-1, mean ± standard deviation", "seconds", "timm's train.py: top-1", "seconds", "ours / timm",
    "epochs and processes, ours: timm's", "against the record before",
)  # fmt: skip


def write_table(root: Path) -> None:
    """Replace the table of all records in docs/dev/records.md."""
    replace_between(root / "docs" / "dev" / "records.md", BEGIN, END, table(root / "records"))


def replace_between(page: Path, begin: str, end: str, text: str) -> None:
    """Replace what stands between two comments of a page."""
    old = page.read_text(encoding="utf-8")
    before, after = old[: old.index(begin) + len(begin)], old[old.index(end) :]
    page.write_text(f"{before}\n{text}\n{after}", encoding="utf-8")


def _read(records: Path) -> list[tuple[Path, dict[str, Any]]]:
    """Return the folders of all records and what each contains, by task and the time at which they were begun."""
    found = [(path.parent, json.loads(path.read_text(encoding="utf-8"))) for path in records.glob("*/*/record.json")]
    # The first ones tell the day alone.
    return sorted(found, key=lambda one: (one[0].parent, one[1].get("begun", one[0].name[: len("2026-11-22")]), one[0]))


def table(records: Path) -> str:
    """Return all records as a Markdown table, by task and time."""
    rows, before = [COLUMNS, ("---",) * len(COLUMNS)], {}
    for folder, record in _read(records):
        name = folder.relative_to(records)
        rows.append((f"`records/{name}`", *_cells(record, before.get(record["task"]))))
        before[record["task"]] = record
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _cells(record: dict[str, Any], before: dict[str, Any] | None) -> tuple[str, ...]:
    ours, theirs = record["ours"], record.get("timm")
    cells = (top1_cell(ours), f"{ours['summary']['seconds_median']:.1f}")
    if theirs:
        cells += (top1_cell(theirs), f"{theirs['summary']['seconds_median']:.1f}", f"{time_ratio(record):.2f}")
        cells += (f"{_work(ours['command'])}: {_work(theirs['command'])}",)
    else:
        cells += ("", "", "", "")
    return (*cells, compared(record, before) if before else "the first")


def _work(command: str) -> str:
    """Return the epochs and processes of a command, ours or timm's: the first reason why one takes longer."""
    words = command.split()
    ranks, epochs = (words[4], words[6]) if words[0] == "bash" else ("1", words[words.index("--epochs") + 1])
    return f"{epochs} on {ranks}"


def top1_cell(side: dict[str, Any]) -> str:
    """Return mean and standard deviation of top-1 over the seeds of what has `runs` and their `summary`."""
    runs = len(side["runs"])
    views = f"; several views {_percent(side, 'views_top1')}" if "views_top1_mean" in side["summary"] else ""
    return f"{_percent(side, 'top1')} ({runs} seed{'s' if runs > 1 else ''}){views}"


def _percent(side: dict[str, Any], key: str) -> str:
    found = side["summary"]
    spread = f" ± {100 * found[f'{key}_std']:.2f}" if len(side["runs"]) > 1 else ""
    return f"{100 * found[f'{key}_mean']:.2f}{spread} %"


def time_ratio(record: dict[str, Any]) -> float:
    """Return the median over the rounds of our seconds over timm's in the same round."""
    theirs = {run["seed"]: run["seconds"] for run in record["timm"]["runs"]}
    return statistics.median(r["seconds"] / theirs[r["seed"]] for r in record["ours"]["runs"] if r["seed"] in theirs)


def compared(record: dict[str, Any], before: dict[str, Any]) -> str:
    """Compare accuracy with the record before by Welch's t-test, two-sided; time too, if the machine is the same.

    Seeds that end at the same accuracies as before are the same trainings again, and no second sample to test; one seed
    alone is none either.
    """
    new, old = ({run["seed"]: run["top1"] for run in side["ours"]["runs"]} for side in (record, before))
    common = new.keys() & old.keys()
    if len(common) > 1 and all(new[seed] == old[seed] for seed in common):
        accuracy = "the same accuracies, seed by seed"
    else:
        change = 100 * (statistics.mean(new.values()) - statistics.mean(old.values()))
        accuracy = f"{change:+.2f} points"
        if min(len(new), len(old)) > 1:
            p = float(stats.ttest_ind([*new.values()], [*old.values()], equal_var=False).pvalue)
            accuracy += f" (p = {p:.2g})"
    time = "on another machine"
    if record["machine"] == before["machine"]:
        ratio = record["ours"]["summary"]["seconds_median"] / before["ours"]["summary"]["seconds_median"]
        time = f"{ratio:.2f} of its seconds"
    return f"{accuracy}, {time}"
