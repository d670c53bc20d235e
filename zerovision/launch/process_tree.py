"""The processes of one launch: finds them by a mark in their environment, signals and ends them."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import uuid
from pathlib import Path

import psutil

from zerovision.training.base.heartbeat import LAUNCH_VARIABLE as MARK
from zerovision.training.base.helper_processes import process_space

POLL_SECONDS = 0.1
LONGEST_BUILD_SECONDS = 3600.0
KILL_SECONDS = 30.0  # do not wait for ever for a process that the kernel does not end


class Launch:
    """All processes of one launch on this machine, over all its restarts."""

    def __init__(self, mark: str = "") -> None:
        """Use the mark of a launch of another process or machine, else a new one."""
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
        """End every process of this launch at once, but not the one that is spared."""
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
    """Return whether a process still runs (also if it is stopped)."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def code_of_zombie(pid: int) -> int | None:
    """Return what a process ended with, as Popen does, while it is a zombie; else None."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        if fields[0] == "Z":
            return os.waitstatus_to_exitcode(int(fields[49]))
    return None


def shell_exit_code(code: int) -> int:
    """Return the shell's 128 + n for an end by signal n, which Popen gives as -n."""
    return 128 - code if code < 0 else code


def extensions_folder() -> str:
    """Return where DeepSpeed compiles its operators: a cache keyed by name only, so each environment has its own."""
    return os.environ.get("TORCH_EXTENSIONS_DIR") or f"{sys.prefix}/torch_extensions"


def remove_stale_build_locks(folder: Path) -> None:
    """Remove the locks of compile jobs that no longer run; of others that may, on another machine, print a note.

    A rank signs its locks (`engines.deepspeed.engine`), and torch keeps a lock's file open while it compiles:
    so it is known of those that were made here. One without our signature is stale after `LONGEST_BUILD_SECONDS`.
    """
    locks = {str(path) for path in folder.glob("**/lock")}
    for process in psutil.process_iter() if locks else ():
        with contextlib.suppress(psutil.Error):
            locks -= {opened.path for opened in process.open_files()}
    for lock in map(Path, sorted(locks)):
        with contextlib.suppress(OSError):  # it has been released meanwhile, or is another user's
            facts = lock.stat()
            was_ours = facts.st_uid == os.getuid() and lock.read_text() == process_space()
            if was_ours or time.time() - facts.st_mtime > LONGEST_BUILD_SECONDS:
                lock.unlink()
            else:
                print(
                    f"note: {lock} may be held by another machine or user: remove it if nothing compiles there",
                    file=sys.stderr,
                )
