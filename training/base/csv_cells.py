"""Lines of a CSV file that every reader takes for one row, and in which a spreadsheet finds nothing to compute."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

# What begins a formula, also after a spreadsheet has taken off white space, and in the full width of Chinese and
# Japanese input: https://owasp.org/www-community/attacks/CSV_Injection
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")


def csv_line(row: Iterable[Any]) -> str:
    r"""Return a row, inert, as it stands in a file that is opened with `newline=""`; it ends in \n.

    Python's writer quotes a line break in a cell only if it is one of those that end its rows, and readers end a row at
    each of \n, \r and \r\n.
    """
    line = io.StringIO()
    csv.writer(line, lineterminator="\r\n").writerow(inert(row))
    return line.getvalue().removesuffix("\r\n") + "\n"


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Iterable[Any]]) -> None:
    """Write a file of rows under a header; names of files keep bytes that are no text."""
    with path.open("w", encoding="utf-8", errors="surrogateescape", newline="") as stream:
        stream.writelines(map(csv_line, (header, *rows)))


def inert(row: Iterable[Any]) -> list[Any]:
    """Return a row whose texts begin no formula: one that would has a single quote before it; numbers stay."""
    return [f"'{cell}" if isinstance(cell, str) and cell.startswith(FORMULA_STARTS) else cell for cell in row]


def as_given(cell: str) -> str:
    """Return the text that `inert` was given."""
    return cell[1:] if cell.startswith("'") and cell[1:].startswith(FORMULA_STARTS) else cell
