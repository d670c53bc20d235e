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

from launch.local_ranks import RANK_NAME
from training.base.heartbeat import LAUNCH_VARIABLE as MARK

POLL_SECONDS = 0.1
KILL_SECONDS = 30.0  # do not wait for ever for a process that the kernel does not end


class Launch:
    """All processes of one launch on this machine, over all its restarts."""

    def __init__(self, mark: str = "") -> None:
        """Use the mark of a launch of another process or machine, else a new one."""
        self.mark = mark or uuid.uuid4().hex
        self.known: dict[int, psutil.Process] = {}  # every rank seen since the last start, also one that is gone
        self.local_size = 0  # ranks on this machine, 0 until one has been seen
        self._signalled: set[psutil.Process] = set()

    def forget_ranks(self) -> None:
        """Expect new ranks, because the launch is started again."""
        self.known.clear()
        self.local_size = 0

    def processes(self) -> list[psutil.Process]:
        """Return every live process of this launch, and note the ranks among them.

        A rank has LOCAL_RANK in its environment or a rank's name (`launch.local_ranks`), and no rank as parent. Its own
        helpers have the first too, and lose the parent when it is killed: so the first process seen for a rank stays
        the rank.
        """
        found = []
        candidates = {}
        for process in psutil.process_iter():
            try:
                environment = process.environ()
                if environment.get(MARK) != self.mark or process.status() == psutil.STATUS_ZOMBIE:
                    continue
                found.append(process)
                name = process.name()
                if name.startswith(RANK_NAME):
                    environment["RANK"] = name.removeprefix(RANK_NAME)
                elif "LOCAL_RANK" not in environment:
                    continue
                candidates[process] = (process.create_time(), process.ppid(), environment)
            except psutil.Error:
                continue  # gone, or another user's
        inside_rank = {process.pid for process in candidates} | {process.pid for process in self.known.values()}
        for process, (_, parent, environment) in sorted(candidates.items(), key=lambda item: item[1][0]):
            if parent not in inside_rank:
                self.known.setdefault(int(environment.get("RANK", 0)), process)
                # deepspeed's launcher calls it LOCAL_SIZE
                self.local_size = int(environment.get("LOCAL_WORLD_SIZE") or environment.get("LOCAL_SIZE") or 1)
        return found

    def ranks(self) -> list[psutil.Process]:
        """Return the live ranks."""
        living = set(self.processes())
        return [process for process in self.known.values() if process in living]

    def signal_ranks(self, number: int) -> int:
        """Send a signal to each rank that has not had one yet; return how many ranks live."""
        ranks = self.ranks()
        for rank in ranks:
            if rank not in self._signalled:
                self._signalled.add(rank)
                send(rank, number)
        return len(ranks)

    def stop(self, number: int, timeout_s: float) -> None:
        """Signal all ranks, give them `timeout_s` seconds to save and leave, and end those that remain."""
        deadline = time.monotonic() + timeout_s
        while self.signal_ranks(number) and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        self.kill()

    def kill_ranks(self) -> None:
        """End the ranks at once; their launcher then ends by itself, with the exit code of the first failure."""
        for rank in self.ranks():
            send(rank, signal.SIGKILL)

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
    """Return the shell's 128 + n for an end by signal n, which Popen gives as -n and deepspeed as 256 - n."""
    if code < 0:
        return 128 - code
    return 128 + (256 - code) if code > 256 - 32 else code


def extensions_folder() -> str:
    """Return where DeepSpeed compiles its operators: a cache keyed by name only, so each environment has its own."""
    return os.environ.get("TORCH_EXTENSIONS_DIR") or f"{sys.prefix}/torch_extensions"


def unheld_build_locks(folder: Path) -> set[Path]:
    """Return the locks of compile jobs that do not run here; torch keeps a lock's file open while it compiles."""
    locks = {str(path) for path in folder.glob("**/lock")}
    for process in psutil.process_iter() if locks else ():
        try:
            locks -= {opened.path for opened in process.open_files()}
        except psutil.Error:
            continue
    return {Path(lock) for lock in locks}


def remove_stale_build_locks(folder: Path) -> None:
    """Remove the locks of compile jobs that no longer run."""
    for lock in unheld_build_locks(folder):
        lock.unlink(missing_ok=True)
