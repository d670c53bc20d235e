"""Finds columns other than path and label in tables, Parquet files and JSON, regardless of upper and lower case.

Unused columns are reported.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from zerovision.training.base.errors import UserError, shown
from zerovision.training.data.class_names import clean, first_names

FACTS = {"part": ("split", "subset", "is_valid"), "group": ("group",), "weight": ("weight",)}
IS_VALID = {"true": "val", "1": "val", "1.0": "val", "false": "train", "0": "train", "0.0": "train"}


class Facts(NamedTuple):
    """Facts about an image besides its label; see `Images`."""

    part: str = ""
    group: str = ""
    weight: float = 1.0


NO_FACTS = Facts()


class FactColumns:
    """The columns of a source that contain facts about images.

    Args:
        names: Names of all columns.
        used: Columns that are read for other purposes.

    Attributes:
        of_facts: Column name of each fact that the source contains.
        unused: Names of unused columns.
    """

    def __init__(self, names: Sequence[str], used: Iterable[str] = ()) -> None:
        self.of_facts: dict[str, str] = {}
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

    Raises:
        UserError: If several names differ from `wanted` only in case or blanks.
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
    if not math.isfinite(weight):
        raise ValueError(f"weight is {shown(cell)}; expected a number")
    if weight < 0:
        raise ValueError(f"weight is {weight:g}; expected 0 or more")
    return weight if weight != 1 else 1.0  # most rows share one object


def _text(value: object) -> str:
    return "" if value is None or value != value else clean(str(value))  # pandas represents empty cells as NaN
