"""Exit codes and errors of a training; a user's mistakes are `zerovision.models.errors.UserError`."""

from __future__ import annotations

from zerovision.models.errors import UserError, nearest, one_line, printable, shown, unknown_name

__all__ = [
    "AgreedError",
    "AnotherStartNeededError",
    "FileServerError",
    "RunEnded",
    "UserError",
    "known_failure",
    "nearest",
    "one_line",
    "printable",
    "shown",
    "unknown_name",
]

USER_ERROR_EXIT_CODE = 2
TOO_MANY_BAD_STEPS_EXIT_CODE = 65  # EX_DATAERR of sysexits.h: --max-bad-steps in a row had no finite gradient
DIVERGED_EXIT_CODE = 78  # EX_CONFIG of sysexits.h: the run finished, and its last epoch had diverged
CANNOT_SAVE_EXIT_CODE = 74  # EX_IOERR of sysexits.h: saves have failed for too long
WRONG_GRADIENT_EXIT_CODE = 70  # EX_SOFTWARE of sysexits.h: --audit has found a machine that computes wrong
OUT_OF_MEMORY_EXIT_CODE = 71  # EX_OSERR of sysexits.h: a rank could not get memory
FILE_SERVER_EXIT_CODE = 75  # EX_TEMPFAIL of sysexits.h: another start may succeed, as where images cannot be read now
RANK_0_MESSAGE_SECONDS = 2.0  # a launcher ends all ranks when one exits: the others wait until rank 0 has printed


class AgreedError(UserError):
    """A mistake that every rank raises at the same point; rank 0 alone prints it."""


class FileServerError(Exception):
    """A file or folder cannot be read now, which is no fault of its own: no mistake of the user's, no bad image.

    Args:
        path: of the file or folder.
        reason: as the system gives it.
        seconds: how long it was tried.
    """

    def __init__(self, path: str, reason: str, seconds: float) -> None:
        super().__init__(path, reason, seconds)  # all of them, so that it can be sent between processes

    def __str__(self) -> str:
        path, reason, seconds = self.args
        return (
            f"{path!r} cannot be read: {reason}, also after {seconds:g} s. That is a fault of the file server or of "
            "this machine, not of the file: start again when it is mended."
        )


class AnotherStartNeededError(Exception):
    """This start cannot go on, and another one, as launchers make it, can; the line says why."""


class RunEnded(Exception):
    """The run cannot continue: every rank raises this and exits with the code, and rank 0 prints the message.

    Attributes:
        exit_code: of every rank.
        step: the run's step, from 1, at which it gave up.
    """

    def __init__(self, message: str, exit_code: int, step: int) -> None:
        super().__init__(printable(message))
        self.exit_code, self.step = exit_code, step


# By a part of the exception's text: failures of other processes, or of limits, rather than of a rank's own code.
_KNOWN_FAILURES = {
    "DataLoader worker": "a data worker of rank {rank} died: {error}",
    "Too many open files": "rank {rank} may not open enough files: raise 'ulimit -n', or give fewer --workers",
    "by peer": "rank {rank} lost the connection to another rank",
    "that no rank of this run sends": "{error}",
}


def known_failure(error: Exception, rank: int) -> str | None:
    """Return one line for an exception caused by another process or a limit; None for any other."""
    text = " ".join(str(error).split())
    return next((line.format(rank=rank, error=text) for sign, line in _KNOWN_FAILURES.items() if sign in text), None)
