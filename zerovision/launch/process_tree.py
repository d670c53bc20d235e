"""The processes of one launch, identified by a mark in their environment, and their temporary folder.

The folder contains the ranks' heartbeats and is their TMPDIR. It is always removed, even after kill -9: its creator
locks a file in it, and the next launch on this machine removes the folder if that lock is free and no process of the
launch that created it is still running.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping
from pathlib import Path

import psutil

from zerovision.training.base.errors import UserError
from zerovision.training.base.files import process_space
from zerovision.training.base.heartbeat import (
    CHECKPOINT,
    FOLDER_VARIABLE,
    RUN_NAME,
    SUCCESS,
    Heartbeat,
    beat_of,
    stack_path,
)
from zerovision.training.base.heartbeat import LAUNCH_VARIABLE as MARK
from zerovision.training.base.helper_processes import is_as_asked, socket_place
from zerovision.training.world.launchers import RANK_VARIABLES

POLL_SECONDS = 0.1
LONGEST_BUILD_SECONDS = 3600.0
KILL_SECONDS = 30.0  # do not wait any longer for a process that the kernel does not end
PREFIX = "zerovision-"
OWNER = "owner"  # file with the launch's mark, locked by the process that created the folder


class LaunchProcesses:
    """All processes of one launch on this machine, across its restarts."""

    def __init__(self, mark: str = "") -> None:
        """Use the mark of a launch that another process or machine started, or create a new mark if none is given."""
        self.mark = mark or uuid.uuid4().hex

    def processes(self) -> list[psutil.Process]:
        """Return every live process of this launch."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):  # gone, or another user's
                if process.environ().get(MARK) == self.mark and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
        return found

    def kill(self, spared_pid: int = 0) -> None:
        """Kill every process of this launch, except the spared one."""
        deadline = time.monotonic() + KILL_SECONDS
        while time.monotonic() < deadline:
            if not (processes := [process for process in self.processes() if process.pid != spared_pid]):
                return
            for process in processes:
                send(process, signal.SIGKILL)
            time.sleep(POLL_SECONDS)


def send(process: psutil.Process, number: int) -> None:
    """Send a signal to a process that may just have ended."""
    with contextlib.suppress(psutil.NoSuchProcess):
        process.send_signal(number)


def is_alive(process: psutil.Process) -> bool:
    """Return whether a process, even a stopped one, exists and is not a zombie."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def code_of_zombie(pid: int) -> int | None:
    """Return the exit code of a zombie, in Popen's form; None for any other process."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if fields[0] == "Z":
            return os.waitstatus_to_exitcode(int(fields[49]))
    return None


def shell_exit_code(code: int) -> int:
    """Return the exit code in the shell's form: 128 + n for signal n, which Popen reports as -n."""
    return 128 - code if code < 0 else code


def remove_stale_build_locks(folder: Path) -> None:
    """Remove the locks of compile jobs that have ended; print a note about jobs that may be running on another machine.

    torch keeps a lock's file open while it compiles, so locks in use on this machine are known. Ranks sign their locks
    with `process_space`; a lock without this machine's signature is stale after `LONGEST_BUILD_SECONDS`.
    """
    locks = {str(path) for path in folder.glob("**/lock")}
    for process in psutil.process_iter() if locks else ():
        with contextlib.suppress(psutil.Error):
            locks -= {opened.path for opened in process.open_files()}
    for lock in map(Path, sorted(locks)):
        with contextlib.suppress(OSError):  # it has just been released, or belongs to another user
            facts = lock.stat()
            was_ours = facts.st_uid == os.getuid() and lock.read_text() == process_space()
            if was_ours or time.time() - facts.st_mtime > LONGEST_BUILD_SECONDS:
                lock.unlink()
            else:
                doubt = "may be held by another machine or user: remove it if nothing compiles there"
                print(f"note: {lock} {doubt}", file=sys.stderr)


class HeartbeatFolder:
    """The folder of one launch on one machine, with the files of its ranks (`base.heartbeat`)."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def beats(self) -> dict[int, Heartbeat]:
        """Return each rank's last heartbeat, except those that are being written at this moment."""
        found = {}
        for path in self.path.glob("rank-*.json"):
            with contextlib.suppress(OSError, ValueError, TypeError):
                if beat := beat_of(path.read_bytes()):
                    found[beat.rank] = beat
        return found

    def stack(self, rank: int) -> str | None:
        """Return the stacks that a rank has written so far; None if it has not called `watch_stacks`."""
        try:
            return stack_path(self.path, rank).read_text(errors="replace")
        except OSError:
            return None

    def run_name(self) -> str:
        """Return the run's name, or '' if rank 0 has not written it."""
        return self._read(RUN_NAME)

    def checkpoint_position(self) -> int:
        """Return the newest checkpoint's position, or -1 if none was saved since `clear`."""
        return int(self._read(CHECKPOINT) or -1)

    def has_succeeded(self) -> bool:
        """Return whether rank 0 has reported that training is done."""
        return (self.path / SUCCESS).exists()

    def clear(self) -> None:
        """Empty the folder, except for `OWNER`, before the ranks are started again."""
        self.path.mkdir(mode=0o700, exist_ok=True)  # somebody may have emptied the system's temporary folder
        for path in self.path.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path, ignore_errors=True)
            elif path.name != OWNER:
                path.unlink(missing_ok=True)

    def _read(self, name: str) -> str:
        try:
            return (self.path / name).read_text()
        except OSError:
            return ""


def make_temporary_folder(mark: str) -> HeartbeatFolder:
    """Create the folder of the launch with this mark, or raise a UserError; remove those of launches that are gone."""
    place = socket_place(f"/{PREFIX}12345678")
    if not is_as_asked(place):
        wrong = "it cannot be written, or its name is too long for sockets in it"
        print(f"note: {place} is used instead of TMPDIR: {wrong}", file=sys.stderr, flush=True)
    remove_abandoned(Path(place))
    try:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
        lock = os.open(folder / OWNER, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)  # open until this process exits
    except OSError as error:
        raise UserError(f"no temporary folder: {error}. Set TMPDIR to a folder that can be written.") from None
    with contextlib.suppress(OSError):  # without locks or disk space, the folder is never considered abandoned
        fcntl.flock(lock, fcntl.LOCK_EX)
        os.write(lock, mark.encode())
    return HeartbeatFolder(folder)


def remove_abandoned(place: Path) -> None:
    """Remove the folders in `place` whose creator has exited and whose launch has no running processes."""
    for owner in place.glob(f"{PREFIX}*/{OWNER}"):
        with contextlib.suppress(OSError):
            if owner.parent.lstat().st_uid != os.getuid() or owner.parent.is_symlink():
                continue
            with owner.open("rb+") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                mark = file.read().decode(errors="replace")
            if mark and not LaunchProcesses(mark).processes():
                shutil.rmtree(owner.parent, ignore_errors=True)


def launch_environment(launch: LaunchProcesses, folder: HeartbeatFolder, given: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a launch's processes: the given variables, the launch's mark and temporary folder."""
    environment = {name: value for name, value in given.items() if name not in RANK_VARIABLES}
    return environment | {MARK: launch.mark, FOLDER_VARIABLE: str(folder.path), "TMPDIR": str(folder.path)}
