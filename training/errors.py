"""Exit codes and errors of a training; a user's mistakes are `models.errors.UserError`."""

from __future__ import annotations

from models.errors import UserError, nearest, one_line, printable, shown, unknown_name

__all__ = [
    "AgreedError",
    "RunEnded",
    "UserError",
    "known_death",
    "nearest",
    "one_line",
    "printable",
    "shown",
    "unknown_name",
]

USER_ERROR_EXIT_CODE = 2
TOO_MANY_BAD_STEPS_EXIT_CODE = 65  # EX_DATAERR of sysexits.h: --max-bad-steps in a row had no finite gradient
DIVERGED_EXIT_CODE = 78  # EX_CONFIG of sysexits.h: the run went its way, and its last epoch had diverged
CANNOT_SAVE_EXIT_CODE = 74  # EX_IOERR of sysexits.h: saves have failed for too long
SECONDS_FOR_RANK_0_TO_SPEAK = 2.0


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
