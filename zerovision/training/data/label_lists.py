"""Reads tables with any number of labels per image.

Each distinct set of labels has an index, which is used as the image's label when images are sorted, split and listed.
`LabelSets` converts these indices into targets.
"""

from __future__ import annotations

import re
from ast import literal_eval
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

import torch

from zerovision.training.base.errors import UserError, shown
from zerovision.training.base.files import as_given
from zerovision.training.data.class_names import clean, label_of
from zerovision.training.data.settings import SEVERAL_LABELS

SEPARATOR = ";"  # in the name of a set
SEPARATORS = re.compile(r"[;|]")
LISTS = re.compile(r"[;|,]|^[\[({]")  # in a cell that may contain more than one label
OF_COLUMNS = {"1": True, "1.0": True, "true": True, "0": False, "0.0": False, "false": False, "": False}


class LabelSets(NamedTuple):
    """The distinct sets of labels in a data set.

    Attributes:
        names: Names of the S sets: their classes, separated by semicolons.
        targets: float32 [S, K], 1 for each class in a set, otherwise 0.
    """

    names: list[str]
    targets: torch.Tensor

    def images_of_each(self, labels: torch.Tensor) -> list[int]:
        """Return the number of images in each of K classes; `labels` holds the index of each image's set, int64 [N]."""
        counts = torch.bincount(labels, minlength=len(self.names)).double() @ self.targets.double()
        return [int(count) for count in counts]


def columns_of(label_column: str) -> list[str]:
    """Return the columns that `--label-column` names, one per class; a single column contains lists of classes."""
    return [clean(name) for name in label_column.split(",")]


def set_name(cells: Sequence[str], columns: Sequence[str]) -> str:
    """Return the name of a row's set of labels.

    Args:
        cells: The row's cells in `columns`.
        columns: Names of the columns; each column is a class, with 1 or 0 in its cells.

    Raises:
        ValueError: If a cell is neither 0 nor 1, or a column's name contains ; or |.
    """
    chosen = []
    for cell, name in zip(cells, columns, strict=True):
        if cell.strip().lower() not in OF_COLUMNS or SEPARATORS.search(name):
            raise ValueError(f"{shown(name)} is {shown(cell)}; expected 1 or 0, and no ; or | in the column's name")
        if OF_COLUMNS[cell.strip().lower()]:
            chosen.append(name)
    return SEPARATOR.join(sorted(chosen))


Cell = str | tuple[str, ...]  # text, or the labels of a list


def list_in(cell: object) -> Cell:
    """Return the labels in a cell that is a list, or contains a JSON or Python list; otherwise return its text.

    Raises:
        ValueError: If an element of the list is not a label.
    """
    listed = cell
    if isinstance(cell, str) and re.fullmatch(r"\s*[\[({].*[\])}]\s*", cell, re.DOTALL):
        with suppress(ValueError, SyntaxError, MemoryError, RecursionError):
            listed = literal_eval(cell.strip())
    if not isinstance(listed, list | tuple | set):
        return clean(str(cell))
    return tuple(str(one) for one in map(label_of, listed) if one is not None)


def set_names(cells: Collection[Cell], separator: str, where: str) -> dict[Cell, str]:
    """Return the name of the set of labels in each cell of a column.

    Labels are separated by ; or |, or by the user's separator. In a cell without any of these, a comma or blanks
    separate labels if every part is also the only label of some image; if only some parts are, the cell is ambiguous.

    Args:
        cells: All cells of the column, from `list_in`.
        separator: The user's separator between labels, or ''.
        where: Name of the column, for messages.

    Raises:
        UserError: If a cell is ambiguous, or a label contains ; or |.
    """
    parts = {cell: _certain_parts(cell, separator) for cell in cells}
    known = {part for found in parts.values() if found is not None for part in found}
    known |= {cell for cell in cells if isinstance(cell, str) and not LISTS.search(cell)}
    is_established = any(isinstance(cell, tuple) or SEPARATORS.search(cell) for cell in cells)
    unclear = [cell for cell, found in parts.items() if found is None and isinstance(cell, str)]
    for cell in sorted(unclear, key=lambda cell: "," not in cell):
        inner = cell.strip("[](){} ")
        divided = [clean(part).strip("'\"") for part in (inner.split(",") if "," in inner else inner.split())]
        are_known = [part in known for part in divided if part]
        if all(are_known):
            parts[cell], is_established = divided, is_established or "," in cell
        elif any(are_known) or not is_established:
            missing = next(part for part in divided if part and part not in known)
            raise UserError(
                f"{where}: {shown(cell)} may be one label or several, and {shown(missing)} is the label of no other "
                f"image: use {SEVERAL_LABELS}:',' (or :' ', or :';' if it is one label)."
            )
        else:
            parts[cell] = [cell]
    found_labels = {part for found in parts.values() for part in found or ()}
    if bad := sorted(label for label in found_labels if SEPARATORS.search(label)):
        raise UserError(f"{where}: the label {shown(bad[0])} contains ; or |: rename it.")
    return {cell: SEPARATOR.join(sorted({part for part in found or () if part})) for cell, found in parts.items()}


def _certain_parts(cell: Cell, separator: str) -> list[str] | None:
    """Return the labels in a cell; None if it contains a comma or blanks whose meaning is unclear."""
    if isinstance(cell, tuple):
        return list(cell)
    if separator:
        found = cell.split(separator) if separator.strip() else cell.split()
    elif SEPARATORS.search(cell):
        found = SEPARATORS.split(cell)
    else:
        return None if LISTS.search(cell) or len(cell.split()) > 1 else [cell]
    return [clean(as_given(clean(part))) for part in found]


def classes_of(name: str) -> list[str]:
    """Return the classes in a set, given the set's name."""
    return name.split(SEPARATOR) if name else []


def make_sets(names: Iterable[str], class_names: Sequence[str]) -> tuple[LabelSets, list[str]]:
    """Build the label sets with these names, and return them with the names of the classes.

    Args:
        names: Names of the sets, without duplicates.
        class_names: The class names in order; if empty, the classes that occur in the sets are used in sorted order.
    """
    names = list(names)
    classes = list(class_names) or sorted({one for name in names for one in classes_of(name)})
    numbers = {name: number for number, name in enumerate(classes)}
    targets = torch.zeros(len(names), len(classes))
    for row, name in enumerate(names):
        targets[row, [numbers[one] for one in classes_of(name)]] = 1
    return LabelSets(names, targets), classes


def rarest_class(images: Mapping[str, int]) -> dict[str, str]:
    """Return the rarest class of each set, or '' for the empty set.

    Some images of each group with the same rarest class are held out, so that rare classes are represented, too.

    Args:
        images: Number of images of each set.
    """
    counts: Counter[str] = Counter()
    for name, number in images.items():
        counts.update(dict.fromkeys(classes_of(name), number))
    return {name: min(classes_of(name), key=lambda one: (counts[one], one), default="") for name in images}
