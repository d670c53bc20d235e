"""Labels that stand for any number of classes: their names, which list the classes, and their targets."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import torch

SEPARATOR = ";"  # between the classes in a label's name


class LabelTargets(NamedTuple):
    """The distinct labels in a data set, each of which stands for any number of classes.

    Attributes:
        names: Names of the S labels: their classes, separated by semicolons.
        targets: float32 [S, K], 1 for each class of a label, otherwise 0.
    """

    names: list[str]
    targets: torch.Tensor


def classes_of(name: str) -> list[str]:
    """Return the classes that a label stands for, given its name."""
    return name.split(SEPARATOR) if name else []


def targets_of(names: list[str], class_names: Sequence[str]) -> LabelTargets:
    """Return the targets of the labels with these names, without duplicates, for the classes in this order."""
    numbers = {name: number for number, name in enumerate(class_names)}
    targets = torch.zeros(len(names), len(class_names))
    for row, name in enumerate(names):
        targets[row, [numbers[one] for one in classes_of(name)]] = 1
    return LabelTargets(names, targets)


def rarest_classes(names: Sequence[str], images: Sequence[int]) -> list[str]:
    """Return the rarest class of each label, or '' for a label without classes.

    Some images of each group with the same rarest class are held out, so that rare classes are represented, too.

    Args:
        names: Names of the labels.
        images: Number of images with each label.
    """
    counts: Counter[str] = Counter()
    for name, number in zip(names, images, strict=True):
        counts.update(dict.fromkeys(classes_of(name), number))
    return [min(classes_of(name), key=lambda one: (counts[one], one), default="") for name in names]
