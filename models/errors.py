"""Errors of the user, and how text from outside is printed.

Everything that a user can get wrong raises a `UserError`: one line with what was given, what is allowed and what to
type. The entry scripts print it and exit with code 2, without a traceback.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable
from typing import Any

from zerovision.models.names_elsewhere import ours

JOINERS = "\u200c\u200d"  # of letters in Persian and Indic scripts, and of emoji; terminals do not interpret them


def printable(text: str) -> str:
    """Escape what a terminal interprets instead of printing: control characters, line breaks, changes of direction.

    Class names, file names and metadata come from outside and may contain anything.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in JOINERS else c.encode("unicode_escape").decode() for c in text)


def one_line(error: object, most: int = 200) -> str:
    """Return a message without line breaks and control characters, cut after `most` characters."""
    text = printable(" ".join(str(error).split()))
    return text if len(text) <= most else text[:most] + "..."


def shown(value: Any) -> str:
    """Return a short text of a value that may be huge or deeply nested."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = 100
    try:
        return one_line(short.repr(value))
    except ValueError:  # Python formats no whole number of more than 4300 digits
        return "a huge number"


class UserError(Exception):
    """A mistake in what the user gave: the message is the single line that is printed, without control characters."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


def nearest(given: str, allowed: Iterable[str], likeness: float = 0.65) -> str:
    """Return ' Did you mean ...?' with the names that begin with what was given, or else the one most like it.

    Args:
        given: the unknown name.
        allowed: the known ones.
        likeness: least share of common letters; '' is returned if no name has it.
    """
    names = {name.lower().lstrip("-"): name for name in allowed}
    word = given.lower().lstrip("-")
    near = [word] if word in names else [name for name in names if len(word) > 2 and name.startswith(word)][:3]
    near = near or difflib.get_close_matches(word, names, n=1, cutoff=likeness)
    return f" Did you mean {' or '.join(repr(names[name]) for name in near)}?" if near else ""


def unknown_name(kind: str, given: str, allowed: Iterable[str], hint: str = "") -> UserError:
    """Build the error for a name that is in no table: what was given, what others mean by it, all that are allowed.

    Args:
        kind: of name.
        given: the unknown one.
        allowed: the known ones.
        hint: a sentence that says more than the tables of names; '' for none.
    """
    names = list(allowed)
    hint = ours(given, names, kind) or hint or nearest(given, names)
    return UserError(f"unknown {kind} '{one_line(given, 100)}'.{hint} Allowed: {', '.join(names)}.")
