"""The table, the list of misses, and the file of all records."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from tests.chaos.case import tail
from tests.chaos.faults import FAULTS
from tests.chaos.records import Injection, TrialResult

COLUMNS = ("fault", "injected", "survived", "bit-identical", "recovery, median", "worst")


def print_report(console: Console, results: list[TrialResult], skipped: Mapping[str, str]) -> None:
    """Print faults of each kind and what became of them, then every miss.

    Args:
        console: where to.
        results: all trainings.
        skipped: why a kind could not be injected here.
    """
    table = Table()
    for number, name in enumerate(COLUMNS):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    for kind in FAULTS:
        of_kind = [(result, found) for result, found in _faults(results) if found.kind == kind]
        if of_kind:
            table.add_row(kind, *_cells(of_kind))
    table.add_section()
    table.add_row("all", *_cells(_faults(results)))
    console.print(table)
    for kind, reason in skipped.items():
        console.print(f"{kind} skipped: {reason}", markup=False, highlight=False)
    minutes = sum(result.seconds for result in results) / 60
    faults = sum(1 for _ in _faults(results))
    average = f", {60 * minutes / faults:.0f} s a fault" if faults else ""
    console.print(f"{len(results)} trainings, {faults} faults, {minutes:.1f} minutes{average}")
    for result in misses(results):
        _print_miss(console, result)


def misses(results: Iterable[TrialResult]) -> list[TrialResult]:
    """Return the trainings that did not survive, or ended with other bytes."""
    return [result for result in results if not result.identical]


def write_records(path: Path, seed: int, results: list[TrialResult], skipped: Mapping[str, str]) -> None:
    """Write all that is known of every training and fault as JSON."""
    content = {"seed": seed, "skipped": dict(skipped), "trainings": [_record(result) for result in results]}
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _faults(results: Iterable[TrialResult]) -> Iterable[tuple[TrialResult, Injection]]:
    return ((result, injection) for result in results for injection in result.injections)


def _cells(faults: Iterable[tuple[TrialResult, Injection]]) -> list[str]:
    pairs = list(faults)
    survived = sum(result.survived for result, _ in pairs)
    identical = sum(result.identical for result, _ in pairs)
    measured = [injection.seconds_to_recover for _, injection in pairs]
    seconds = [value for value in measured if value is not None]
    times = [f"{statistics.median(seconds):.1f} s", f"{max(seconds):.1f} s"] if seconds else ["-", "-"]
    return [str(len(pairs)), str(survived), str(identical), *times]


def _print_miss(console: Console, result: TrialResult) -> None:
    console.print(f"\nMISS: training {result.number} ({result.case}), kept in {result.folder}", style="bold red")
    lines = [result.miss] if result.miss else result.differences
    for line in lines:
        console.print(f"  {line}", markup=False, highlight=False)
    for injection in result.injections:
        console.print(f"  - {injection.text}", markup=False, highlight=False)
    output = result.folder / "output.log"
    if output.is_file():
        console.print(tail(output), markup=False, highlight=False)


def _record(result: TrialResult) -> dict[str, Any]:
    faults = [
        {
            "kind": injection.kind,
            "text": injection.text,
            "at": injection.at,
            "seconds_to_recover": injection.seconds_to_recover,
        }
        for injection in result.injections
    ]
    return {
        "number": result.number,
        **dataclasses.asdict(result.case),
        "survived": result.survived,
        "bit_identical": result.identical,
        "miss": result.miss,
        "differences": result.differences,
        "ranks": result.ranks,
        "seconds": result.seconds,
        "folder": str(result.folder),
        "faults": faults,
    }
