"""Making sure that a file is whole, and on the disk, before anything relies on it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def sync_to_disk(path: Path) -> None:
    """Wait until a file's content, or a folder's list of entries, is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a name beside `path` to write to; the file takes the place of `path` where the block ends without error.

    A failure leaves the old file, and nothing beside it.
    """
    temporary = path.with_name(f".{path.name[:100]}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
