"""Decoded images in files that all processes of a machine share, added as they are first read.

A cache is a folder of three files. `pixels` is only ever appended to; entry i of `index` contains the offset of image
i, and a checksum over the entry, the name of the cache and the pixels, which is verified on every read. So a torn,
stale or foreign entry is never taken for an image, whatever was killed when: the image is decoded again. `digests` has
those of the images' files, int64, 0 if unknown.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np

from zerovision.training.base.control_groups import usable_memory
from zerovision.training.data import DataOptions

INDEX, PIXELS, DIGESTS = "index", "pixels", "digests"
RAM_SHARE = 0.25  # of the memory that this process may use, for all caches in it together
DISK_BYTES = 50 * 10**9
_ENTRY = struct.Struct("<QII8s")  # offset in bytes, height and width in pixels, checksum
_WORD = 8


class ImageCache:
    """The images of one data set by position, as uint8 [H, W, C]; can be sent to worker processes.

    Args:
        folder: An existing folder; its name is part of every checksum.
        max_bytes: Most bytes of `pixels`; images beyond are not kept.
        channels: C.

    Attributes:
        is_full: Whether this process no longer adds images.
    """

    def __init__(self, folder: Path, max_bytes: int, channels: int = 3) -> None:
        self.folder, self.max_bytes, self.channels, self.is_full = folder, max_bytes, channels, False
        self._open()

    def get(self, index: int) -> np.ndarray | None:
        """Return the image, None if it is missing or damaged."""
        try:
            entry = os.pread(self._index, _ENTRY.size, index * _ENTRY.size)
            if len(entry) < _ENTRY.size:
                return None
            offset, height, width, checksum = _ENTRY.unpack(entry)
            size = height * width * self.channels
            if size == 0 or offset + size > self.max_bytes:
                return None
            words = np.empty(-(-size // _WORD), dtype=np.uint64)
            if os.preadv(self._pixels, [words.data], offset) < words.nbytes:
                return None
        except OSError:
            return None
        if checksum != self._checksum(index, offset, height, width, words):
            return None
        return words.view(np.uint8)[:size].reshape(height, width, self.channels)

    def put(self, index: int, pixels: np.ndarray) -> None:
        """Add an image, uint8 [H, W, C], unless the cache or the disk is full."""
        if self.is_full:
            return
        height, width, _ = pixels.shape
        words = np.zeros(-(-pixels.size // _WORD), dtype=np.uint64)
        words.view(np.uint8)[: pixels.size] = pixels.reshape(-1)
        try:
            with _locked(self._pixels):
                offset = os.fstat(self._pixels).st_size
                if offset + words.nbytes > self.max_bytes:
                    self.is_full = True
                    return
                _write_all(self._pixels, words.data.cast("B"), offset)
            checksum = self._checksum(index, offset, height, width, words)
            _write_all(self._index, memoryview(_ENTRY.pack(offset, height, width, checksum)), index * _ENTRY.size)
        except OSError:  # no space left, over quota: training continues without
            self.is_full = True

    def digest(self, index: int) -> int:
        """Return the digest of an image's file, 0 if it is not known."""
        try:
            return int.from_bytes(os.pread(self._digests, _WORD, index * _WORD), "little")
        except OSError:
            return 0

    def put_digest(self, index: int, digest: int) -> None:
        """Keep the digest of an image's file."""
        with suppress(OSError):
            os.pwrite(self._digests, digest.to_bytes(_WORD, "little"), index * _WORD)

    def close(self) -> None:
        """Close the files."""
        for descriptor in (self._index, self._pixels, self._digests):
            os.close(descriptor)

    def _open(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._index, self._pixels, self._digests = (
            os.open(self.folder / name, flags, 0o600) for name in (INDEX, PIXELS, DIGESTS)
        )

    def _checksum(self, index: int, offset: int, height: int, width: int, words: np.ndarray) -> bytes:
        # A sum detects a missing page or a flipped bit, at a hundredth of the cost of decoding.
        facts = f"{self.folder.name} {index} {offset} {height} {width} {int(words.sum())}"
        return blake2b(facts.encode(), digest_size=8).digest()

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("folder", "max_bytes", "channels", "is_full")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        try:
            self._open()
        except OSError:  # removed meanwhile: a worker that starts now has no cache
            self._index = self._pixels = self._digests = -1
            self.is_full = True


@contextmanager
def _locked(descriptor: int) -> Iterator[None]:
    """Take the exclusive `flock` of an open file for the block, at most until the process ends."""
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(descriptor, fcntl.LOCK_UN)


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def open_cache(options: DataOptions, key: str, expected_bytes: int) -> tuple[ImageCache | None, str]:
    """Open the cache of a data set, or make it.

    Args:
        options: `cache` is "ram" or "disk".
        key: A file name that changes with everything that decides the pixels.
        expected_bytes: Estimated size of the whole set.

    Returns:
        The cache, None to go without, and one line for the user.
    """
    root, bound = _location(options)
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Also of a link itself. Once the folder is ours nobody else can put another there: /dev/shm is sticky.
        if {root.lstat().st_uid, root.stat().st_uid} != {os.getuid()}:
            raise PermissionError(errno.EPERM, "belongs to another user")
        room = max(0, bound - sum(_size(path.parent) for path in root.glob(f"*/{INDEX}") if path.parent.name != key))
        (root / key).mkdir(mode=0o700, exist_ok=True)
        cache = ImageCache(root / key, room, options.image_channels or 3)
    except OSError as error:
        return None, f"no cache of decoded images: {root}: {error.strerror}"
    note = f"cache of decoded images: {options.cache}, about {expected_bytes / 1e9:.2f} GB in {cache.folder}"
    if expected_bytes > room:
        note += f", of which {room / 1e9:.2f} GB fit beside what is in {root} (--cache-gb): remove what is not needed"
    return cache, note


def _location(options: DataOptions) -> tuple[Path, int]:
    """Return the folder of the caches, each in a folder named by its key, and the most bytes of all together."""
    bound = int(options.cache_gb * 1e9)
    if options.cache == "disk":
        return options.root / "images", bound or DISK_BYTES
    # others may write to /dev/shm too: a folder of our own keeps their files apart from ours
    return Path(f"/dev/shm/zerovision-{os.getuid()}"), bound or int(RAM_SHARE * usable_memory())


def _size(folder: Path) -> int:
    with suppress(FileNotFoundError):  # not there yet, or removed by now
        return sum((folder / name).stat().st_size for name in (INDEX, PIXELS))
    return 0
