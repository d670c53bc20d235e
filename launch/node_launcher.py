"""The process that starts the ranks of this machine: started, asked for the next start, ended."""

from __future__ import annotations

import json
import resource
import socket
import subprocess
import sys
import time
from collections.abc import Mapping

from launch.local_ranks import CHANNEL_VARIABLE
from training.config import REPO_ROOT
from training.observe.memory_limit import OWN_LIMITS

LOCAL_RANKS = str(REPO_ROOT / "launch/local_ranks.py")
PRELOADED = ("training.run", "delivery.end_of_run")
LARGEST_MMAP_THRESHOLD = 32 * 2**20  # bytes: mallopt(3) takes no more
POLL_SECONDS = 0.02
LEAVE_SECONDS = 5.0


def local_ranks_command(engine: str, has_gpus: bool) -> list[str]:
    """Return the beginning of the command that starts ranks from one process, with what they will import.

    Args:
        engine: of the configuration.
        has_gpus: whether the ranks use GPUs.
    """
    # Not for CPU ranks: how GPUs are counted here may miss some, and DeepSpeed keeps the kind that it is imported for.
    preloaded = [*PRELOADED, *(["deepspeed"] if has_gpus and engine == "deepspeed" else [])]
    return [sys.executable, "-u", LOCAL_RANKS, f"--preload={','.join(preloaded)}"]


def malloc_variables(environment: Mapping[str, str], has_gpus: bool) -> dict[str, str]:
    """Return what makes a CPU rank's malloc keep what a step frees for the next one, which else faults each page in.

    Nothing for GPU ranks, nor if the environment has a variable of malloc's own (mallopt(3)), as whoever set it
    chose; nor under a limit on address space (`ulimit -v` or `-d`), of which kept memory takes more than its pages.
    """
    is_limited = any(resource.getrlimit(limit)[0] != resource.RLIM_INFINITY for limit, _ in OWN_LIMITS)
    if has_gpus or is_limited or any(name.startswith("MALLOC_") for name in environment):
        return {}
    # Both: with the first alone the second stays at 128 KiB, and every tensor above it gets fresh pages.
    return {"MALLOC_TRIM_THRESHOLD_": str(2**40), "MALLOC_MMAP_THRESHOLD_": str(LARGEST_MMAP_THRESHOLD)}


class NodeLauncher:
    """Like a Popen that can be started again.

    `local_ranks.py` stays after a start, with everything imported, and is asked for the next one; others have ended by
    then (as it may have, too), and are run anew.
    """

    def __init__(self) -> None:
        self.returncode: int | None = None  # of the last start, as Popen has it; None while that runs
        self.staying_pid = 0  # the process, if it stays for the next start
        self._process: subprocess.Popen | None = None
        self._channel: socket.socket | None = None
        self._environment: dict[str, str] = {}

    def start(self, command: list[str], environment: dict[str, str]) -> None:
        """Start the ranks."""
        if not self._is_asked(command, environment):
            self.close()
            self._run(command, environment)
        self.returncode = None

    def poll(self) -> int | None:
        """Return `returncode`, after a look at whether the start has ended."""
        if self.returncode is None and self._process and self._channel:
            try:
                answer = self._channel.recv(64)
            except OSError:  # none yet
                answer = b""
            self.returncode = int(answer) if answer else self._process.poll()
        return self.returncode

    def close(self) -> None:
        """End the process, which has no more ranks."""
        if self._process and self._channel:
            self._channel.close()
            try:
                self._process.wait(LEAVE_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None

    def _run(self, command: list[str], environment: dict[str, str]) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.setblocking(False)
        self._environment = environment
        stays, descriptor = LOCAL_RANKS in command, theirs.fileno()
        added = {CHANNEL_VARIABLE: str(descriptor)} if stays else {}
        with theirs:
            self._process = subprocess.Popen(
                command, env=environment | added, start_new_session=True, pass_fds=[descriptor] if stays else []
            )
        self.staying_pid = self._process.pid if stays else 0

    def _is_asked(self, command: list[str], environment: dict[str, str]) -> bool:
        """Ask the process for another start, as soon as it has noticed the end of the last; return whether it can."""
        deadline = time.monotonic() + LEAVE_SECONDS
        while self._process and self.poll() is None and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS)
        if not self._process or not self._channel or self.returncode is None or self._process.poll() is not None:
            return False
        changed = dict(environment.items() - self._environment.items())
        try:
            self._channel.send(json.dumps({"command": command, "environment": changed}).encode())
        except OSError:
            return False
        return True
