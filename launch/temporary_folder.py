"""One temporary folder for a launch and everything that it starts: nothing of it is left behind, not even by kill -9.

The processes of the launch report in it (`training.observe.heartbeat`), and it is their TMPDIR. Who made it locks a
file in it; if that lock is free and no process of the launch lives, the next launch on this machine removes the
folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import tempfile
from collections.abc import Mapping
from pathlib import Path

from launch.process_tree import Launch
from training.observe.heartbeat import OWNER, HeartbeatFolder

PREFIX = "zerovision-"
# A socket's path may have 107 bytes; those of multiprocessing add '/pymp-12345678/listener-12345678'.
LONGEST_PATH = 107 - 32
COMPILE_CACHE = "TORCHINDUCTOR_CACHE_DIR"


def make_temporary_folder(mark: str) -> HeartbeatFolder:
    """Make the folder of the launch with this mark, and remove those of launches that are gone.

    Raises:
        OSError: if there is no place for it.
    """
    remove_abandoned(Path(tempfile.gettempdir()))
    folder = Path(tempfile.mkdtemp(prefix=PREFIX))
    lock = os.open(folder / OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)  # stays open as long as we live
    with contextlib.suppress(OSError):  # no locks, no room: it is never taken for abandoned
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.write(lock, mark.encode())
    return HeartbeatFolder(folder)


def remove_abandoned(place: Path) -> None:
    """Remove the folders in `place` of which neither the maker nor a process of its launch lives."""
    for owner in place.glob(f"{PREFIX}*/{OWNER}"):
        with contextlib.suppress(OSError):
            facts = owner.parent.lstat()
            if facts.st_uid != os.getuid() or owner.parent.is_symlink():
                continue
            with owner.open("rb+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                mark = file.read().decode(errors="replace")
            if mark and not Launch(mark).processes():
                shutil.rmtree(owner.parent, ignore_errors=True)


def private_variables(folder: Path, given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that let all temporary files of a launch's processes lie in its folder.

    Args:
        folder: the launch's folder.
        given: their variables so far.
    """
    # What torch.compile makes is worth keeping, with other compiled code; each machine's apart, as processors differ.
    cache = Path(given["TORCH_EXTENSIONS_DIR"]) / f"inductor-{socket.gethostname()}"
    variables = {COMPILE_CACHE: given.get(COMPILE_CACHE) or str(cache)}
    if len(os.fsencode(folder)) <= LONGEST_PATH:
        variables["TMPDIR"] = str(folder)
    return variables
