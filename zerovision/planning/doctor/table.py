"""The rows of the doctor's table, and how they are printed."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from zerovision.training.base.errors import printable
from zerovision.training.base.units import format_duration

Verdict = Literal["ok", "warning", "wrong"]
COLOURS: dict[Verdict, str] = {"ok": "green", "warning": "yellow", "wrong": "bold red"}
HOSTS_NAMED, FINDINGS_SHOWN = 4, 2
WIDTH_IN_FILES = 180  # characters: rows stay whole in a log file


@dataclass(frozen=True)
class Row:
    """One line of the doctor's table.

    Attributes:
        check: what was examined, in a few words.
        verdict: "wrong" prevents a training or falsifies it; "warning" slows it down or may end it.
        found: what was found, in one line.
        cure: what to do about it, in one line; '' if nothing is to be done.
        host: the machine; '' for all of them, or none in particular.
    """

    check: str
    verdict: Verdict
    found: str
    cure: str = ""
    host: str = ""


def join_hosts(rows: Iterable[Row]) -> list[Row]:
    """Merge rows that are equal but for the host, and all rows of a check that are ok; keeps the order."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        key = (row.check, row.verdict) if row.verdict == "ok" else (row.check, row.verdict, row.found, row.cure)
        groups.setdefault(key, []).append(row)
    joined = []
    for group in groups.values():
        findings = list(dict.fromkeys(row.found for row in group))
        more = f"; and {len(findings) - FINDINGS_SHOWN} more" if len(findings) > FINDINGS_SHOWN else ""
        found = "; ".join(findings[:FINDINGS_SHOWN]) + more
        hosts = some_of([row.host for row in group if row.host])
        joined.append(Row(group[0].check, group[0].verdict, found, group[0].cure, hosts))
    return joined


def some_of(names: Sequence[str]) -> str:
    """Return the first names with commas, and how many more there are."""
    more = len(names) - HOSTS_NAMED
    return ", ".join(names[:HOSTS_NAMED]) + (f" and {more} more" if more > 0 else "")


def print_rows(rows: Sequence[Row], seconds: float) -> None:
    """Print one line per row, then how many there are of each verdict."""
    has_hosts = any(row.host for row in rows)
    table = Table("check", "", *(["host"] if has_hosts else []), "found", "cure", box=None, pad_edge=False)
    for row in rows:
        cells = [*([row.host] if has_hosts else []), row.found, row.cure]
        table.add_row(cell(row.check), f"[{COLOURS[row.verdict]}]{row.verdict}[/]", *map(cell, cells))
    Console(highlight=False, width=shutil.get_terminal_size((WIDTH_IN_FILES, 0)).columns).print(table)
    counts = {verdict: sum(row.verdict == verdict for row in rows) for verdict in COLOURS}
    end = f"{counts['wrong']} wrong, {counts['warning']} warning(s), {counts['ok']} ok"
    print(f"{end}; {format_duration(round(seconds))}")


def cell(text: str) -> str:
    """Return text for a table of Rich: no markup, no control characters."""
    return escape(printable(text))
