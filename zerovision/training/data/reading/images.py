"""Image files by their names: their bytes, why one cannot be used, and notes on those that are odd.

`read_file` is the only place where the bytes of image files are read.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from zerovision.training.base.errors import UserError
from zerovision.training.data.reading.formats import Refused
from zerovision.training.data.reading.retry import patiently

MAX_FILE_BYTES = 1_500_000_000  # more than MAX_PIXELS take without compression, at 4 channels of 16 bits
MAX_NOTE = 300  # characters


class ImageError(UserError):
    """An image that cannot be used.

    Attributes:
        path: The file, or the position of the image in a data set that is no folder of files.
        reason: One line.
    """

    def __init__(self, path: str | os.PathLike[str], reason: str) -> None:
        self.path = os.fspath(path)
        self.reason = " ".join(reason.split())
        super().__init__(
            f"cannot use image {self.path!r}: {self.reason}. Repair or remove it, or add --bad-images skip."
        )


def read_file(path: str | os.PathLike[str], max_bytes: int = MAX_FILE_BYTES) -> bytes:
    """Return the content of a regular file, without waiting for a FIFO or reading a device.

    Raises:
        ImageError: The file is missing, not a regular one, or larger than `max_bytes`.
        FileServerError: It cannot be read now, see `patiently`.
    """
    try:
        return patiently(lambda: _content(path, max_bytes), path)
    except OSError as error:
        raise ImageError(path, error.strerror or str(error)) from None
    except ValueError as error:  # a null character in the name
        raise ImageError(path, str(error)) from None


def _content(path: str | os.PathLike[str], max_bytes: int) -> bytes:
    # without O_NONBLOCK, opening a FIFO without a writer blocks for ever
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise ImageError(path, "a directory, not a file")
        if not stat.S_ISREG(status.st_mode):
            raise ImageError(path, "not a regular file, but a device, a FIFO or a socket")
        if status.st_size > max_bytes:
            raise ImageError(path, f"{status.st_size / 1e6:.0f} MB, more than the {max_bytes / 1e6:g} MB allowed")
        data = file.read(status.st_size + 1)
    if len(data) > status.st_size:  # such as files below /proc, whose size is given as 0
        raise ImageError(path, f"contains more than the {status.st_size} bytes that the file system gives as its size")
    return data


@contextmanager
def named(path: str | os.PathLike[str], found: dict[str, str] | None = None) -> Iterator[list[str]]:
    """Yield a list for notes on an image that is decoded in the block; raise its refusal with its name.

    Args:
        path: Of the image.
        found: Gets the notes by the path, in one line.
    """
    notes: list[str] = []
    try:
        yield notes
    except Refused as refused:
        raise ImageError(path, str(refused)) from None
    if notes and found is not None:
        found[os.fspath(path)] = " ".join("; ".join(dict.fromkeys(notes)).split())[:MAX_NOTE]
