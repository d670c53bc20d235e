"""Standard output and error that can no longer be written: a training outlasts that, any other script ends by it."""

from __future__ import annotations

import io
import os
import sys
from typing import Any, TextIO

from training.errors import UserError


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


class _EndingFile(_LastingFile):
    """The same, but that write also raises what ends the script."""

    def failed(self, error: OSError) -> None:
        if isinstance(error, BrokenPipeError):
            raise ReaderGone from None
        raise UserError(f"standard output cannot be written ({error.strerror}).") from None


def outlast_readers() -> None:
    """Let this process go on, and say nothing more, if its standard output or error cannot be written."""
    sys.stdout = _replaced(sys.stdout, _LastingFile)
    sys.stderr = _replaced(sys.stderr, _LastingFile)


def end_with_reader() -> None:
    """Let standard output raise `ReaderGone`, or a `UserError` such as that of a full disk, if it cannot be written."""
    sys.stdout = _replaced(sys.stdout, _EndingFile)


def _replaced(stream: TextIO, kind: type[_LastingFile]) -> TextIO:
    if stream is None:  # it was closed before this process started
        return stream
    stream.flush()
    file = io.BufferedWriter(kind(stream.fileno(), "w", closefd=False))
    return io.TextIOWrapper(file, stream.encoding, stream.errors, line_buffering=True)
