"""Checks whether machines share a folder: one writes a file there, the mark, and the others look for it."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from pathlib import Path

LOOK_SECONDS = 0.1


def existing_part(folder: Path) -> Path:
    """Return the folder, or the nearest one above it that exists."""
    return next(path for path in (folder, *folder.resolve().parents) if path.exists())


def leave_mark(folder: Path) -> Path:
    """Write a file into a folder, or into the nearest existing one above it; the caller removes it.

    Raises:
        OSError: if nothing can be written there.
    """
    handle, name = tempfile.mkstemp(dir=existing_part(folder), prefix=".zerovision-shared-")
    os.close(handle)
    return Path(name)


def sees_mark(mark: Path, seconds: float) -> bool:
    """Return whether another machine's mark is there, or appears within so many seconds.

    A client of a network disk may cache for a while that there is no such name. It asks its server again when a folder
    is opened (close-to-open consistency, nfs(5)), so the mark's folder and the one above are opened before each check.
    """
    deadline = time.monotonic() + seconds
    while True:
        for folder in (mark.parent.parent, mark.parent):
            with contextlib.suppress(OSError):
                os.scandir(folder).close()
        if os.path.exists(mark):
            return True
        if time.monotonic() > deadline:
            return False
        time.sleep(LOOK_SECONDS)
