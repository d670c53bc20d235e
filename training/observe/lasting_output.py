"""Standard output and error that outlast whoever reads them: writing into a closed pipe does not end a training."""

from __future__ import annotations

import io
import os
import sys
from typing import Any, TextIO


class _LastingFile(io.FileIO):
    """A descriptor that leads nowhere from the first write that fails."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:  # the reader of a pipe or socket has gone, the terminal is closed, the disk is full
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            return super().write(data)


def outlast_readers() -> None:
    """Let this process go on, and say nothing more, if its standard output or error cannot be written."""
    sys.stdout = _lasting(sys.stdout)
    sys.stderr = _lasting(sys.stderr)


def _lasting(stream: TextIO) -> TextIO:
    if stream is None:  # it was closed before this process started
        return stream
    stream.flush()
    file = io.BufferedWriter(_LastingFile(stream.fileno(), "w", closefd=False))
    return io.TextIOWrapper(file, stream.encoding, stream.errors, line_buffering=True)
