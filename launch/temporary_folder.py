"""One temporary folder for a launch and everything that it starts: nothing of it is left behind, not even by kill -9.

It holds the ranks' heartbeats (`training.base.heartbeat`) and is their TMPDIR. The process that made it locks a file
in it; if that lock is free and no process of the launch lives, the next launch on this machine removes the folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from launch.heartbeat_reader import OWNER, HeartbeatFolder
from launch.process_tree import MARK, Launch, extensions_folder
from training.base.errors import UserError
from training.base.heartbeat import FOLDER_VARIABLE
from training.base.helper_processes import is_as_asked, socket_place

PREFIX = "zerovision-"
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
MOST_DESCRIPTORS = 4096


@contextlib.contextmanager
def launch_folder(launch: Launch, stop_timeout_s: float) -> Iterator[HeartbeatFolder]:
    """Make the temporary folder of a launch, and remove it at the end.

    Args:
        launch: what is started; if this process is killed with -9, its ranks are stopped.
        stop_timeout_s: seconds that these then have to save and leave.

    Raises:
        UserError: if no folder can be made.
    """
    try:
        folder = make_temporary_folder(launch.mark)
    except OSError as error:
        raise UserError(f"no temporary folder: {error}. Set TMPDIR to a folder that can be written.") from None
    guard_pipe = _start_guard(launch, folder.path, stop_timeout_s)
    try:
        yield folder
    finally:
        shutil.rmtree(folder.path, ignore_errors=True)
        with contextlib.suppress(BrokenPipeError):
            os.write(guard_pipe, b"0")


def _start_guard(launch: Launch, folder: Path, stop_timeout_s: float) -> int:
    """Start a process that stops the ranks if this one is killed with -9; a byte on the returned pipe ends it."""
    reading, writing = os.pipe()
    if os.fork():
        os.close(reading)
        return writing
    os.setsid()
    # Whoever waits for the end of the supervisor's own connections shall not wait for this process.
    os.closerange(3, reading)
    os.closerange(reading + 1, MOST_DESCRIPTORS)
    if not os.read(reading, 1):
        launch.stop(signal.SIGTERM, stop_timeout_s)
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def make_temporary_folder(mark: str) -> HeartbeatFolder:
    """Make the folder of the launch with this mark, and remove those of launches that are gone.

    Raises:
        OSError, UserError: if there is no place for it.
    """
    place = socket_place(f"/{PREFIX}12345678")
    if not is_as_asked(place):
        wrong = "it cannot be written, or its name is too long for sockets in it"
        print(f"note: {place} is used instead of TMPDIR: {wrong}", file=sys.stderr, flush=True)
    remove_abandoned(Path(place))
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
    lock = os.open(folder / OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)  # open as long as this process lives
    with contextlib.suppress(OSError):  # without locks or room the folder is never taken for abandoned
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


def launch_environment(launch: Launch, folder: HeartbeatFolder, given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a launch's processes: those given, the launch's mark, and where temporary files go."""
    environment = {name: value for name, value in given.items() if name not in RANK_VARIABLES}
    environment |= private_variables(folder.path, environment)
    return environment | {MARK: launch.mark, FOLDER_VARIABLE: str(folder.path)}


def private_variables(folder: Path, given: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that put all temporary files of a launch's processes into its folder.

    Args:
        folder: the launch's folder.
        given: their variables so far.
    """
    extensions = given.get("TORCH_EXTENSIONS_DIR") or extensions_folder()
    return {"TORCH_EXTENSIONS_DIR": extensions, "TMPDIR": str(folder)}
