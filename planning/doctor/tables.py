"""The doctor's findings on a terminal."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from planning.doctor.table import Row
from training.errors import printable

if TYPE_CHECKING:
    from planning.data_check import DataReport

CLASSES_SHOWN = 20
WIDTH_IN_FILES = 180  # characters
COLOURS = {"ok": "green", "warning": "yellow", "wrong": "bold red"}


def print_rows(rows: Sequence[Row], seconds: float) -> None:
    """Print one line a row, and how many there are of each verdict."""
    has_hosts = any(row.host for row in rows)
    table = Table("check", "", *(["host"] if has_hosts else []), "found", "cure", box=None, pad_edge=False)
    for row in rows:
        verdict = f"[{COLOURS[row.verdict]}]{row.verdict}[/]"
        cells = [*([row.host] if has_hosts else []), row.found, row.cure]
        table.add_row(_cell(row.check), verdict, *map(_cell, cells))
    # In a log file, where nobody's terminal has a width, rows stay whole.
    Console(highlight=False, width=shutil.get_terminal_size((WIDTH_IN_FILES, 0)).columns).print(table)
    counts = {verdict: sum(row.verdict == verdict for row in rows) for verdict in COLOURS}
    print(f"{counts['wrong']} wrong, {counts['warning']} warning(s), {counts['ok']} ok; {seconds:.0f} s")


def print_data_report(data: str, report: DataReport) -> None:
    """Print what `check_data` found: counts by class, sizes, and each image that cannot be used."""
    console = Console(highlight=False, soft_wrap=True)
    table = Table("class", "train", "validation", title=_cell(f"{data}: {len(report.class_names)} classes"))
    rows = list(zip(report.class_names, report.train_counts, report.val_counts, strict=True))
    for name, train, val in rows[:CLASSES_SHOWN]:
        table.add_row(_cell(name), str(train), str(val))
    if len(rows) > CLASSES_SHOWN:
        table.add_row(f"and {len(rows) - CLASSES_SHOWN} more", "", "")
    table.add_row("all", str(sum(report.train_counts)), str(sum(report.val_counts)))
    console.print(table)
    for note in report.notes:
        console.print(f"note: {printable(note)}", markup=False)
    console.print(f"labels {report.label_range[0]} to {report.label_range[1]}")
    if report.smallest and report.largest:
        smallest, largest = (f"{width}x{height}" for width, height in (report.smallest, report.largest))
        console.print(f"smallest image {smallest}, largest {largest} pixels")
    for path, note in report.image_notes:
        console.print(f"note on {path!r}: {printable(note)}", markup=False)
    for path, reason in report.unreadable:
        console.print(f"unreadable: {path!r}: {printable(reason)}", markup=False)
    console.print(f"{len(report.unreadable)} of {report.images} images cannot be used")


def _cell(text: str) -> str:
    """Return text as Rich shows it, whatever it holds."""
    return escape(printable(text))
