"""Prepares a process to start helper processes, such as the workers that read images."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator

from zerovision.training.base.errors import UserError

# A socket's path may have 107 bytes; those of multiprocessing add '/pymp-12345678/listener-12345678'.
LONGEST_PLACE = 107 - 32
SAFE_PATH = "PYTHONSAFEPATH"
OTHER_PLACES = ("/tmp", "/var/tmp", "/dev/shm")


@contextlib.contextmanager
def current_folder_kept_out() -> Iterator[None]:
    """Start every Python process inside the block with -P; also a decorator.

    Processes started with `-c` and `-m`, such as multiprocessing's, would import a random.py from the current folder.
    Outside the block, the caller's processes are not affected.
    """
    before = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        os.environ.pop(SAFE_PATH, None)
        os.environ.update({} if before is None else {SAFE_PATH: before})


def socket_place(subfolder: str = "") -> str:
    """Return the folder for temporary files, or another one if its path is too long for sockets.

    Args:
        subfolder: the subfolder that is to contain the sockets.

    Raises:
        UserError: if there is none.
    """
    wanted, longest = "", LONGEST_PLACE - len(subfolder)
    with contextlib.suppress(OSError):
        wanted = tempfile.gettempdir()
        if len(os.fsencode(wanted)) <= longest:
            return wanted
    for place in OTHER_PLACES:
        if os.access(place, os.W_OK | os.X_OK):
            return place
    wrong = f"{wanted} is too long, at most {longest} bytes" if wanted else "none can be written"
    raise UserError(f"no folder for temporary files ({wrong}): set TMPDIR to another one.")


def is_as_asked(place: str) -> bool:
    """Return whether a folder for temporary files is the one that TMPDIR names, if it is set."""
    return os.path.abspath(os.environ.get("TMPDIR") or place) == place


@contextlib.contextmanager
def temporary_files_in(place: str) -> Iterator[None]:
    """Let `tempfile` use this folder inside the block."""
    before, tempfile.tempdir = tempfile.tempdir, place
    try:
        yield
    finally:
        tempfile.tempdir = before
