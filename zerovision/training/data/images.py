"""The encoded images of a data set as one table: one row per image, one column per fact.

Every reader (folder, table, tar, Parquet, Hub, URL) returns an `Images`, `division` divides and sorts it, and a
`FileSource` reads the images that it lists. Columns are tensors, which worker processes share, so even ten million rows
need no Python objects.

Columns other than path and label are found regardless of upper and lower case; unused columns are reported.
"""

from __future__ import annotations

import itertools
import math
import os
from array import array
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np
import torch

from zerovision.training.base.errors import UserError, shown
from zerovision.training.data.class_names import clean, first_names
from zerovision.training.data.reading.files import MAX_FILE_BYTES, ImageError, read_file

FACTS = {"part": ("split", "subset", "is_valid"), "group": ("group",), "weight": ("weight",)}
IS_VALID = {"true": "val", "1": "val", "1.0": "val", "false": "train", "0": "train", "0.0": "train"}
LARGEST_WEIGHT = 1e100  # the sum of all weights must be finite


class Facts(NamedTuple):
    """Facts about an image besides its label; see `Images`."""

    part: str = ""
    group: str = ""
    weight: float = 1.0


NO_FACTS = Facts()


class FactColumns:
    """The columns of a source that contain facts about images; those in `used` are read for other purposes."""

    def __init__(self, names: Sequence[str], used: Iterable[str] = ()) -> None:
        self.of_facts: dict[str, str] = {}  # column name of each fact that the source contains
        for fact, known in FACTS.items():
            if found := [name for one in known if (name := find_column(names, one))]:
                self.of_facts[fact] = found[0]
        read = {*used, *self.of_facts.values()}
        self.unused = [name for name in names if name and name not in read]

    def facts(self, row: Mapping[str, object]) -> Facts:
        """Return the facts about an image; raise ValueError with the column's name for an invalid value."""
        if not self.of_facts:
            return NO_FACTS
        texts = {fact: _text(row.get(name)) for fact, name in self.of_facts.items()}
        part, column = texts.get("part", ""), self.of_facts.get("part", "")
        if part and column.casefold() == "is_valid":
            if part.lower() not in IS_VALID:
                raise ValueError(f"{column} is {shown(part)}; expected true or false")
            part = IS_VALID[part.lower()]
        return Facts(part, texts.get("group", ""), _weight(texts.get("weight") or "1"))


def find_column(names: Sequence[str], wanted: str) -> str | None:
    """Return the column `wanted`, or else the column whose name differs only in case or blanks; None if neither exists.

    If there are several such columns, raise a UserError.
    """
    if wanted in names:
        return wanted
    alike = [name for name in names if clean(name).casefold() == wanted.casefold()]
    if len(alike) > 1:
        raise UserError(f"the columns {', '.join(map(shown, alike))} differ only in case or blanks: keep only one.")
    return alike[0] if alike else None


def unused_notes(names: Iterable[str]) -> list[str]:
    """Return a list with one note about the unused columns; [] if all columns are used."""
    listed = list(dict.fromkeys(names))
    return [f"columns that are not used: {first_names(listed, shown)}"] if listed else []


def _weight(cell: str) -> float:
    """Parse the weight in a cell; raise ValueError if it is invalid."""
    try:
        weight = float(cell)
    except ValueError:
        weight = math.nan
    if not 0 <= weight <= LARGEST_WEIGHT:  # also true for NaN
        raise ValueError(f"weight is {shown(cell)}; expected a number from 0 to {LARGEST_WEIGHT:g}")
    return weight if weight != 1 else 1.0  # most rows share one object


def _text(value: object) -> str:
    return "" if value is None or value != value else clean(str(value))  # pandas represents empty cells as NaN


COLUMNS: dict[str, str] = {  # column types; see `array` and NumPy
    **dict.fromkeys(("folder", "label", "part", "group"), "i"),  # indices into `Images.words`
    **dict.fromkeys(("start", "size", "changed", "place"), "q"),
    **{"length": "i", "file": "i", "weight": "d"},
}
WORDS = ("folder", "label", "part", "group")
ROWS_AT_A_TIME = 2**16  # number of rows whose paths exist as text at the same time
ROW_BITS = 32  # the low bits of a place in a Parquet file are the row; the high bits are the row group


class Archive:
    """Files that contain encoded images; an archive can be sent to worker processes."""

    files: Sequence[PurePath]
    is_remote = False  # whether the files are downloaded before they are read
    is_of_files = False  # whether each file is a single image

    def read(self, file: int, place: int, size: int) -> bytes:
        """Return the encoded image of `size` bytes at `place` in a file; see `Images`.

        Raise a UserError if the file has changed since it was listed, or FileServerError if it is temporarily
        unreadable; see `patiently`.
        """
        raise NotImplementedError

    def expect(self, files: Iterable[int]) -> None:
        """Start fetching files that will be read, if they are remote."""

    def check_room(self, part: str, files: Iterable[int]) -> None:
        """Raise UserError if remote files are read in random order and do not fit into the cache."""


@dataclass(frozen=True)
class Images:
    """A table of N encoded images.

    The columns are: `folder`, and `start` and `length` of the file name in `text`, which together form the path;
    `label`, the class; `part`, the part of the data set; `group`, the group that is never divided ('' for none); `size`
    in bytes; `changed`, the modification time in ns; `weight`, the loss weight in training; `file`, the index of the
    archive's file; and `place`, the position in that file, in bytes or as row group and row (see `ROW_BITS`).

    Attributes:
        root: Folder that paths are relative to; in an archive, paths are the images' names.
        columns: Tensors [N] by name; see `COLUMNS`.
        words: Names that the numbers in each column of `WORDS` stand for; folders end with a slash.
        text: File names as bytes, uint8; shared by all tables taken from the same table.
        archive: Archive that contains the images; None if each image is a separate file.
        classes: Class names if a label stands for any number of classes; None if each label is one class.
        notes: One-line messages for the user.
    """

    root: PurePath
    columns: Mapping[str, torch.Tensor]
    words: Mapping[str, Sequence[Any]]
    text: torch.Tensor
    archive: Archive | None = None
    classes: Sequence[str] | None = None
    notes: Sequence[str] = ()

    def __len__(self) -> int:
        return len(self.columns["label"])

    def __getitem__(self, column: str) -> np.ndarray:
        return self.columns[column].numpy()

    def take(self, rows: np.ndarray) -> Images:
        """Return a table of the given rows, int64 [n]."""
        index = torch.from_numpy(rows)
        return replace(self, columns={name: column[index] for name, column in self.columns.items()})

    def renamed(self, column: str, words: Mapping[Any, Any], order: Sequence[Any] = ()) -> Images:
        """Return the table with a column's words renamed and numbered as in `order` (default: order of occurrence)."""
        order = order or [*dict.fromkeys(words.values())]
        numbers = {word: number for number, word in enumerate(order)}
        codes = torch.tensor([numbers[words[word]] for word in self.words[column]], dtype=torch.int32)
        columns = {**self.columns, column: codes[self.columns[column]]}
        return replace(self, columns=columns, words={**self.words, column: [*order]})

    def with_files(self, builder: ImagesBuilder) -> Images:
        """Return the table with paths, states and places from a builder, which contains the same images."""
        files, names = builder.build(self.root), ("folder", "start", "length", "size", "changed", "place")
        columns = {**self.columns, **{name: files.columns[name] for name in names}}
        words = {**self.words, "folder": files.words["folder"]}
        return replace(self, columns=columns, words=words, text=files.text)

    def paths(self, rows: np.ndarray | None = None) -> Iterator[str]:
        """Yield the paths of some rows, by default of all rows, as text."""
        text, folders = self.text.numpy().data, self.words["folder"]
        for some in pieces(np.arange(len(self)) if rows is None else rows):
            places = (self[name][some].tolist() for name in ("folder", "start", "length"))
            for folder, start, length in zip(*places, strict=True):
                yield folders[folder] + os.fsdecode(bytes(text[start : start + length]))

    def path(self, row: int) -> str:
        """Return the path of an image."""
        return next(self.paths(np.array([row])))

    def in_order(self) -> np.ndarray:
        """Return the row numbers sorted by path, then by the other facts, independently of the listing order.

        Folder trees are sorted one after another, so that not all paths exist as text at the same time.
        """
        folders, top = self.words["folder"], ""
        tree, trees = np.empty(len(folders), dtype=np.int64), 0
        for number in sorted(range(len(folders)), key=folders.__getitem__):
            if not (trees and folders[number].startswith(top)):
                top, trees = folders[number], trees + 1
            tree[number] = trees
        of_row, facts = tree[self["folder"]], ("place", "file", "weight", "changed", "label", "size")
        rows = np.lexsort([*(self[fact] for fact in facts), of_row])
        ends = np.cumsum(np.bincount(of_row, minlength=trees + 1))
        for start, end in itertools.pairwise(ends.tolist()):
            texts = np.fromiter(self.paths(rows[start:end]), dtype=object, count=end - start)
            rows[start:end] = rows[start:end][np.argsort(texts, kind="stable")]
        return rows

    def name(self, row: int) -> str:
        """Return the path of an image; in an archive, the archive's path and the image's name."""
        if self.archive is None:
            return str(self.root / self.path(row))
        return f"{self.archive.files[self['file'][row]]}/{self.path(row)}"

    def content(self, row: int) -> bytes:
        """Return the encoded bytes of an image; raise ImageError if they cannot be read."""
        if self.archive is None:
            return read_file(self.name(row))
        file, place, size = (int(self[name][row]) for name in ("file", "place", "size"))
        if size > MAX_FILE_BYTES:
            raise ImageError(self.name(row), f"{size / 1e6:.0f} MB, more than {MAX_FILE_BYTES / 1e6:g} MB")
        return self.archive.read(file, place, size)

    def expect(self, rows: Sequence[int]) -> None:
        """Start fetching images that will be read, if they are remote."""
        if self.archive is not None and self.archive.is_remote:
            self.archive.expect(self["file"][rows].tolist())

    def spaced_rows(self, most: int = 64) -> list[int]:
        """Return at most `most` evenly spaced rows, after starting to fetch their images if they are remote."""
        rows: list[int] = np.linspace(0, len(self) - 1, min(len(self), most)).astype(int).tolist()
        self.expect(rows)
        return rows

    def shards(self) -> np.ndarray:
        """Return each image's shard and position in the shard, int64 [N, 2], or [0, 2] if images are separate files.

        A shard is a tar file (or 4 GB of a larger tar file), or a row group of a Parquet file.
        """
        if self.archive is None:
            return np.empty((0, 2), dtype=np.int64)
        return np.stack([self["file"].astype(np.int64) << 31 | self["place"] >> ROW_BITS, self["place"]], axis=1)


def pieces(rows: np.ndarray) -> Iterator[np.ndarray]:
    """Yield rows in pieces of `ROWS_AT_A_TIME`."""
    yield from (rows[start : start + ROWS_AT_A_TIME] for start in range(0, len(rows), ROWS_AT_A_TIME))


class ImagesBuilder:
    """Collects images one by one, as a reader finds them."""

    def __init__(self) -> None:
        self._columns, self._text = {name: array(kind) for name, kind in COLUMNS.items()}, bytearray()
        self._words: dict[str, dict[Hashable, int]] = {name: {} for name in WORDS}

    def __len__(self) -> int:
        return len(self._columns["label"])

    def add(
        self, path: str, label: Hashable, facts: Facts = NO_FACTS, *, state: tuple[int, int] = (0, 0), place: int = 0
    ) -> None:
        """Add an image, whose class may have no name yet; `state` is its size in bytes and modification time in ns."""
        folder, slash, name = path.rpartition("/")
        text = os.fsencode(name)
        words = zip(self._words.values(), (folder + slash, label, facts.part, facts.group), strict=True)
        codes = [known.setdefault(word, len(known)) for known, word in words]
        row: tuple[Any, ...] = (*codes, len(self._text), *state, place, len(text), 0, facts.weight)
        for column, value in zip(self._columns.values(), row, strict=True):
            column.append(value)
        self._text += text

    def build(self, root: PurePath) -> Images:
        """Return the images; the builder cannot be used afterwards."""
        columns = {name: torch.from_numpy(np.array(self._columns.pop(name))) for name in COLUMNS}
        text = torch.from_numpy(np.array(self._text, dtype=np.uint8))
        return Images(root, columns, {name: [*words] for name, words in self._words.items()}, text)


def concatenated(tables: Sequence[Images]) -> Images:
    """Concatenate the tables of an archive's files; `file` becomes the index of each row's table."""
    words = {name: {word: word for table in tables for word in table.words[name]} for name in WORDS}
    for name, order in words.items():
        tables = [table.renamed(name, order, [*order]) for table in tables]
    columns = {name: torch.cat([table.columns[name] for table in tables]) for name in COLUMNS}
    counts = torch.tensor([*map(len, tables)])
    texts = torch.tensor([0, *(len(table.text) for table in tables)]).cumsum(0)
    columns["start"] += texts[:-1].repeat_interleave(counts)
    columns["file"] = torch.arange(len(tables), dtype=torch.int32).repeat_interleave(counts)
    return replace(tables[0], columns=columns, words=tables[0].words, text=torch.cat([table.text for table in tables]))
