"""Prepares a process to start helper processes, such as the workers that read images."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator

from zerovision.training.base.errors import UserError

# A socket's path may have at most 107 bytes; multiprocessing appends '/pymp-12345678/listener-12345678' to the folder.
LONGEST_PLACE = 107 - 32
SAFE_PATH = "PYTHONSAFEPATH"
OTHER_PLACES = ("/tmp", "/var/tmp", "/dev/shm")


@contextlib.contextmanager
def current_folder_kept_out() -> Iterator[None]:
    """Make every Python process that is started inside the block run as with `-P`; also works as a decorator.

    Processes started with `-c` or `-m`, such as those of multiprocessing, would otherwise import a `random.py` from the
    current folder. Processes started outside the block are not affected.
    """
    before = os.environ.get(SAFE_PATH)
    os.environ[SAFE_PATH] = "1"
    try:
        yield
    finally:
        os.environ.pop(SAFE_PATH, None)
        os.environ.update({} if before is None else {SAFE_PATH: before})


def socket_place(subfolder: str = "") -> str:
    """Return the folder for temporary files, or a different folder if its path is too long for sockets.

    Args:
        subfolder: name of the subfolder for the sockets.

    Raises:
        UserError: if no suitable folder can be written.
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
    """Return whether a folder for temporary files is the one that TMPDIR names; also true if TMPDIR is not set."""
    return os.path.abspath(os.environ.get("TMPDIR") or place) == place


@contextlib.contextmanager
def temporary_files_in(place: str) -> Iterator[None]:
    """Make `tempfile` use this folder inside the block."""
    before, tempfile.tempdir = tempfile.tempdir, place
    try:
        yield
    finally:
        tempfile.tempdir = before
