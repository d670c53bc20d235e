"""Hosts on this machine, each with its own address, name, processes, /tmp and sshd: what tests/cluster/lab makes."""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import IO

REPO_ROOT = Path(__file__).resolve().parents[2]
LAB = Path(__file__).resolve().parent / "lab"
NUMBER = os.environ.get("NETLAB_NUMBER", "78")  # several labs stand side by side under several numbers
SHARED = Path(f"/tmp/netlab{NUMBER}")  # the only part of /tmp that all hosts share: logs and hostfiles belong here
TOOLS = ("ip", "nft", "nsenter", "unshare", "sshd")
SLURM_TOOLS = ("sbatch", "slurmctld", "slurmd", "munged")
DAEMONS = {"munged", "slurmd", "slurmctld", "slurmscriptd"}
NOT_PASSED = ("SLURM_", "SBATCH_")
NOT_PASSED_NAMES = {"CUDA_VISIBLE_DEVICES", "MASTER_PORT", "HOSTFILE", "STOP_TIMEOUT", "MAX_RESTARTS"}


def missing(tools: tuple[str, ...] = TOOLS) -> str:
    """Why there can be no hosts here, '' where there can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "needs root on Linux"
    if REPO_ROOT.is_relative_to("/tmp"):
        return "each host has a /tmp of its own, without this repository: clone it elsewhere"
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    absent = [tool for tool in tools if not shutil.which(tool, path=path)]
    return f"no {', '.join(absent)} here: run tests/cluster/lab/install.sh" if absent else ""


class Hosts:
    """`count` nodes (node01, node02, ...) and a host named login, which are there while a `with` block runs."""

    login = "login"

    def __init__(self, count: int) -> None:
        self.nodes = [f"node{number:02d}" for number in range(1, count + 1)]
        self._has_slurm = False
        self._down: set[str] = set()
        self._faulty: set[str] = set()
        self._lock: IO[str] | None = None

    def __enter__(self) -> Hosts:
        self._lock = SHARED.with_suffix(".lock").open("w")
        fcntl.flock(self._lock, fcntl.LOCK_EX)  # another session with hosts of this number: wait for its end
        self._lab("netlab.sh", "down")
        self._lab("netlab.sh", "up", str(len(self.nodes)))
        return self

    def __exit__(self, *_: object) -> None:
        self._lab("netlab.sh", "down")
        assert self._lock is not None
        self._lock.close()

    def start_slurm(self) -> None:
        """Start Slurm: slurmctld on login, slurmd with 8 pretended GPUs on every node."""
        self._lab("slurmlab.sh", "up")
        self._has_slurm = True

    def run(
        self, host: str, words: list[str], *, timeout: float = 60, cwd: Path = REPO_ROOT, **changes: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a program on a host, not through ssh; `changes` are added to its environment."""
        return subprocess.run(
            self._command(host, words, cwd),
            env=environment(**changes),
            capture_output=True,
            text=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
        )

    def start(
        self, host: str, words: list[str], *, cwd: Path = REPO_ROOT, output: Path | None = None, **changes: str
    ) -> subprocess.Popen[str]:
        """Start a program on a host; its output goes to a file, or to the pipe of what is returned.

        A signal for it goes through `signal`: what is returned is the process that entered the host, which waits.
        """
        stream = output.open("a") if output else subprocess.PIPE
        command = self._command(host, words, cwd)
        return subprocess.Popen(
            command,
            env=environment(**changes),
            stdout=stream,
            stderr=subprocess.STDOUT,
            text=True,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def fault(self, host: str, kind: str, *words: str) -> None:
        """Break a host or its cable: unplug, blackhole, rate 10mbit, delay 50 [LOSS%], crash, poweroff; or clear."""
        self._lab("netlab.sh", "fault", host, kind, *words)
        (self._down if kind in ("crash", "poweroff") else self._faulty).add(host)
        if kind == "clear":
            self._faulty.discard(host)

    def boot(self, host: str) -> None:
        """Start a host again after crash or poweroff; return when it answers over ssh."""
        self._lab("netlab.sh", "boot", host)
        self._down.discard(host)
        self._faulty.discard(host)
        if self._has_slurm:
            self._lab("slurmlab.sh", "start-node", host)

    def processes(self, host: str, part: str = "") -> dict[int, str]:
        """The processes of a host whose command line contains `part`: {number as the host counts: command line}.

        Without what belongs to the host itself: process 1, its children sshd and sleep, Slurm's daemons.
        """
        lines = self.run(host, ["ps", "-eo", "pid=,ppid=,comm=,args="]).stdout.splitlines()
        rows = [line.split(None, 3) for line in lines]
        return {
            int(pid): arguments
            for pid, parent, name, arguments in rows
            if pid != "1"
            and (parent, name) not in (("0", "ps"), ("1", "sshd"), ("1", "sleep"))
            and name not in DAEMONS
            and part in arguments
        }

    def signal(self, host: str, number: signal.Signals, *processes: int) -> None:
        """Send a signal to processes of a host."""
        self.run(host, ["kill", f"-{number.value}", *map(str, processes)])

    def recover(self) -> None:
        """Clear every fault, start what is down, and end what a test left behind."""
        for host in self._down | self._faulty:
            self.boot(host) if host in self._down else self.fault(host, "clear")
        for host in [self.login, *self.nodes]:
            if left := self.processes(host):
                self.signal(host, signal.SIGKILL, *left)

    def _command(self, host: str, words: list[str], cwd: Path) -> list[str]:
        # A shell's background job, as this may be, hears no Ctrl-C, nor would its children.
        start = ["env", "--default-signal=INT", "-C", str(cwd)]
        return [str(LAB / "netlab.sh"), "exec", host, *start, *words]

    def _lab(self, script: str, *words: str) -> None:
        result = subprocess.run(
            [str(LAB / script), *words], env=environment(), capture_output=True, text=True, timeout=120
        )
        assert result.returncode == 0, f"{script} {' '.join(words)}: {result.stdout}{result.stderr}"


def environment(**changes: str) -> dict[str, str]:
    """This process's environment without what would steer a training; one thread per rank."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(NOT_PASSED) and name not in NOT_PASSED_NAMES
    }
    path = f"{kept['PATH']}:/usr/sbin:/sbin"
    return kept | {"PATH": path, "OMP_NUM_THREADS": "1", "NETLAB_NUMBER": NUMBER, "TMPDIR": "/tmp"} | changes
