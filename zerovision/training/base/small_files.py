"""Small files: text files of a user, read without blocking on a named pipe; hashes; CSV without formulas."""

from __future__ import annotations

import csv
import errno
import hashlib
import io
import os
import stat
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

LARGEST_BYTES = 2**20
# What begins a formula, also after a spreadsheet has taken off white space, and in the full width of Chinese and
# Japanese input: https://owasp.org/www-community/attacks/CSV_Injection
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")


def read_small_text(path: Path, largest_bytes: int = LARGEST_BYTES) -> str:
    """Return the text of a small regular file in UTF-8.

    Raises:
        OSError: if the file is missing, unreadable, not a regular file, or larger than `largest_bytes`.
        ValueError: if it is not UTF-8.
    """
    # without O_NONBLOCK, opening a named pipe without a writer blocks
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC), "rb") as stream:
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        content = stream.read(largest_bytes + 1)
    if len(content) > largest_bytes:
        raise OSError(errno.EFBIG, f"larger than {largest_bytes >> 10} KiB")
    return content.decode("utf-8")


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file's content, hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def csv_line(row: Iterable[Any]) -> str:
    r"""Return an inert row for a file opened with `newline=""`; it ends in \n.

    Python's writer quotes a line break in a cell only if it is one of those that end its rows, and readers end a row at
    each of \n, \r and \r\n.
    """
    line = io.StringIO()
    csv.writer(line, lineterminator="\r\n").writerow(inert(row))
    return line.getvalue().removesuffix("\r\n") + "\n"


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Iterable[Any]]) -> None:
    """Write a file of rows under a header; file names keep bytes that are not text."""
    with path.open("w", encoding="utf-8", errors="surrogateescape", newline="") as stream:
        stream.writelines(map(csv_line, (header, *rows)))


def inert(row: Iterable[Any]) -> list[Any]:
    """Return a row whose texts cannot start a formula: those that would get a single quote in front; numbers stay."""
    return [f"'{cell}" if isinstance(cell, str) and cell.startswith(FORMULA_STARTS) else cell for cell in row]


def as_given(cell: str) -> str:
    """Return the text that `inert` was given."""
    return cell[1:] if cell.startswith("'") and cell[1:].startswith(FORMULA_STARTS) else cell
