"""Class names: which values are labels in any source, how the classes are ordered, and which classes a label lists.

A text label is used as written, except that leading and trailing blanks are removed and Unicode is normalized to NFC. A
label is a number if it has a numeric type, or if it is an index into given names.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Sequence
from decimal import Decimal
from functools import lru_cache
from typing import NamedTuple, TypeVar

import torch

from zerovision.training.base.errors import UserError, shown
from zerovision.training.data.settings import READ_LISTS

Label = str | int
Named = TypeVar("Named")
UNLABELLED = -1  # the integer label of images without labels, as in many test parts
MOST_DIGITS = 18  # of a number that indexes names
NAMED = 5
_ENDS = re.compile("^[\\s\ufeff\u200b\u2060]+|[\\s\ufeff\u200b\u2060]+$")
_DECIMAL = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)")
_NOTHING = frozenset({"nan", "none", "null", "nil", "n/a", "na", "<na>", "nat", "undefined", "-1"})


@lru_cache(2**16)
def clean(text: str) -> str:
    """Normalize text to NFC, and remove blanks and byte-order marks from both ends."""
    return _ENDS.sub("", unicodedata.normalize("NFC", text))


def label_of(value: object) -> Label | None:
    """Return the label in a cell, a JSON value, an array element or a folder name, or None if there is none.

    The label is a whole number if the value has an integer type, otherwise a name; null and -1 mean no label. If the
    value is not a label, raise ValueError; its message completes a sentence that begins with the location.
    """
    if hasattr(value, "item") and not getattr(value, "shape", ()):
        value = value.item()  # a NumPy scalar
    if isinstance(value, list | tuple | dict) or hasattr(value, "shape"):
        raise ValueError("the label is a list or a struct; expected one name, or one whole number")
    if isinstance(value, bytes):
        value = value.decode("utf-8", "surrogateescape")
    if isinstance(value, str):
        return _name(value)
    if value is None or value == UNLABELLED:
        return None
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, int):
        if value < 0:
            raise ValueError(f"the label is {value}; expected a name, or a whole number from 0")
        return value
    if isinstance(value, float | Decimal):
        raise ValueError(f"the label is {value}, a number with a fraction; expected a name, or a whole number")
    return clean(str(value))  # a date


@lru_cache(2**16)
def _name(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:  # bytes that are not UTF-8, which Python represents as surrogates
        raise ValueError(f"the label {shown(text)} is not encoded as UTF-8") from None
    if not (name := clean(text)):
        raise ValueError("the label is empty")
    return name


def number_classes(labels: Collection[Label], given: Sequence[str], where: str) -> tuple[list[str], dict[Label, int]]:
    """Return the class names in order, and the class index of each label, or raise a UserError.

    Given names (such as those of a Hugging Face ClassLabel) keep their order. If all labels are numbers, even as text,
    they index the names from 0; otherwise each label must be one of the names. Without given names, the classes are the
    labels that occur, in numeric order if all are numbers, otherwise sorted as text.
    """
    if not given:
        if all(isinstance(label, int) for label in labels):
            ordered = sorted(labels)
            return [str(label) for label in ordered], {label: number for number, label in enumerate(ordered)}
        names = sorted({str(label) for label in labels})
    else:
        names = [clean(name) for name in given]
        if all(map(_is_whole, labels)):
            numbers = {label: int(label) for label in labels}
            if (largest := max(numbers.values(), default=0)) >= len(names):
                raise UserError(
                    f"{where} has {len(names)} class names and the label {largest}; expected a number below "
                    f"{len(names)}."
                )
            return names, numbers
    order = {name: number for number, name in enumerate(names)}
    if unknown := sorted({str(label) for label in labels} - order.keys()):
        raise UserError(
            f"{where} has the label {shown(unknown[0])}, which is not one of the {len(names)} class names: "
            f"{', '.join(map(shown, names[:NAMED]))}{', ...' if len(names) > NAMED else ''}."
        )
    return names, {label: order[str(label)] for label in labels}


def read_class_names(content: bytes, file: str) -> list[str]:
    """Return the names in a text file, one per line; lines end with LF, CR LF or CR only.

    Raises:
        UserError: If the file is not UTF-8, or a line between two names is empty.
    """
    try:
        lines = content.decode("utf-8-sig").replace("\r\n", "\n").replace("\r", "\n").split("\n")
    except UnicodeDecodeError:
        raise UserError(f"'{file}' is not encoded as UTF-8: save it as UTF-8, with one class name per line.") from None
    names = [clean(line) for line in lines]
    while names and not names[-1]:
        names.pop()
    if "" in names:
        raise UserError(f"'{file}': line {names.index('') + 1} is empty; expected the name of class {names.index('')}.")
    return names


def first_names(names: Collection[Named], form: Callable[[Named], str] = repr) -> str:
    """Join names for a message; if there are many, only the first few are listed."""
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return ", ".join(map(form, list(names)[:NAMED])) + more


def notes_on_names(names: Sequence[str]) -> Iterator[str]:
    """Yield one note if some class names are probably mistakes."""
    alike = defaultdict(list)
    for name in names:
        alike[_without_spelling(name)].append(name)
    doubts = _doubts([group for group in alike.values() if len(group) > 1], "differ only in case, blanks or digits")
    doubts += _doubts([[name] for name in names if name.casefold() in _NOTHING], "may mean no label")
    lists = [[name] for name in names if re.search(r"[;|]|^[\[{].*[\]}]$", name)]
    doubts += _doubts(lists, f"may be several labels: {READ_LISTS} reads those")
    if any("." in name for name in names) and all(map(_DECIMAL.fullmatch, names)):
        doubts.append(f"all are numbers such as {names[0]}: if they are measurements, use another --label-column")
    if doubts:
        yield f"check these class names; each counts as a class of its own: {'; '.join(doubts)}"


def _doubts(groups: Sequence[Sequence[str]], what: str) -> list[str]:
    named = first_names(groups, lambda group: " and ".join(map(shown, group)))
    return [f"{named} {what}"] if groups else []


def _is_whole(label: Label) -> bool:
    return isinstance(label, int) or (label.isascii() and label.isdigit() and len(label) <= MOST_DIGITS)


def _without_spelling(name: str) -> str:
    plain = "".join(name.casefold().split())
    return str(Decimal(plain).normalize()) if _DECIMAL.fullmatch(plain) and len(plain) < 25 else plain


SEPARATOR = ";"  # between the classes in a label's name


class LabelTargets(NamedTuple):
    """The distinct labels in a data set, each of which stands for any number of classes."""

    names: list[str]  # of the S labels: their classes, separated by semicolons
    targets: torch.Tensor  # float32 [S, K], 1 for each class of a label, otherwise 0


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
    """Return the rarest class of each label, or '' for a label without classes; `images` counts each label's images.

    Some images of each group with the same rarest class are held out, so that rare classes are represented, too.
    """
    counts: Counter[str] = Counter()
    for name, number in zip(names, images, strict=True):
        counts.update(dict.fromkeys(classes_of(name), number))
    return [min(classes_of(name), key=lambda one: (counts[one], one), default="") for name in names]
