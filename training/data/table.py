"""`LIST.csv` or `.tsv`: a table of image files with the columns path and label, and if there are any, `OPTIONAL`."""

from __future__ import annotations

import csv
import io
import math
import os
import re
import stat
import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path

from training.base.errors import UserError, nearest, one_line, shown
from training.base.small_files import as_given
from training.data import DataOptions
from training.data.label_sets import columns_of, set_name
from training.data.reading.boxes import Edges
from training.data.reading.images import ImageError, read_file
from training.data.reading.retry import patiently
from training.data.records import Listing, Record
from training.data.settings import DATA_ROOT, MULTILABEL

PATH_COLUMNS = ("path", "image")  # the second is that of a list of predictions
EDGES = ("x0", "y0", "x1", "y1")
OPTIONAL = ("split", "weight", "group", *EDGES)
SEPARATORS = (",", ";", "\t", "|")
MAX_BYTES = 4 * 10**9

Row = tuple[int, dict[str, str]]  # number of its last line, cells by column
_WITH_FRACTION = re.compile(r"[+-]?(\d+\.\d*|\.\d+)(e[+-]?\d+)?|nan|inf", re.IGNORECASE)


def listing(options: DataOptions) -> Listing:
    """Return the images of a table.

    Raises:
        UserError: The table cannot be read, lacks a column, or has a cell that means nothing; a file is missing.
    """
    header, rows = csv_rows(Path(os.path.expanduser(options.data)), options)
    return listing_of(header, rows, options)


def listing_of(header: Sequence[str], rows: Iterable[Row], options: DataOptions) -> Listing:
    """Return the images of a table; the errors are those of `listing`."""
    beside = Path(os.path.expanduser(options.data)).parent
    root = (options.root if options.data_root != DATA_ROOT else beside).resolve()
    return _with_files(root, records_of(header, rows, options), options)


def records_of(header: Sequence[str], rows: Iterable[Row], options: DataOptions) -> list[Record]:
    """Return the lines of a table, whose files may be missing; the errors are those of `listing`."""
    records = list(_records(header, rows, options))
    if not records:
        raise UserError(f"--data {options.data}: there is no line below the header.")
    if all(_WITH_FRACTION.fullmatch(record.label) for record in records):
        raise UserError(
            f"--data {options.data}: column {options.label_column} has numbers such as {records[0].label}; expected "
            "names of classes, or whole numbers: give --label-column NAME."
        )
    return records


def _records(header: Sequence[str], rows: Iterable[Row], options: DataOptions) -> Iterator[Record]:
    is_multilabel = options.task == MULTILABEL
    label_columns = columns_of(options.label_column) if is_multilabel else [options.label_column]
    wanted = [options.path_column] if options.path_column else [*PATH_COLUMNS]
    path_column = next((name for name in wanted if name in header), None)
    for found, name, flag in (
        (path_column is not None, wanted[0], "--path-column"),
        *((name in header, name, "--label-column") for name in label_columns),
    ):
        if not found:
            columns = ", ".join(map(one_line, header[:20]))
            raise UserError(
                f"--data {options.data}: there is no column {name}.{nearest(name, header)} It has {columns}: "
                f"give {flag} NAME."
            )
    edges = [name for name in EDGES if name in header]
    if edges and len(edges) < len(EDGES):
        raise UserError(
            f"--data {options.data}: a box needs the columns {', '.join(EDGES)}; it has {', '.join(edges)}."
        )
    for line, row in rows:
        place = f"--data {options.data}, line {line}"
        path, label = (as_given(row.get(name) or "") for name in (path_column or "", label_columns[0]))
        for name, cell in ((path_column or "", path), (options.label_column, label)):
            if not cell and (name == path_column or not is_multilabel):
                raise UserError(f"{place}: the cell of {name} is empty.")
        if is_multilabel:
            label = set_name([row.get(name) or "" for name in label_columns], label_columns, place)
        weight = _number(row.get("weight") or "1", "weight", place)
        if weight < 0:
            raise UserError(f"{place}: weight is {weight:g}; expected 0 or more.")
        part, group = (as_given(row.get(name) or "").strip() for name in ("split", "group"))
        yield Record(path, sys.intern(label), sys.intern(part), group, box=_box(row, place), weight=weight)


def _number(cell: str, name: str, place: str) -> float:
    try:
        number = float(cell)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise UserError(f"{place}: {name} is {shown(cell)}; expected a number.")
    return number


def _box(row: dict[str, str], place: str) -> Edges:
    cells = [row.get(name) or "" for name in EDGES]
    if not any(cells):
        return ()
    left, top, right, bottom = (_number(cell, name, place) for cell, name in zip(cells, EDGES, strict=True))
    if not (left < right and top < bottom):
        raise UserError(f"{place}: the box {left:g}, {top:g}, {right:g}, {bottom:g} is empty; x1 > x0 and y1 > y0.")
    return left, top, right, bottom


def csv_rows(file: Path, options: DataOptions) -> tuple[list[str], Iterator[Row]]:
    """Return the header and the other rows of a text file, whose separator is the one that its header has."""
    try:
        content = read_file(file, MAX_BYTES)
        first = content.decode("utf-8-sig", "strict").partition("\n")[0]
    except ImageError as error:
        raise UserError(f"--data {options.data}: the table cannot be read ({error.reason}).") from None
    except UnicodeDecodeError:
        raise UserError(f"--data {options.data}: the table is not encoded as UTF-8: save it as CSV UTF-8.") from None
    known = {*PATH_COLUMNS, options.path_column, options.label_column, *columns_of(options.label_column)}
    likeness = {mark: sum(name.strip(' "\r') in known for name in first.split(mark)) for mark in SEPARATORS}
    separator = max(SEPARATORS, key=likeness.__getitem__)
    reader = csv.reader(
        io.TextIOWrapper(io.BytesIO(content), "utf-8-sig", newline=""), delimiter=separator, strict=True
    )

    def rows() -> Iterator[list[str]]:
        try:
            yield from reader
        except csv.Error as error:
            raise UserError(f"--data {options.data}, line {reader.line_num}: {one_line(error)}.") from None

    every = rows()
    header = [name.strip() for name in next(every, [])]
    if not any(header):
        raise UserError(f"--data {options.data}: the table is empty: expected a header with path and label.")
    twice = [name for name in header if name and header.count(name) > 1]
    if twice:
        raise UserError(f"--data {options.data}: the column {one_line(twice[0])} is there twice.")

    def cells() -> Iterator[Row]:
        for row in every:
            if len(row) > len(header):
                raise UserError(
                    f"--data {options.data}, line {reader.line_num}: {len(row)} cells, the header has {len(header)}."
                )
            if row:
                yield reader.line_num, dict(zip(header, row, strict=False))

    return header, cells()


def _with_files(root: Path, records: list[Record], options: DataOptions) -> Listing:
    """Return the records with paths relative to `root`, sizes and times; changes the list.

    A path may lead anywhere, as a link in a folder may, unless --links refuse forbids that: what it leads to is read as
    an image, or is an error.
    """
    real_folder = cache(lambda folder: f"{os.path.realpath(folder)}/")
    missing, outside, roots = [], [], tuple(f"{place}/" for place in {str(root), os.path.abspath(root)})
    for number, record in enumerate(records):
        path = record.path
        if path.startswith(roots):
            path = path[len(next(place for place in roots if path.startswith(place))) :]
        path = path if ".." in path.split("/") else os.path.normpath(path)
        full = os.path.join(root, path)
        try:
            status, folder = patiently(partial(os.lstat, full), full), os.path.dirname(full)
            if stat.S_ISLNK(status.st_mode):
                status, folder = patiently(partial(os.stat, full), full), os.path.dirname(os.path.realpath(full))
        except (OSError, ValueError):  # ValueError: a null character
            missing.append(record.path)
            continue
        if not real_folder(folder).startswith(f"{root}/"):
            outside.append(record.path)
        path = record.path if path == record.path else path  # one string
        records[number] = record._replace(path=path, size=status.st_size, changed_ns=status.st_mtime_ns)
    if missing:
        raise UserError(
            f"--data {options.data}: {len(missing)} of {len(records)} images are missing below '{root}', such as "
            f"{shown(missing[0])}: paths are relative to the table, or give --data-root DIR."
        )
    notes = []
    if outside:
        line = f"{len(outside)} of {len(records)} images lie outside of '{root}', such as {shown(outside[0])}"
        if options.links == "refuse":
            raise UserError(f"--data {options.data}: {line}, which --links refuse forbids.")
        notes.append(line)
    columns = columns_of(options.label_column)
    class_names = columns if options.task == MULTILABEL and len(columns) > 1 else ()
    return Listing(root, records, class_names, notes=notes)
