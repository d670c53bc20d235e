"""Whether several machines share a folder: a mark that one leaves there, and the others see or do not."""

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
    """Write a file into a folder, or into the nearest one above that exists; whoever calls removes it.

    Raises:
        OSError: nothing can be written there.
    """
    handle, name = tempfile.mkstemp(dir=existing_part(folder), prefix=".zerovision-shared-")
    os.close(handle)
    return Path(name)


def sees_mark(mark: Path, seconds: float) -> bool:
    """Return whether a mark of another machine is there, or comes within so many seconds.

    A network disk may remember for a while that there is no such name. To open a folder lets it ask its server again
    (close-to-open consistency, nfs(5)), so both the mark's and the one above are opened before each look.
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
