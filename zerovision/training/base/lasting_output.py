"""Handles standard output and error that can no longer be written: training continues, other scripts may exit."""

from __future__ import annotations

import atexit
import contextlib
import io
import os
import signal
import sys
import threading
import time
from collections import deque
from typing import Any, TextIO

from zerovision.training.base.errors import UserError

KEEP_UP_SECONDS = 0.5  # longest wait for a write
MOST_WAITING = 16 * 2**20  # most bytes to buffer for standard output, and for standard error


class ReaderGone(Exception):
    """The reader of standard output is gone, as in `predict.py ... | head`."""


class _LastingFile(io.FileIO):
    """A file that discards all output after the first failed write."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:  # the reader of a pipe or socket is gone, the terminal is closed, the disk is full
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())
            os.close(nowhere)
            self.failed(error)
            return super().write(data)

    def failed(self, error: OSError) -> None:
        """Handle the first failed write; unless overridden, do nothing."""


class _UnhurriedFile(_LastingFile):
    """A `_LastingFile` that is not blocked by its reader, such as a paused terminal (Ctrl-S) or a full pipe.

    A thread does the writing. As long as the thread keeps up, each write waits for it, so output normally appears
    immediately and in order. If the thread falls behind, the last `MOST_WAITING` bytes are kept in memory.
    """

    def __init__(self, descriptor: int, mode: str, *, closefd: bool) -> None:
        super().__init__(descriptor, mode, closefd=closefd)
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes, self._left_out_bytes, self._keeps_up = 0, 0, True
        self._changed = threading.Condition()
        self._process = 0  # the process in which the thread runs; a fork does not copy the thread
        with contextlib.suppress(RuntimeError):  # too many threads: everything is written directly
            threading.Thread(target=self._write_waiting, daemon=True).start()
            self._process = os.getpid()

    def write(self, data: Any, /) -> int:
        if self._process != os.getpid():
            return super().write(data)
        content = bytes(data)
        with self._changed:
            self._waiting.append(content)
            self._waiting_bytes += len(content)
            while self._waiting_bytes > MOST_WAITING and len(self._waiting) > 1:
                self._left_out_bytes += len(self._waiting[1])  # the first entry is being written
                self._waiting_bytes -= len(self._waiting[1])
                del self._waiting[1]
            self._changed.notify_all()
            if self._keeps_up:
                self._keeps_up = self._changed.wait_for(lambda: not self._waiting, KEEP_UP_SECONDS)
        return len(content)

    def finish(self, seconds: float | None) -> None:
        """Wait until everything is written, but no longer than `seconds`; None means no limit.

        Later output is written directly, or may be lost if the limit was reached.
        """
        with self._changed:
            if self._changed.wait_for(lambda: not self._waiting, seconds):
                self._process = 0

    def _write_waiting(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                rest = memoryview(self._waiting[0])
                self._waiting_bytes -= len(rest)
            while rest:
                written = super().write(rest)
                if written is None:  # another process made the terminal non-blocking, and it is full
                    time.sleep(KEEP_UP_SECONDS)
                rest = rest[written or 0 :]
            with self._changed:
                self._waiting.popleft()
                if self._left_out_bytes:
                    note = f"\n... {self._left_out_bytes} bytes were dropped: nobody read them ...\n".encode()
                    self._waiting.appendleft(note)
                    self._waiting_bytes, self._left_out_bytes = self._waiting_bytes + len(note), 0
                self._keeps_up = self._keeps_up or not self._waiting
                self._changed.notify_all()


def outlast_readers() -> None:
    """Keep this process running if its standard output or error cannot be written, and never block on a reader."""
    sys.stdout = _replaced(sys.stdout, _UnhurriedFile)
    sys.stderr = _replaced(sys.stderr, _UnhurriedFile)
    atexit.register(_finish_at_exit)


def _finish_at_exit() -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # they were handled until now; from here on, they end the wait
        if signal.getsignal(number) != signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)
    finish_output(None)


def finish_output(seconds: float | None) -> None:
    """Before the process ends, wait until standard output and error are written, up to `seconds` for each."""
    for stream in (sys.stdout, sys.stderr):
        file = getattr(getattr(stream, "buffer", None), "raw", None)
        if isinstance(file, _UnhurriedFile):
            stream.flush()
            file.finish(seconds)


def report_failed_output(*, is_product: bool) -> None:
    """Make standard output raise `UserError` if writing fails, or `ReaderGone` if its reader is gone.

    If standard output is not the product of the script, the script continues without a reader instead.
    """

    class Reporting(_LastingFile):
        def failed(self, error: OSError) -> None:
            if not isinstance(error, BrokenPipeError):
                raise UserError(f"cannot write to standard output ({error.strerror}).") from None
            if is_product:
                raise ReaderGone from None

    sys.stdout = _replaced(sys.stdout, Reporting)


def _replaced(stream: TextIO, kind: type[_LastingFile]) -> TextIO:
    if stream is None:  # it was closed before this process started
        return stream
    stream.flush()
    file = io.BufferedWriter(kind(stream.fileno(), "w", closefd=False))
    return io.TextIOWrapper(file, stream.encoding, stream.errors, line_buffering=True)
