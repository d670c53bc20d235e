"""Memory that is kept for saving, which begins where a step has left none."""

from __future__ import annotations

import contextlib
import mmap

SIZES = tuple(2**20 * megabytes for megabytes in (32, 16, 8, 4, 2, 1))  # bytes, of which the largest is taken


class MemoryReserve:
    """Address space of this process that is never touched: room under RLIMIT_DATA and RLIMIT_AS, and no memory.

    A thread that gets no memory for its stack, its variables or its first Python objects ends the process or never
    starts, and raises nothing.
    """

    def __init__(self) -> None:
        self._mapped: mmap.mmap | None = None
        self.take()

    def take(self) -> None:
        """Reserve as much as there is, unless something is reserved already."""
        for size in SIZES:
            if self._mapped is None:
                with contextlib.suppress(OSError):
                    self._mapped = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def give(self) -> None:
        """Give it to whatever needs memory now."""
        if self._mapped is not None:
            self._mapped.close()
            self._mapped = None
