"""Reads `LIST.csv` or `.tsv`, a table of image files with a path column, a label column and optional other columns."""

from __future__ import annotations

import csv
import io
import os
import pkgutil
import stat
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path, PurePath
from typing import Any

from zerovision.training.base.errors import UserError, nearest, one_line, shown
from zerovision.training.base.files import as_given
from zerovision.training.base.units import plural
from zerovision.training.data import DataOptions
from zerovision.training.data.class_names import clean, label_of
from zerovision.training.data.division import in_parts, with_classes
from zerovision.training.data.images import FactColumns, Images, ImagesBuilder, find_column, unused_notes
from zerovision.training.data.reading.files import ImageError, read_file
from zerovision.training.data.reading.retry import patiently
from zerovision.training.data.settings import DATA_ROOT, LIST_COLUMNS, READ_LISTS

PATH_COLUMNS = ("path", "image")  # `predict` writes the second
SEPARATORS = (",", ";", "\t", "|")
MAX_BYTES = 4 * 10**9

Row = tuple[int, Mapping[str, Any]]  # number of the row's last line, and its cells by column


def listing(options: DataOptions) -> Images:
    """Return the images of a table, or raise a UserError."""
    return listing_of(*csv_rows(Path(os.path.expanduser(options.data)), options), options)


def listing_of(header: Sequence[str], rows: Iterable[Row], options: DataOptions) -> Images:
    """Return the images of a table; for errors, see `listing`."""
    beside = Path(os.path.expanduser(options.data)).parent
    root = (options.root if options.data_root != DATA_ROOT else beside).resolve()
    return _with_files(lines_of(header, rows, root, options), options)


def lines_of(header: Sequence[str], rows: Iterable[Row], root: PurePath, options: DataOptions) -> Images:
    """Return the images that a table lists, even if files are missing; for other errors, see `listing`."""
    kind = pkgutil.resolve_name(LIST_COLUMNS) if options.reads_lists else TableColumns
    columns, builder, left_out = kind(header, options), ImagesBuilder(), 0
    for line, row in rows:
        try:
            path = str(row.get(columns.path) or "")
            if not clean(path):
                raise ValueError(f"the cell in column {columns.path!r} is empty")
            label, known = columns.label(row), columns.facts(row)
        except ValueError as error:
            raise UserError(f"--data {options.data}, line {line}: {error}.") from None
        if label is None:
            left_out += 1
        else:
            builder.add(path, label, known)
    if not len(builder):
        raise UserError(f"--data {options.data}: the table has no rows below the header.")
    notes = [f"skipped {plural(left_out, 'line')} without a label"] if left_out else []
    images = replace(builder.build(root), notes=[*notes, *unused_notes(columns.unused)])
    return columns.classified(in_parts(images, options), f"--data {options.data}")


def columns_of(label_column: str) -> list[str]:
    """Return the names in `--label-column`, which are separated by commas."""
    return [clean(name) for name in label_column.split(",")]


class TableColumns(FactColumns):
    """The columns of a table: paths, labels and other facts; in this class, one column contains the classes."""

    def __init__(self, header: Sequence[str], options: DataOptions) -> None:
        self.wanted = columns_of(options.label_column) if options.reads_lists else [options.label_column]
        self.separator = options.label_separator  # '' if the user gave none
        wanted = [options.path_column] if options.path_column else [*PATH_COLUMNS]
        paths, labels = ([find_column(header, name) or "" for name in names] for names in (wanted, self.wanted))
        self.path, self.labels = next(filter(None, paths), ""), labels  # as the table writes them, unlike `wanted`
        for column, name, flag in (
            (self.path, wanted[0], "--path-column"),
            *((one, name, "--label-column") for one, name in zip(labels, self.wanted, strict=True)),
        ):
            if not column:
                found = f"The columns are {', '.join(map(one_line, header[:20]))}"
                cure = f"use {flag} NAME" if "," not in name else f"for a label per column, add {READ_LISTS}"
                raise UserError(
                    f"--data {options.data} has no column {name!r}.{nearest(name, header)} {found}: {cure}."
                )
        super().__init__(header, [self.path, *self.labels])

    def label(self, row: Mapping[str, Any]) -> Hashable:
        """Return the label in a row, before `classified`, or None.

        Raises:
            ValueError: If the label is empty or invalid.
        """
        cell = row.get(self.labels[0])
        if cell is None or not clean(str(cell)):
            raise ValueError(f"the cell in column {self.labels[0]!r} is empty")
        return label_of(cell)

    def classified(self, images: Images, where: str) -> Images:
        """Return the images with names as labels; raise UserError, which names the data `where`, if any is unclear."""
        return with_classes(images, (), where)


def csv_rows(file: Path, options: DataOptions) -> tuple[list[str], Iterator[Row]]:
    """Return the header and the other rows of a text file, with the separator that its header uses."""
    where = f"--data {options.data}"
    try:
        content = read_file(file, MAX_BYTES)
    except ImageError as error:
        raise UserError(f"{where}: the table cannot be read ({error.reason}).") from None
    first = content.partition(b"\n")[0].decode("utf-8-sig", "replace")
    known = {*PATH_COLUMNS, options.path_column, options.label_column, *columns_of(options.label_column)}
    known = {name.casefold() for name in known}
    likeness = {
        mark: sum(clean(name).strip('" ').casefold() in known for name in first.split(mark)) for mark in SEPARATORS
    }
    separator = max(SEPARATORS, key=lambda mark: (likeness[mark], first.count(mark)))
    text = io.TextIOWrapper(io.BytesIO(content), "utf-8-sig", newline="")
    reader = csv.reader(text, delimiter=separator, strict=True)

    def rows() -> Iterator[list[str]]:
        try:
            yield from reader
        except csv.Error as error:
            raise UserError(f"{where}, line {reader.line_num}: {one_line(error)}.") from None
        except UnicodeDecodeError:
            raise UserError(f"{where}: the table is not encoded as UTF-8: save it as CSV UTF-8.") from None

    every = rows()
    header = [clean(name) for name in next(every, [])]
    if not any(header):
        raise UserError(f"{where}: the table is empty: expected a header with path and label.")
    if twice := [name for name in header if name and header.count(name) > 1]:
        raise UserError(f"{where}: the column {one_line(twice[0])} occurs more than once.")

    def cells() -> Iterator[Row]:
        for row in every:
            if len(row) > len(header):
                counts = f"{len(row)} cells, but the header has {len(header)}"
                raise UserError(f"{where}, line {reader.line_num}: {counts}.")
            if row:
                yield reader.line_num, dict(zip(header, map(as_given, row), strict=False))

    return header, cells()


def _with_files(images: Images, options: DataOptions) -> Images:
    """Return the images with paths relative to `root`, file sizes and modification times, or raise a UserError.

    Like a link in a folder, a path may point anywhere; its target must be an image.
    """
    root, real_folder = images.root, cache(lambda folder: f"{os.path.realpath(folder)}/")
    missing, outside, roots = [], [], tuple(f"{place}/" for place in {str(root), os.path.abspath(root)})
    builder = ImagesBuilder()
    for given in images.paths():
        path = given
        if path != clean(path) and not os.path.lexists(os.path.join(root, path)):
            path = clean(path)
        if path.startswith(roots):
            path = path[len(next(place for place in roots if path.startswith(place))) :]
        path = path if ".." in path.split("/") else os.path.normpath(path)
        full = os.path.join(root, path)
        try:
            status, folder = patiently(partial(os.lstat, full), full), os.path.dirname(full)
            if stat.S_ISLNK(status.st_mode):
                status, folder = patiently(partial(os.stat, full), full), os.path.dirname(os.path.realpath(full))
        except (OSError, ValueError):  # ValueError: a null character
            missing.append(given)
            continue
        if not real_folder(folder).startswith(f"{root}/"):
            outside.append(given)
        builder.add(path, None, state=(status.st_size, status.st_mtime_ns))
    if missing:
        raise UserError(
            f"--data {options.data}: {plural(len(missing), 'image')} of {len(images)}, such as {shown(missing[0])}, "
            f"cannot be found under '{root}': use paths relative to the table, or --data-root DIR."
        )
    notes = [*images.notes]
    if outside:
        notes.append(f"{len(outside)} of {len(images)} images are outside '{root}', such as {shown(outside[0])}")
    return replace(images.with_files(builder), notes=notes)
