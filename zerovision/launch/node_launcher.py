"""Manages the process that starts this machine's ranks: runs it, tells it to start the ranks again, and ends it."""

from __future__ import annotations

import contextlib
import json
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Mapping

import psutil

from zerovision.launch.local_ranks import CHANNEL_VARIABLE, LONGEST_ORDER
from zerovision.launch.process_tree import is_alive, send
from zerovision.training.base.control_groups import OWN_LIMITS
from zerovision.training.base.run_folder import LAUNCH
from zerovision.training.engines.ways import OUR_ENGINE

LOCAL_RANKS = str(LAUNCH / "local_ranks.py")
PRELOADED = ("zerovision.training.run", "zerovision.delivery.evaluation_files")
LARGEST_MMAP_THRESHOLD = 32 * 2**20  # bytes, the maximum that mallopt(3) accepts
POLL_SECONDS = 0.02
LOCAL_RANKS_EXIT_SECONDS = 5.0


def local_ranks_command(engine: str, has_gpus: bool) -> list[str]:
    """Return the beginning of the command that starts ranks from one process, with the modules to preload."""
    # A third-party engine is named like its library. No engine is preloaded for CPU ranks: the launcher may have missed
    # GPUs, and an engine may stay bound to the type of device that it was imported for.
    preloaded = [*PRELOADED, *([engine] if has_gpus and engine not in OUR_ENGINE else [])]
    return [sys.executable, "-u", LOCAL_RANKS, f"--preload={','.join(preloaded)}"]


def malloc_variables(environment: Mapping[str, str], has_gpus: bool) -> dict[str, str]:
    """Return variables that make a CPU rank's malloc keep freed memory for the next step, which avoids page faults."""
    # The kept memory would use up a limited address space (`ulimit -v` or `-d`); mallopt(3) lists the variables.
    is_limited = any(resource.getrlimit(limit)[0] != resource.RLIM_INFINITY for limit, _ in OWN_LIMITS)
    if has_gpus or is_limited or any(name.startswith("MALLOC_") for name in environment):
        return {}
    # Both must be set: with only the first, the second stays at 128 KiB, and every larger tensor gets fresh pages.
    return {"MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_MMAP_THRESHOLD_": str(LARGEST_MMAP_THRESHOLD)}


class NodeLauncher:
    """The process of `zerovision/launch/local_ranks.py`, like a Popen that can be restarted.

    It outlives its ranks, and forks the ranks of the next start without importing modules again. If it has ended, it is
    restarted.
    """

    def __init__(self) -> None:
        # Of the last start: that of its first failed rank, in the shell's form, or that of the process itself, in
        # Popen's form; None while the ranks run.
        self.returncode: int | None = None
        self.ranks: dict[int, psutil.Process] = {}  # of the last start, by rank; empty until all exist
        self._process: subprocess.Popen | None = None
        self._channel: socket.socket | None = None
        self._environment: dict[str, str] = {}

    @property
    def pid(self) -> int:
        """ID of the process that starts the ranks, or 0 if there is none."""
        return self._process.pid if self._process else 0

    def start(self, command: list[str], environment: dict[str, str]) -> None:
        """Start the ranks; the command begins with the result of `local_ranks_command`."""
        if not self._is_asked(command, environment):
            self.close()
            self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            self._channel.setblocking(False)
            self._environment = environment
            with theirs:
                added = {CHANNEL_VARIABLE: str(theirs.fileno())}
                self._process = subprocess.Popen(
                    command, env=environment | added, start_new_session=True, pass_fds=[theirs.fileno()]
                )
        self.returncode = None
        self.ranks = {}

    def poll(self) -> int | None:
        """Return `returncode`, after reading the process's reports and checking whether it has ended."""
        while self.returncode is None and self._process and self._channel:
            try:
                said = json.loads(self._channel.recv(LONGEST_ORDER) or "{}")
            except BlockingIOError:  # nothing yet
                return None
            except OSError:  # the process was killed while it was reading
                said = {}
            for rank, pid in said.get("ranks", {}).items():
                with contextlib.suppress(psutil.NoSuchProcess):  # a rank that was killed with its parent
                    self.ranks[int(rank)] = psutil.Process(pid)
            if not said or "code" in said:
                self.returncode = said.get("code", self._process.poll())
                break
        return self.returncode

    def living_ranks(self) -> list[psutil.Process]:
        """Return the running ranks."""
        return [rank for rank in self.ranks.values() if is_alive(rank)]

    def signal_ranks(self, number: int) -> int:
        """Send a signal to each running rank; return their number."""
        ranks = self.living_ranks()
        for rank in ranks:
            send(rank, number)
        return len(ranks)

    def close(self) -> None:
        """End the process, which has no ranks left."""
        if self._process and self._channel:
            self._channel.close()
            try:
                self._process.wait(LOCAL_RANKS_EXIT_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def _is_asked(self, command: list[str], environment: dict[str, str]) -> bool:
        """Request another start once the process has reported the end of the last one; return whether it succeeded."""
        deadline = time.monotonic() + LOCAL_RANKS_EXIT_SECONDS
        while self._process and self.poll() is None and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        if not self._process or not self._channel or self.returncode is None or self._process.poll() is not None:
            return False
        changed = dict(environment.items() - self._environment.items())
        order = {"arguments": command[command.index(LOCAL_RANKS) + 1 :], "environment": changed}
        try:
            self._channel.send(json.dumps(order).encode())
        except OSError:
            return False
        return True
