"""Reads tables with any number of labels per image.

Each distinct set of labels has an index, which is used as the image's label when images are sorted, split and listed.
`LabelTargets` converts these indices into targets.
"""

from __future__ import annotations

import re
from ast import literal_eval
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from zerovision.training.base.errors import UserError, shown
from zerovision.training.base.files import as_given
from zerovision.training.data.class_names import SEPARATOR, classes_of, clean, label_of
from zerovision.training.data.images import Images
from zerovision.training.data.settings import READ_LISTS
from zerovision.training.data.table import TableColumns

SEPARATORS = re.compile(r"[;|]")
LISTS = re.compile(r"[;|,]|^[\[({]")  # in a cell that may contain more than one label
OF_COLUMNS = {"1": True, "1.0": True, "true": True, "0": False, "0.0": False, "false": False, "": False}

Cell = str | tuple[str, ...]  # text, or the labels of a list


class ListColumns(TableColumns):
    """The columns of a table with one column of lists, or one column per class with 1 or 0 in its cells."""

    def label(self, row: Mapping[str, Any]) -> Cell:
        """Return the labels in a row, or the text of a cell whose labels `classified` separates; see `TableColumns`."""
        cells = ["" if (cell := row.get(name)) is None else cell for name in self.labels]
        return marked([str(cell) for cell in cells], self.wanted) if len(cells) > 1 else list_in(cells[0])

    def classified(self, images: Images, where: str) -> Images:
        """See `TableColumns`; the labels become the names of sets."""
        of_cell = set_names(images.words["label"], self.separator, f"{where}, column {self.labels[0]}")
        names = sorted({*of_cell.values()})
        classes = self.wanted if len(self.labels) > 1 else sorted({one for name in names for one in classes_of(name)})
        return replace(images.renamed("label", of_cell, names), classes=classes)


def marked(cells: Sequence[str], columns: Sequence[str]) -> tuple[str, ...]:
    """Return the columns, one per class, that a row marks with 1; raise ValueError for an invalid cell or name."""
    chosen = []
    for cell, name in zip(cells, columns, strict=True):
        if cell.strip().lower() not in OF_COLUMNS or SEPARATORS.search(name):
            raise ValueError(f"{shown(name)} is {shown(cell)}; expected 1 or 0, and no ; or | in the column's name")
        if OF_COLUMNS[cell.strip().lower()]:
            chosen.append(name)
    return tuple(chosen)


def list_in(cell: object) -> Cell:
    """Return the labels in a cell that is a list, or contains a JSON or Python list; otherwise return its text.

    If an element of the list is not a label, raise ValueError.
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

    The cells come from `list_in`, or all from `marked`. Labels are separated by ; or |, or by the user's separator. In
    a cell without any of these, a comma or blanks separate labels if every part is also the only label of some image;
    if only some parts are, the cell is ambiguous. Raise a UserError for an ambiguous cell or a label with ; or |.
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
                f"image: use {READ_LISTS}:',' (or :' ', or :';' if it is one label)."
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
