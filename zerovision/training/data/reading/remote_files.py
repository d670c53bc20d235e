"""Images in files behind URLs: fetched as ranges of bytes, several at a time, checked, and kept on this machine."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import zlib
from array import array
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from zerovision.training.base.atomic_write import replacing
from zerovision.training.base.errors import FileServerError, UserError
from zerovision.training.data.reading.remote import UNMARKED, State, ask_once, state_of
from zerovision.training.data.reading.retry import patiently

PAGE_BYTES = 2**16  # of which each has a checksum
BLOCK_BYTES = 2**20  # most bytes of a request
CONNECTIONS = 16  # of each process
COUNTER, COUNTER_BYTES = ".added", 8  # of bytes since the last look for what goes
KEPT_SHARE = 0.9  # of a cache that was full
DAMAGED = "these are other bytes than its index was made of"


class ByteRange(NamedTuple):
    """Bytes `start` to `end` of a file, by its number: what is fetched at once."""

    file: int
    start: int
    end: int


def page_checksums(file: Path) -> array[int]:
    """Return the CRC-32 of each page of a local file."""
    with file.open("rb") as stream:
        return array("I", map(zlib.crc32, iter(partial(stream.read, PAGE_BYTES), b"")))


class PieceCache:
    """Pieces of remote files below a folder, for all processes of a machine; what was not used for longest goes first.

    Args:
        folder: The folder.
        max_bytes: Most bytes in it; all processes together may exceed them by a fiftieth.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder, self.max_bytes = folder, max_bytes

    def get(self, key: str, start: int, size: int) -> bytes:
        """Return a part of a piece, b'' if it is not here."""
        with suppress(OSError), open(self.folder / key, "rb", buffering=0) as stream:
            os.utime(stream.fileno())
            return os.pread(stream.fileno(), size, start)
        return b""

    def put(self, key: str, content: bytes) -> None:
        """Keep a piece, unless the disk is full."""
        with suppress(OSError):
            (self.folder / key).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with replacing(self.folder / key) as temporary:
                temporary.write_bytes(content)
        with suppress(OSError):
            self._count(len(content))

    def _count(self, added: int) -> None:
        """Count bytes together with the other processes; look for what goes after each fiftieth of the bound."""
        counter = os.open(self.folder / COUNTER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(counter, fcntl.LOCK_EX)
            added += int.from_bytes(os.pread(counter, COUNTER_BYTES, 0), "little")
            if added * 50 > self.max_bytes:
                self._remove_oldest()
                added = 0
            os.pwrite(counter, added.to_bytes(COUNTER_BYTES, "little"), 0)
        finally:
            os.close(counter)

    def _remove_oldest(self) -> None:
        found = []
        for path in self.folder.glob("*/*"):
            with suppress(OSError):
                found.append(((status := path.stat()).st_mtime_ns, status.st_size, path))
        excess = sum(size for _, size, _ in found) - self.max_bytes
        for _, size, path in sorted(found) if excess > 0 else ():
            path.unlink(missing_ok=True)
            excess -= size
            if excess <= -(1 - KEPT_SHARE) * self.max_bytes:
                break


class RemoteFiles:
    """Reads images of remote files by their offset in bytes; see `Archive`.

    Whole blocks of the files are fetched if what is read at a time fits into the cache, otherwise no more than images.

    Args:
        files: The files.
        states: Of each, see `state_of`.
        checksums: Of the pages of each; none if they are not known.
        cache: Of what is fetched.
        at_a_time: Share of the files that is read for a while before the next begins.
    """

    def __init__(
        self,
        files: Sequence[PurePath],
        states: Sequence[State],
        checksums: Sequence[array[int]],
        cache: PieceCache,
        at_a_time: float = 1.0,
    ) -> None:
        self.files, self._states, self._checksums, self._cache = files, states, checksums, cache
        self._keys = [hashlib.sha256(repr(one).encode()).hexdigest()[:32] for one in zip(files, states, strict=True)]
        self.bytes = sum(size for size, _ in states)
        self.stays, self.fits = (share * self.bytes <= KEPT_SHARE * cache.max_bytes for share in (1.0, at_a_time))
        self._coming: dict[ByteRange, Future[None]] = {}
        self._pool: ThreadPoolExecutor | None = None

    def read(self, archive: int, place: int, size: int) -> bytes:
        """See `Archive`."""
        self.expect([(archive, place, size)])
        low, high = place // PAGE_BYTES * PAGE_BYTES, -(-(place + size) // PAGE_BYTES) * PAGE_BYTES
        try:
            parts = [self._take(piece, low, high) for piece in self._pieces(archive, place, size)]
        except Exception:
            if self._pool:  # for what is expected the end of this process would wait
                self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool, self._coming = None, {}
            raise
        return b"".join(parts)[place - low : place - low + size]

    def expect(self, images: Iterable[tuple[int, int, int]]) -> None:
        """Begin to fetch images that will be read, each given as to `read`."""
        for piece in (piece for image in images for piece in self._pieces(*image)):
            if piece not in self._coming and not (self._cache.folder / self._key(piece)).exists():
                self._pool = self._pool or ThreadPoolExecutor(CONNECTIONS)
                self._coming[piece] = self._pool.submit(self._keep, piece)

    def forget(self) -> None:
        """Remove what is kept of the files, so that it is fetched again."""
        for key in self._keys:
            shutil.rmtree(self._cache.folder / key, ignore_errors=True)

    def forget_unmarked(self) -> None:
        """Remove what is kept of files of which their servers tell no change: it may be of an earlier one."""
        for key in (key for key, state in zip(self._keys, self._states, strict=True) if state[1] == UNMARKED):
            shutil.rmtree(self._cache.folder / key, ignore_errors=True)

    def stream(self, archive: int) -> Any:
        """Return a file as a stream, for pyarrow."""
        from fsspec.spec import AbstractBufferedFile

        class Stream(AbstractBufferedFile):
            def _fetch_range(_, start: int, end: int) -> bytes:
                return self.read(archive, start, end - start)

        return Stream(None, str(self.files[archive]), cache_type="none", size=self._states[archive][0])

    def _pieces(self, file: int, place: int, size: int) -> list[ByteRange]:
        step = BLOCK_BYTES if self.fits else PAGE_BYTES
        end = min(-(-(place + size) // step) * step, self._states[file][0])
        starts = range(place // step * step, end, BLOCK_BYTES)
        return [ByteRange(file, start, min(start + BLOCK_BYTES, end)) for start in starts]

    def _take(self, piece: ByteRange, low: int, high: int) -> bytes:
        """Return the bytes of a piece between two bounds of pages."""
        start, end = max(piece.start, low) - piece.start, min(piece.end, high) - piece.start
        if coming := self._coming.pop(piece, None):
            coming.result()
        content = self._cache.get(self._key(piece), start, end - start)
        if len(content) == end - start and self._is_sound(piece.file, piece.start + start, content):
            return content
        return self._fetch(piece)[start:end]

    def _key(self, piece: ByteRange) -> str:
        return f"{self._keys[piece.file]}/{piece.start}-{piece.end}"

    def _is_sound(self, file: int, start: int, content: bytes) -> bool:
        expected = self._checksums[file][start // PAGE_BYTES :][: -(-len(content) // PAGE_BYTES)]
        pages = (content[place : place + PAGE_BYTES] for place in range(0, len(content), PAGE_BYTES))
        return not self._checksums[file] or array("I", map(zlib.crc32, pages)) == expected

    def _keep(self, piece: ByteRange) -> None:
        self._fetch(piece)  # many of them would not fit into memory

    def _fetch(self, piece: ByteRange) -> bytes:
        file, size = self.files[piece.file], piece.end - piece.start

        def fetched() -> bytes:
            content = ask_once(file, "cat_file", start=piece.start, end=piece.end)
            if len(content) > size:
                raise UserError(f"'{file}': its server gives whole files, no byte ranges: copy it to this machine.")
            if len(content) < size or not self._is_sound(piece.file, piece.start, content):
                raise OSError(errno.EIO, DAMAGED)
            return content

        try:
            content = patiently(fetched, file)
        except FileServerError as error:
            if error.args[1] != DAMAGED:
                raise
            reason = DAMAGED
        except OSError as error:
            reason = str(error.strerror)
        else:
            self._cache.put(self._key(piece), content)
            return content
        with suppress(OSError):
            if state_of(file) != self._states[piece.file]:
                reason = "it has changed since the run began"
        raise UserError(f"'{file}' cannot be read from byte {piece.start} on: {reason}. Restore it and start again.")

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_pool": None, "_coming": {}}


class RemoteImages:
    """Images that are remote files of their own below `root`, each by its number; see `Archive`."""

    def __init__(self, root: PurePath, each: RemoteFiles) -> None:
        self.files, self._each = [root], each

    def read(self, archive: int, place: int, size: int) -> bytes:
        """See `Archive`."""
        return self._each.read(place, 0, size)

    def expect(self, images: Iterable[tuple[int, int, int]]) -> None:
        """See `RemoteFiles`."""
        self._each.expect((place, 0, size) for _, place, size in images)
