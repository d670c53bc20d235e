"""Reads small text files that a user names, never waiting for a named pipe; tells files apart by their content."""

from __future__ import annotations

import errno
import hashlib
import os
import stat
from pathlib import Path

LARGEST_BYTES = 2**20


def read_small_text(path: Path, largest_bytes: int = LARGEST_BYTES) -> str:
    """Return the text of a small regular file, in UTF-8.

    Raises:
        OSError: The file is missing, cannot be read, is not a regular one, or is larger than `largest_bytes`.
        ValueError: It is not UTF-8.
    """
    # without O_NONBLOCK, opening a named pipe without a writer blocks
    with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC), "rb") as stream:
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            raise OSError(errno.EINVAL, "not a regular file")
        content = stream.read(largest_bytes + 1)
    if len(content) > largest_bytes:
        raise OSError(errno.EFBIG, f"larger than {largest_bytes >> 10} KiB")
    return content.decode("utf-8")


def sha256_of(path: Path) -> str:
    """Return the sha256 of a file's content, hexadecimal."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
