"""Retries operations that fail temporarily, on a file server or on a machine short of resources.

A temporary error does not mean that the file is bad, so the image is never marked as unreadable, which would exclude
the image from training.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from zerovision.training.base.errors import FileServerError

Result = TypeVar("Result")

WAITS_SECONDS = (1.0, 2.0, 4.0)
_OF_THE_SERVER = ("ESTALE", "EIO", "EREMOTEIO", "ETIMEDOUT", "EAGAIN", "EBUSY", "ENOLINK", "ECOMM", "ESHUTDOWN")
_OF_THE_NETWORK = (
    *("EHOSTDOWN", "EHOSTUNREACH", "ENETDOWN", "ENETUNREACH", "ENETRESET"),
    *("ECONNRESET", "ECONNABORTED", "ECONNREFUSED", "ENOTCONN"),  # the last: a FUSE mount whose process has died
)
_OF_THE_MACHINE = ("EMFILE", "ENFILE", "ENOMEM")
PASSING = frozenset(getattr(errno, name) for name in (*_OF_THE_SERVER, *_OF_THE_NETWORK, *_OF_THE_MACHINE))


def patiently(
    action: Callable[[], Result], path: str | os.PathLike[str], waits_s: Sequence[float] = WAITS_SECONDS
) -> Result:
    """Return the result of `action`; after a possibly temporary error, retry after 1, 2 and 4 s.

    Args:
        action: Reads the file or folder at `path`; may be called several times.
        path: The path, for messages.
        waits_s: Seconds before each retry.

    Raises:
        FileServerError: If `action` fails with a possibly temporary error each time.
        OSError: If `action` fails with a permanent error.
    """
    try:
        return action()
    except OSError as error:
        if error.errno not in PASSING:
            raise
        if not waits_s:
            raise FileServerError(os.fspath(path), error.strerror or str(error), sum(WAITS_SECONDS)) from None
    time.sleep(waits_s[0])
    return patiently(action, path, waits_s[1:])


class FolderEntry:
    """An `os.DirEntry` that retries if a link, or an entry of unknown type, requires a request to the server."""

    __slots__ = ("_entry", "name", "path")

    def __init__(self, entry: os.DirEntry[str]) -> None:
        self._entry, self.name, self.path = entry, entry.name, entry.path

    def is_dir(self) -> bool:
        """Return whether the entry is a folder or a link to a folder."""
        return patiently(self._entry.is_dir, self.path)

    def is_file(self) -> bool:
        """Return whether the entry is a regular file or a link to a regular file."""
        return patiently(self._entry.is_file, self.path)

    def is_symlink(self) -> bool:
        """Return whether the entry is a symbolic link."""
        return patiently(self._entry.is_symlink, self.path)

    def stat(self) -> os.stat_result:
        """Return the status of the entry, following links."""
        return patiently(self._entry.stat, self.path)


def entries_of(folder: str | os.PathLike[str]) -> list[FolderEntry]:
    """Return the entries of a folder, sorted by name; for errors, see `patiently`."""

    def listed() -> list[FolderEntry]:
        with os.scandir(folder) as scan:
            return sorted(map(FolderEntry, scan), key=lambda entry: entry.name)

    return patiently(listed, folder)


def is_folder(path: str | os.PathLike[str]) -> bool:
    """Like `os.path.isdir`, but raise FileServerError if the server does not respond; see `patiently`."""
    return _is(stat.S_ISDIR, path)


def is_file(path: str | os.PathLike[str]) -> bool:
    """Like `os.path.isfile`, but raise FileServerError if the server does not respond; see `patiently`."""
    return _is(stat.S_ISREG, path)


def _is(kind: Callable[[int], bool], path: str | os.PathLike[str]) -> bool:
    try:
        return kind(patiently(partial(os.stat, path), path).st_mode)
    except (OSError, ValueError):  # ValueError: a null character in the name
        return False
