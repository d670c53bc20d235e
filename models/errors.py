"""Errors of the user, and how text from outside is printed.

Everything that a user can get wrong raises a `UserError`: one line with what was given, what is allowed and what to
type. The entry scripts print it and exit with code 2, without a traceback.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable
from typing import Any

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


def nearest(given: str, allowed: Iterable[str]) -> str:
    """Return the closest allowed name as ' Did you mean ...?', or '' if none is close."""
    matches = difflib.get_close_matches(given.lower(), {a.lower(): a for a in allowed}, n=1, cutoff=0.5)
    return f" Did you mean '{matches[0]}'?" if matches else ""


def unknown_name(kind: str, given: str, allowed: Iterable[str]) -> UserError:
    """Build the error for a name that is in no table: what was given, the nearest name, all that are allowed."""
    names = list(allowed)
    return UserError(f"unknown {kind} '{one_line(given, 100)}'.{nearest(given, names)} Allowed: {', '.join(names)}.")
