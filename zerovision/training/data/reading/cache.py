"""A cache of decoded images, in files that all processes on a machine share; images are added when first read.

A cache is a folder of two files. `pixels` is only ever appended to; entry i of `index` contains the offset of image i,
the digest of its file, and a checksum over the entry, the name of the cache and the pixels, which is verified on every
read. Therefore a torn, stale or foreign entry is never used, no matter which process was killed and when; the image is
decoded again instead.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from zerovision.training.base.control_groups import usable_memory
from zerovision.training.base.run_folder import SHARED_MEMORY
from zerovision.training.data import DataOptions

INDEX, PIXELS = "index", "pixels"
RAM_SHARE = 0.25  # of the memory that this process may use, for all caches together
DISK_BYTES = 50 * 10**9
_ENTRY = struct.Struct("<QIIq8s")  # offset in bytes, height and width in pixels, digest of the file, checksum
_WORD = 8


class ImageCache:
    """The images of one data set by position, as uint8 [H, W, C]; a cache can be sent to worker processes.

    Args:
        folder: An existing folder; its name is part of every checksum.
        max_bytes: Largest size of the file `pixels`; images that do not fit are not cached.
        channels: Number of channels.

    Attributes:
        is_full: Whether this process has stopped adding images.
    """

    def __init__(self, folder: Path, max_bytes: int, channels: int = 3) -> None:
        self.folder, self.max_bytes, self.channels, self.is_full = folder, max_bytes, channels, False
        self._open()

    def get(self, index: int) -> tuple[np.ndarray, int] | None:
        """Return an image and the digest of its file; None if the image is missing or damaged."""
        try:
            if (entry := self._entry(index)) is None:
                return None
            *facts, checksum = entry
            offset, height, width, digest = facts
            size = height * width * self.channels
            if size == 0 or offset + size > self.max_bytes:
                return None
            words = np.empty(-(-size // _WORD), dtype=np.uint64)
            if os.preadv(self._pixels, [words.data], offset) < words.nbytes:
                return None
        except OSError:
            return None
        if checksum != self._checksum(index, facts, words):
            return None
        return words.view(np.uint8)[:size].reshape(height, width, self.channels), digest

    def put(self, index: int, pixels: np.ndarray, digest: int) -> None:
        """Add an image, uint8 [H, W, C], and the digest of its file, unless the cache or the disk is full."""
        if self.is_full:
            return
        words = np.zeros(-(-pixels.size // _WORD), dtype=np.uint64)
        words.view(np.uint8)[: pixels.size] = pixels.reshape(-1)
        try:
            fcntl.flock(self._pixels, fcntl.LOCK_EX)  # held at most until the process ends
            try:
                offset = os.fstat(self._pixels).st_size
                if offset + words.nbytes > self.max_bytes:
                    self.is_full = True
                    return
                _write_all(self._pixels, words.data.cast("B"), offset)
            finally:
                fcntl.flock(self._pixels, fcntl.LOCK_UN)
            facts = [offset, *pixels.shape[:2], digest]
            entry = _ENTRY.pack(*facts, self._checksum(index, facts, words))
            _write_all(self._index, memoryview(entry), index * _ENTRY.size)
        except OSError:  # no space left, or over quota: training continues uncached
            self.is_full = True

    def __contains__(self, index: int) -> bool:
        with suppress(OSError):
            return bool((entry := self._entry(index)) and entry[1])
        return False

    def _entry(self, index: int) -> tuple[Any, ...] | None:
        entry = os.pread(self._index, _ENTRY.size, index * _ENTRY.size)
        return _ENTRY.unpack(entry) if len(entry) == _ENTRY.size else None

    def _open(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._index, self._pixels = (os.open(self.folder / name, flags, 0o600) for name in (INDEX, PIXELS))

    def _checksum(self, index: int, facts: Sequence[int], words: np.ndarray) -> bytes:
        # A sum detects a missing page or a flipped bit, at a hundredth of the cost of decoding.
        text = " ".join(map(str, (self.folder.name, index, *facts, int(words.sum()))))
        return blake2b(text.encode(), digest_size=8).digest()

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("folder", "max_bytes", "channels", "is_full")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        try:
            self._open()
        except OSError:  # the folder was removed, so a worker that starts now has no cache
            self._index = self._pixels = -1
            self.is_full = True


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def open_cache(options: DataOptions, key: str, expected_bytes: int) -> tuple[ImageCache | None, str]:
    """Open the cache of a data set, or create it.

    Args:
        options: Options of the data, in which `cache` is "ram" or "disk".
        key: A folder name that depends on everything that determines the pixels.
        expected_bytes: Estimated size of all decoded images.

    Returns:
        The cache, or None if it cannot be opened, and a one-line message for the user.
    """
    root, bound = _location(options)
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Check the owners of a link and of its target. Nobody else can replace our folder: /dev/shm is sticky.
        if {root.lstat().st_uid, root.stat().st_uid} != {os.getuid()}:
            raise PermissionError(errno.EPERM, "belongs to another user")
        room = max(0, bound - sum(_size(path.parent) for path in root.glob(f"*/{INDEX}") if path.parent.name != key))
        (root / key).mkdir(mode=0o700, exist_ok=True)
        cache = ImageCache(root / key, room, options.image_channels or 3)
    except OSError as error:
        return None, f"no cache of decoded images: {root}: {error.strerror}"
    note = f"cache of decoded images: {options.cache}, about {expected_bytes / 1e9:.2f} GB in {cache.folder}"
    if expected_bytes > room:
        note += f", of which {room / 1e9:.2f} GB still fit into {root} (see --cache): remove what you do not need"
    return cache, note


def _location(options: DataOptions) -> tuple[Path, int]:
    """Return the folder of all caches, each in a subfolder named after its key, and their total limit in bytes."""
    bound = int(options.cache_gb * 1e9)
    if options.cache == "disk":
        return options.root / "images", bound or DISK_BYTES
    # other users may write to /dev/shm, so our files are in a folder of our own
    return SHARED_MEMORY / f"zerovision-{os.getuid()}", bound or int(RAM_SHARE * usable_memory())


def _size(folder: Path) -> int:
    with suppress(FileNotFoundError):  # not created yet, or already removed
        return sum((folder / name).stat().st_size for name in (INDEX, PIXELS))
    return 0
