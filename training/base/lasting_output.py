"""Standard output and error that can no longer be written: a training goes on, other scripts go on or end."""

from __future__ import annotations

import io
import os
import sys
from typing import Any, TextIO

from training.base.errors import UserError


class ReaderGone(Exception):
    """Nobody reads standard output any more, as in `predict.py ... | head`."""


class _LastingFile(io.FileIO):
    """A descriptor that leads nowhere from the first write that fails."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:  # the reader of a pipe or socket has gone, the terminal is closed, the disk is full
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            self.failed(error)
            return super().write(data)

    def failed(self, error: OSError) -> None:
        """Go on in silence."""


class _ReportingFile(_LastingFile):
    """The same, but a full disk ends the script; a reader who has gone does not."""

    def failed(self, error: OSError) -> None:
        if not isinstance(error, BrokenPipeError):
            raise UserError(f"standard output cannot be written ({error.strerror}).") from None


class _ProductFile(_ReportingFile):
    """The same, of a script that does nothing but fill its standard output: it ends with the reader, too."""

    def failed(self, error: OSError) -> None:
        if isinstance(error, BrokenPipeError):
            raise ReaderGone from None
        super().failed(error)


def outlast_readers() -> None:
    """Let this process go on, and say nothing more, if its standard output or error cannot be written."""
    sys.stdout = _replaced(sys.stdout, _LastingFile)
    sys.stderr = _replaced(sys.stderr, _LastingFile)


def report_failed_output(*, is_product: bool) -> None:
    """Let standard output raise `UserError` if it cannot be written, `ReaderGone` if nobody reads the product in it."""
    sys.stdout = _replaced(sys.stdout, _ProductFile if is_product else _ReportingFile)


def _replaced(stream: TextIO, kind: type[_LastingFile]) -> TextIO:
    if stream is None:  # it was closed before this process started
        return stream
    stream.flush()
    file = io.BufferedWriter(kind(stream.fileno(), "w", closefd=False))
    return io.TextIOWrapper(file, stream.encoding, stream.errors, line_buffering=True)
