"""Downloads whole files from URLs into a local folder; if it is full, the least recently used files are removed."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import time
import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path, PurePath
from typing import Any

from filelock import FileLock

from zerovision.training.base.errors import FileServerError, UserError
from zerovision.training.base.files import replacing
from zerovision.training.data.images import Archive
from zerovision.training.data.reading.remote import State, ask, state_of
from zerovision.training.data.reading.retry import patiently

BLOCK_BYTES = 2**22  # per request
CONNECTIONS = 16  # per process
COUNTER, COUNTER_BYTES = ".added", 8  # counts the bytes added since the last search for files to remove
NAME_DIGITS = 32  # of a copy's name
KEPT_SHARE = 0.9  # of the limit, after a full folder is cleaned up
DAMAGED = "its bytes differ from those that its index describes"
UNKNOWN_CHECKSUM = 0


def checksum_of(file: Path) -> int:
    """Return the CRC-32 of a local file."""
    checksum = 0
    with file.open("rb") as stream:
        while block := stream.read(BLOCK_BYTES):
            checksum = zlib.crc32(block, checksum)
    return checksum


class Copies:
    """Local copies of remote files, in a folder that is shared by all processes on a machine.

    A copy's size and modification time equal the state of the remote file. `max_bytes` is the largest size of the
    folder, not counting downloads in progress; all processes together may exceed it by 2 %.
    """

    def __init__(self, folder: Path, max_bytes: int, files: Sequence[PurePath], states: Sequence[State]) -> None:
        self.folder, self.max_bytes, self.files, self.states = folder, max_bytes, files, states
        names = (hashlib.sha256(repr(one).encode()).hexdigest() for one in zip(files, states, strict=True))
        self.paths = [folder / name[:NAME_DIGITS] for name in names]  # of the copies, which may be missing
        self.checksums = [UNKNOWN_CHECKSUM] * len(files)  # of the files; see `checksum_of`
        self._coming: dict[int, Future[None]] = {}
        self._pool: ThreadPoolExecutor | None = None

    def fetch(self, number: int) -> Path:
        """Wait for the copy of the file with this index, and return the path of the copy.

        Raise a UserError if the file is unavailable or has changed, or FileServerError if the server does not respond.
        """
        path, times = self.paths[number], (time.time_ns(), self.states[number][1])
        try:
            if coming := self._coming.pop(number, None):
                coming.result()
            with suppress(FileNotFoundError):
                os.utime(path, ns=times)
                return path
            self._fetch(number)
        except Exception:
            if self._pool:  # otherwise this process would wait for pending downloads before it exits
                self._pool.shutdown(wait=False, cancel_futures=True)
            self._pool, self._coming = None, {}
            raise
        return path

    def expect(self, numbers: Iterable[int]) -> None:
        """Start fetching files that will be read."""
        for number in dict.fromkeys(numbers):
            if number not in self._coming and not self.paths[number].exists():
                self._pool = self._pool or ThreadPoolExecutor(CONNECTIONS)
                self._coming[number] = self._pool.submit(self._fetch, number)

    def _fetch(self, number: int) -> None:
        file, path, (size, mark) = self.files[number], self.paths[number], self.states[number]
        with FileLock(self.folder / f".{path.name[:2]}.lock"):
            if path.exists():
                return
            try:
                with replacing(path) as temporary:
                    patiently(partial(self._download, number, temporary), file)
                    os.utime(temporary, ns=(time.time_ns(), mark))
                self._count(size, path)
                return
            except FileServerError as error:
                if error.args[1] != DAMAGED:
                    raise
                reason = DAMAGED
            except OSError as error:
                reason = str(error.strerror)
        with suppress(OSError):
            if state_of(file) != self.states[number]:
                reason = "it has changed since the run began"
        raise UserError(f"'{file}' cannot be copied to '{self.folder}': {reason}. Restore it and start again.")

    def _download(self, number: int, path: Path) -> None:
        file, (size, _), checksum = self.files[number], self.states[number], 0
        with path.open("wb") as stream:
            for start in range(0, size, BLOCK_BYTES):
                end = min(start + BLOCK_BYTES, size)
                block = ask(file, "cat_file", start=start, end=end)
                if len(block) > end - start:
                    raise UserError(f"'{file}': its server does not support byte ranges: copy it to this machine.")
                if len(block) < end - start:
                    raise OSError(errno.EIO, DAMAGED)
                checksum = zlib.crc32(block, checksum)
                stream.write(block)
        if self.checksums[number] not in (UNKNOWN_CHECKSUM, checksum):
            raise OSError(errno.EIO, DAMAGED)

    def _count(self, added: int, newest: Path) -> None:
        """Add to all processes' byte count; each time a fiftieth of the limit is added, look for files to remove."""
        counter = os.open(self.folder / COUNTER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(counter, fcntl.LOCK_EX)
            added += int.from_bytes(os.pread(counter, COUNTER_BYTES, 0), "little")
            if added * 50 > self.max_bytes:
                self._remove_oldest(newest)
                added = 0
            os.pwrite(counter, added.to_bytes(COUNTER_BYTES, "little"), 0)
        finally:
            os.close(counter)

    def _remove_oldest(self, newest: Path) -> None:
        found = []
        for path in self.folder.glob("[0-9a-f]" * NAME_DIGITS):
            with suppress(OSError):
                found.append(((status := path.stat()).st_atime_ns, status.st_size, path))
        excess = sum(size for _, size, _ in found) - self.max_bytes
        for _, size, path in sorted(found) if excess > 0 else ():
            if path != newest:
                path.unlink(missing_ok=True)
                excess -= size
            if excess <= -(1 - KEPT_SHARE) * self.max_bytes:
                break

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_pool": None, "_coming": {}}


class RemoteArchive(Archive):
    """Reads files at URLs from their local copies, which `archive` reads.

    The names of single image files are relative to `folder`, which is None for archives.
    """

    is_remote = True

    def __init__(self, copies: Copies, archive: Archive, folder: PurePath | None = None) -> None:
        self._copies, self._archive, self.is_of_files = copies, archive, folder is not None
        self.files = [folder] * len(copies.files) if folder else copies.files

    def read(self, file: int, place: int, size: int) -> bytes:
        """See `Archive`."""
        while True:
            copy = self._copies.fetch(file)
            try:
                return self._archive.read(file, place, size)
            except UserError as error:
                if copy.exists():  # another process may have removed it
                    raise UserError(str(error).replace(str(copy), str(self._copies.files[file]))) from None

    def expect(self, files: Iterable[int]) -> None:
        """See `Archive`."""
        self._copies.expect(files)

    def check_room(self, part: str, files: Iterable[int]) -> None:
        """See `Archive`."""
        size = sum(self._copies.states[file][0] for file in {*files})
        if size > self._copies.max_bytes and not self.is_of_files:
            raise UserError(
                f"the images of the {part} part are in {size / 1e9:.3g} GB of files, but --remote-cache-gb keeps "
                f"{self._copies.max_bytes / 1e9:g}: raise it, or pack the data with scripts/pack.py."
            )
