"""Several labels of an image, or none: `--task multilabel`, of tables.

Each different set of labels has a number, which is the image's label everywhere that an order, a split or a list of
images is made; the table of the sets turns it into targets.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

from training.base.errors import UserError, shown
from training.base.small_files import as_given

SEPARATOR = ";"  # in the name of a set
SEPARATORS = re.compile(r"[;|]")
OF_COLUMNS = {"1": True, "1.0": True, "true": True, "0": False, "0.0": False, "false": False, "": False}


class LabelSets(NamedTuple):
    """The different sets of labels of a data set.

    Attributes:
        names: of the S sets: of their classes, with a semicolon between.
        targets: float32 [S, K], 1 for each class of a set, else 0.
    """

    names: list[str]
    targets: torch.Tensor

    def images_of_each(self, labels: torch.Tensor) -> list[int]:
        """Return the images of each class: of sets int64 [N], K numbers."""
        counts = torch.bincount(labels, minlength=len(self.names)).double() @ self.targets.double()
        return [int(count) for count in counts]


def columns_of(label_column: str) -> list[str]:
    """Return the columns that `--label-column` names, one for each class; one alone contains lists of classes."""
    return [name.strip() for name in label_column.split(",")]


def set_name(cells: Sequence[str], columns: Sequence[str], place: str) -> str:
    """Return the name of the set of labels of a row.

    Args:
        cells: of the columns.
        columns: their names; each is a class, with 1 or 0 in its cells, unless there is one alone.
        place: of the row, for a message.

    Raises:
        UserError: A cell is neither 0 nor 1, or a column has a name that a list could not contain.
    """
    if len(columns) == 1:
        names = (as_given(name.strip()) for name in SEPARATORS.split(as_given(cells[0])))
        return SEPARATOR.join(sorted({name for name in names if name}))
    chosen = []
    for cell, name in zip(cells, columns, strict=True):
        if cell.strip().lower() not in OF_COLUMNS or SEPARATORS.search(name):
            what = f"{shown(name)} is {shown(cell)}; expected 1 or 0, and no ; or | in the column's name"
            raise UserError(f"{place}: {what}.")
        if OF_COLUMNS[cell.strip().lower()]:
            chosen.append(name)
    return SEPARATOR.join(sorted(chosen))


def classes_of(name: str) -> list[str]:
    """Return the classes of a set."""
    return name.split(SEPARATOR) if name else []


def make_label_sets(names: Iterable[str], class_names: Sequence[str]) -> tuple[LabelSets, list[str]]:
    """Return the sets of these names, and the names of the classes.

    Args:
        names: of the sets, each once.
        class_names: in the order of their numbers; empty for those of the sets, sorted.
    """
    names = list(names)
    classes = list(class_names) or sorted({one for name in names for one in classes_of(name)})
    numbers = {name: number for number, name in enumerate(classes)}
    targets = torch.zeros(len(names), len(classes))
    for row, name in enumerate(names):
        targets[row, [numbers[one] for one in classes_of(name)]] = 1
    return LabelSets(names, targets), classes


def rarest_class(names: Iterable[str]) -> dict[str, str]:
    """Return the rarest class of each set, '' of none: by which images are held out, so that each class has some.

    Args:
        names: of the set of each image.
    """
    sets = Counter(names)
    counts: Counter[str] = Counter()
    for name, images in sets.items():
        counts.update(dict.fromkeys(classes_of(name), images))
    return {name: min(classes_of(name), key=lambda one: (counts[one], one), default="") for name in sets}
