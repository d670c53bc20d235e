"""Decoded images in files that all processes of a machine share, filled as they are first read.

A cache is a folder of two files. `pixels` is only ever appended to; entry i of `index` says where image i lies in it,
together with a checksum over the entry, the name of the cache and the pixels. Each reader checks it, each time. So
nothing that is torn, stale or foreign is ever taken for an image, whatever was killed when: it is decoded again.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

INDEX, PIXELS = "index", "pixels"
_ENTRY = struct.Struct("<QII8s")  # offset in bytes, height and width in pixels, checksum
_WORD = 8


class ImageCache:
    """The images of one data set by position, as uint8 [H, W, 3]; can be sent to worker processes.

    While a process has it open, `flock` holds a shared lock on its index, so that nobody removes it.

    Args:
        folder: An existing folder; its name is part of every checksum.
        max_bytes: Most bytes that `pixels` may take; what does not fit is not kept.

    Attributes:
        is_full: Whether this process has given up adding images.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder, self.max_bytes, self.is_full = folder, max_bytes, False
        self._open()

    def get(self, index: int) -> np.ndarray | None:
        """Return the image, None where it is not there or not whole."""
        try:
            entry = os.pread(self._index, _ENTRY.size, index * _ENTRY.size)
            if len(entry) < _ENTRY.size:
                return None
            offset, height, width, checksum = _ENTRY.unpack(entry)
            size = height * width * 3
            if size == 0 or offset + size > self.max_bytes:
                return None
            words = np.empty(-(-size // _WORD), dtype=np.uint64)
            if os.preadv(self._pixels, [words.data], offset) < words.nbytes:
                return None
        except OSError:
            return None
        if checksum != self._checksum(index, offset, height, width, words):
            return None
        return words.view(np.uint8)[:size].reshape(height, width, 3)

    def put(self, index: int, pixels: np.ndarray) -> None:
        """Keep an image, uint8 [H, W, 3], unless the cache or the disk is full."""
        if self.is_full:
            return
        height, width, _ = pixels.shape
        words = np.zeros(-(-pixels.size // _WORD), dtype=np.uint64)
        words.view(np.uint8)[: pixels.size] = pixels.reshape(-1)
        try:
            with locked(self._pixels):
                offset = os.fstat(self._pixels).st_size
                if offset + words.nbytes > self.max_bytes:
                    self.is_full = True
                    return
                _write_all(self._pixels, words.data.cast("B"), offset)
            checksum = self._checksum(index, offset, height, width, words)
            _write_all(self._index, memoryview(_ENTRY.pack(offset, height, width, checksum)), index * _ENTRY.size)
        except OSError:  # no space left, over quota: training goes on without
            self.is_full = True

    def close(self) -> None:
        """Let go of the files; others may remove them then."""
        os.close(self._index)
        os.close(self._pixels)

    def _open(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._index, self._pixels = (os.open(self.folder / name, flags, 0o600) for name in (INDEX, PIXELS))
        fcntl.flock(self._index, fcntl.LOCK_SH)

    def _checksum(self, index: int, offset: int, height: int, width: int, words: np.ndarray) -> bytes:
        # A sum shows a missing page or a wrong bit, at a hundredth of the cost of decoding.
        facts = f"{self.folder.name} {index} {offset} {height} {width} {int(words.sum())}"
        return blake2b(facts.encode(), digest_size=8).digest()

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "max_bytes": self.max_bytes, "is_full": self.is_full}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        try:
            self._open()
        except OSError:  # somebody has removed it: a worker that starts now goes without
            self._index = self._pixels = -1
            self.is_full = True


@contextmanager
def locked(descriptor: int) -> Iterator[None]:
    """Hold the exclusive `flock` of an open file; others on this machine wait, and it ends with the process."""
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
