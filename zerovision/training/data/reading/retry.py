"""Tries again what a file server, or a machine short of something, refuses for a moment.

Such an error says nothing about the file: it never makes an image a bad one, which would be left out of the training.
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
    *("ECONNRESET", "ECONNABORTED", "ECONNREFUSED", "ENOTCONN"),  # the last one of a FUSE mount whose process has died
)
_OF_THE_MACHINE = ("EMFILE", "ENFILE", "ENOMEM")
PASSING = frozenset(getattr(errno, name) for name in (*_OF_THE_SERVER, *_OF_THE_NETWORK, *_OF_THE_MACHINE))


def patiently(
    action: Callable[[], Result], path: str | os.PathLike[str], waits_s: Sequence[float] = WAITS_SECONDS
) -> Result:
    """Return what `action` returns; if it fails with an error that may pass, try again after 1, 2 and 4 s.

    Args:
        action: Reads the file or folder at `path`; may be called several times.
        path: For the message.
        waits_s: Before each further try.

    Raises:
        FileServerError: It failed with such an error each time.
        OSError: It failed with another one.
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
    """An `os.DirEntry` that asks the server as `patiently` does: it does where an entry is a link, or of no known type.

    Attributes:
        name: As an entry of its folder.
        path: Of the folder, and the name.
    """

    __slots__ = ("_entry", "name", "path")

    def __init__(self, entry: os.DirEntry[str]) -> None:
        self._entry, self.name, self.path = entry, entry.name, entry.path

    def is_dir(self) -> bool:
        """Whether it is, or leads to, a folder."""
        return patiently(self._entry.is_dir, self.path)

    def is_file(self) -> bool:
        """Whether it is, or leads to, a regular file."""
        return patiently(self._entry.is_file, self.path)

    def is_symlink(self) -> bool:
        """Whether it is a link."""
        return patiently(self._entry.is_symlink, self.path)

    def stat(self) -> os.stat_result:
        """Return the status of the file that it is, or leads to."""
        return patiently(self._entry.stat, self.path)


def entries_of(folder: str | os.PathLike[str]) -> list[FolderEntry]:
    """Return the entries of a folder, sorted by name; the errors are those of `patiently`."""

    def listed() -> list[FolderEntry]:
        with os.scandir(folder) as scan:
            return sorted(map(FolderEntry, scan), key=lambda entry: entry.name)

    return patiently(listed, folder)


def is_folder(path: str | os.PathLike[str]) -> bool:
    """As `os.path.isdir`, which takes a server's silence for a no; the error is that of `patiently`."""
    return _is(stat.S_ISDIR, path)


def is_file(path: str | os.PathLike[str]) -> bool:
    """As `os.path.isfile`, likewise."""
    return _is(stat.S_ISREG, path)


def _is(kind: Callable[[int], bool], path: str | os.PathLike[str]) -> bool:
    try:
        return kind(patiently(partial(os.stat, path), path).st_mode)
    except (OSError, ValueError):  # ValueError: a null character in the name
        return False
