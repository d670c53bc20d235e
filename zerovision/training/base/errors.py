"""User errors, exit codes, and the printing of untrusted text.

Every user mistake raises a `UserError`: one line that says what was given, what is allowed and what to type. The entry
scripts print this line and exit with code 2, without a traceback.
"""

from __future__ import annotations

import difflib
import reprlib
import sys
from collections.abc import Collection, Iterable
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from zerovision.training.base.run_folder import as_typed, cure_of_missing

USER_ERROR_EXIT_CODE = 2
TOO_MANY_BAD_STEPS_EXIT_CODE = 65  # EX_DATAERR of sysexits.h: --max-bad-steps steps in a row had no finite gradient
DIVERGED_EXIT_CODE = 78  # EX_CONFIG of sysexits.h: the run finished, and its last epoch had diverged
CANNOT_SAVE_EXIT_CODE = 74  # EX_IOERR of sysexits.h: saves have failed for too long
WRONG_GRADIENT_EXIT_CODE = 70  # EX_SOFTWARE of sysexits.h: --audit has found a machine that computes wrong results
OUT_OF_MEMORY_EXIT_CODE = 71  # EX_OSERR of sysexits.h: a rank could not get memory
FILE_SERVER_EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: another start may succeed, e.g. after a file server failed
RANK_0_MESSAGE_SECONDS = 2.0  # a launcher ends all ranks when one exits, so the other ranks let rank 0 print first
JOINERS = "\u200c\u200d"  # join letters in Persian and Indic scripts, and emoji; terminals do not interpret them


def printable(text: str) -> str:
    """Escape everything that a terminal would interpret: control characters, line breaks, changes of text direction.

    Class names, file names and metadata come from outside and may contain anything.
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() or c in JOINERS else c.encode("unicode_escape").decode() for c in text)


def one_line(error: object, most: int = 200) -> str:
    """Return a message without line breaks or control characters, truncated after `most` characters."""
    text = printable(" ".join(str(error).split()))
    return text if len(text) <= most else text[:most] + "..."


def shown(value: Any) -> str:
    """Return a short representation of a value that may be huge or deeply nested."""
    short = reprlib.Repr()
    short.maxstring = short.maxother = 100
    try:
        return one_line(short.repr(value))
    except ValueError:  # Python does not format integers of more than 4300 digits
        return "a huge number"


class UserError(Exception):
    """A mistake in the user's input; the message is the single line to print, without control characters.

    Commands in the message are shown as the user can type them; see `as_typed`.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(as_typed(message)))


def nearest(given: str, allowed: Iterable[str]) -> str:
    """Return ' Did you mean ...?' with the names that begin with the given name, or with the most similar name.

    Args:
        given: the unknown name.
        allowed: the known names.

    Returns:
        The question, or '' if no name is similar.
    """
    names = {name.lower().lstrip("-"): name for name in allowed}
    word = given.lower().lstrip("-")
    near = [word] if word in names else [name for name in names if len(word) > 2 and name.startswith(word)][:3]
    near = near or difflib.get_close_matches(word, names, n=1, cutoff=0.65)
    return f" Did you mean {' or '.join(repr(names[name]) for name in near)}?" if near else ""


def either(names: Iterable[str]) -> str:
    """Return the names in one phrase: a; a or b; a, b or c."""
    *before, last = names
    return f"{', '.join(before)} or {last}" if before else last


def check_name(kind: str, given: str, allowed: Collection[str], hint: str = "") -> None:
    """Check that a name is known.

    Args:
        kind: kind of name.
        given: the name.
        allowed: the known names.
        hint: an additional sentence for the message, or ''.

    Raises:
        UserError: for an unknown name: what was given, what the name means in other trainers, and what is allowed.
    """
    if given not in allowed:
        hint = ours(given, allowed, kind) or hint or nearest(given, allowed)
        raise UserError(f"unknown {kind} '{one_line(given, 100)}'.{hint} Allowed: {', '.join(allowed)}.")


@cache
def names_elsewhere() -> dict[str, Any]:
    """Return the table of other trainers' names; it is read only after a mistake."""
    import yaml

    return yaml.safe_load(Path(__file__).with_name("names_elsewhere.yaml").read_text(encoding="utf-8"))


def plain(word: str) -> str:
    """Normalize a name for comparison: lower case, '-' for '_', no leading dashes, no section such as `trainer.`."""
    return word.lower().replace("_", "-").lstrip("-").rpartition(".")[2]


def ours(word: str, here: Collection[str], kind: str = "") -> str:
    """Return a sentence with our name for another trainer's word, or '' if no table contains the word.

    Args:
        word: the word as the user gave it.
        here: the names that exist in this context; no other name is suggested.
        kind: kind of name, a key of the table's `values`; '' for a flag.
    """
    tables = names_elsewhere()
    for answer, words in (tables["values"].get(kind, {}) if kind else tables["flags"]).items():
        if plain(word) not in words.split():
            continue
        if answer.endswith("."):
            return f" {answer}"
        name = answer.split()[0].rstrip(",")
        family, colon, _ = name.partition(":")
        if name in here or (colon and any(one.startswith(family + colon) for one in here)):
            return f" Use {answer}."
    return ""


class AgreedError(UserError):
    """A user error that every rank raises at the same point; only rank 0 prints it."""


class FileServerError(Exception):
    """A file or folder temporarily cannot be read; neither the user nor the file is at fault.

    Args:
        path: path to the file or folder.
        reason: the system's message.
        seconds: number of seconds for which reading was retried.
    """

    def __init__(self, path: str, reason: str, seconds: float) -> None:
        super().__init__(path, reason, seconds)  # all arguments, so that the error can be pickled

    def __str__(self) -> str:
        path, reason, seconds = self.args
        return f"{path!r} cannot be read: {reason}, even after {seconds:g} s. Fix the file server, then start again."


class AnotherStartNeededError(Exception):
    """This start cannot continue, but another start by a launcher can; the message says why."""


class RunEnded(Exception):
    """The run cannot continue: every rank raises this and exits with `exit_code`, and rank 0 prints the message.

    Attributes:
        exit_code: the exit code of every rank.
        step: the step, counted from 1, at which the run gave up.
    """

    def __init__(self, message: str, exit_code: int, step: int) -> None:
        super().__init__(printable(message))
        self.exit_code, self.step = exit_code, step


# By part of the exception's text: failures caused by other processes or by limits, not by a rank's own code.
_KNOWN_FAILURES = {
    "DataLoader worker": "a data worker of rank {rank} died: {error}",
    "Too many open files": "rank {rank} cannot open enough files: raise 'ulimit -n', or use fewer --workers",
    "by peer": "rank {rank} lost the connection to another rank",
    "that no rank of this run sends": "{error}",
}


def check_installed(*modules: str) -> None:
    """Raise a UserError that says what to type for the first missing module; no module is imported."""
    for name in modules:
        if find_spec(name) is None:
            raise UserError(f"{sys.executable} has no module {name!r}: {cure_of_missing(name)}.")


def known_failure(error: Exception, rank: int) -> str | None:
    """Return one line for an exception caused by another process or a limit, or None for any other exception."""
    text = " ".join(str(error).split())
    return next((line.format(rank=rank, error=text) for sign, line in _KNOWN_FAILURES.items() if sign in text), None)
