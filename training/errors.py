"""Mistakes that belong to the user, and the one line each of them gets.

Everything that a user can get wrong ends in a `UserError`: one line that says what was given, what is
allowed and what to type. The entry scripts print it and exit with `USER_ERROR_EXIT_CODE`, without a traceback.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable
from typing import Any

USER_ERROR_EXIT_CODE = 2
TOO_MANY_BAD_STEPS_EXIT_CODE = 65  # EX_DATAERR of sysexits.h: --max-bad-steps in a row had no finite gradient
DIVERGED_EXIT_CODE = 78  # EX_CONFIG of sysexits.h: the run went its way, and its last epoch had diverged
CANNOT_SAVE_EXIT_CODE = 74  # EX_IOERR of sysexits.h: saves have failed for too long
SECONDS_FOR_RANK_0_TO_SPEAK = 2.0


JOINERS = "\u200c\u200d"  # of letters in Persian and Indic scripts, and of emoji; no terminal obeys them


def printable(text: str) -> str:
    """Escape what a terminal would obey in place of showing it: control characters, line breaks, turns of direction.

    Class names, names of files and metadata come from outside, and may hold anything.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in JOINERS else c.encode("unicode_escape").decode() for c in text)


def one_line(error: object, most: int = 200) -> str:
    """Return a message without line breaks and control characters, and not longer than a line or two."""
    text = printable(" ".join(str(error).split()))
    return text if len(text) <= most else text[:most] + "..."


def shown(value: Any) -> str:
    """Show a value that may be huge, or nested without end."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = 100
    try:
        return one_line(short.repr(value))
    except ValueError:  # Python writes no whole number of more than 4300 digits
        return "a huge number"


class UserError(Exception):
    """A mistake in what the user gave: the message is the single line that is shown, without control characters."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class AgreedError(UserError):
    """A mistake that all ranks know of: each raises it at the same point, and rank 0 alone says it."""


class RunEnded(Exception):
    """The run cannot go on, and all ranks know it: rank 0 says the one line, and each exits with the code.

    Attributes:
        exit_code: of every rank.
        step: the run's step, from 1, at which it gave up.
    """

    def __init__(self, message: str, exit_code: int, step: int) -> None:
        super().__init__(printable(message))
        self.exit_code, self.step = exit_code, step


# What a rank's exception says when not its own code failed: the others' deaths reach it so.
_DEATHS = {
    "DataLoader worker": "a data worker of rank {rank} died: {error}",
    "Too many open files": "rank {rank} may not open enough files: raise 'ulimit -n', or give fewer --workers",
    "by peer": "rank {rank} lost the connection to another rank",
    "that no rank of this run sends": "{error}",
}


def known_death(error: Exception, rank: int) -> str | None:
    """Return one line for an exception that only says that another process died; None for any other."""
    text = " ".join(str(error).split())
    return next((line.format(rank=rank, error=text) for sign, line in _DEATHS.items() if sign in text), None)


def nearest(given: str, allowed: Iterable[str]) -> str:
    """Return the closest allowed name as ' Did you mean ...?', or '' where none is close."""
    matches = difflib.get_close_matches(given.lower(), {a.lower(): a for a in allowed}, n=1, cutoff=0.5)
    return f" Did you mean '{matches[0]}'?" if matches else ""


def unknown_name(kind: str, given: str, allowed: Iterable[str]) -> UserError:
    """Build the error for a name that is in no table: what was given, the nearest name, all that are allowed."""
    names = list(allowed)
    return UserError(f"unknown {kind} '{one_line(given, 100)}'.{nearest(given, names)} Allowed: {', '.join(names)}.")
