"""Finds the processes of one training, whatever became of their parents, and ends them.

They are known by a mark of the harness's own in their environment, which every process inherits: also those that the
product itself has lost sight of. Nothing without the mark is ever touched.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass

import psutil

from zerovision.launch.local_ranks import RANK_NAME
from zerovision.launch.process_tree import send

MARK = "ZEROVISION_CHAOS"
LAUNCH_MARK = "ZEROVISION_LAUNCH"  # the supervisor gives it to everything that it starts
ENTRY = "train_distributed.py"
FORK_SERVER = "multiprocessing.forkserver"
POLL_SECONDS = 0.1
KILL_SECONDS = 30.0
NODE_LAUNCHER = "local_ranks.py"


@dataclass(frozen=True)
class Seen:
    """One live process, as it was when looked at."""

    process: psutil.Process
    name: str
    words: list[str]
    environment: dict[str, str]
    parent_pid: int

    @property
    def is_rank(self) -> bool:
        """Whether it trains, or is a fork of what trains; other helpers of a rank have a command line of their own."""
        return self.number is not None and any(word.endswith(ENTRY) for word in self.words)

    @property
    def number(self) -> int | None:
        """The rank's number, or that of the rank whose helper it is; None of others."""
        if self.name.startswith(RANK_NAME):
            return int(self.name.removeprefix(RANK_NAME))
        return int(self.environment["LOCAL_RANK"]) if "LOCAL_RANK" in self.environment else None

    @property
    def is_fork_server(self) -> bool:
        """Whether it is a fork server, or a data worker: these keep their fork server's command line."""
        return any(FORK_SERVER in word for word in self.words)

    @property
    def is_node_launcher(self) -> bool:
        """Whether it is what starts the ranks."""
        is_outside = LAUNCH_MARK in self.environment and self.number is None
        return is_outside and any(word.endswith(NODE_LAUNCHER) for word in self.words)


def processes_of(mark: str) -> list[Seen]:
    """Return every live process that carries the mark; zombies do not live."""
    found = []
    for process in psutil.process_iter():
        try:
            environment = process.environ()
            if environment.get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(Seen(process, process.name(), process.cmdline(), environment, process.ppid()))
        except psutil.Error:
            continue  # gone, or another user's
    return found


def ranks_of(mark: str) -> list[Seen]:
    """Return the live ranks, by their number, without their forks: one predicts the run's time beside rank 0."""
    found = [seen for seen in processes_of(mark) if seen.is_rank]
    ranks = [seen for seen in found if seen.parent_pid not in {other.process.pid for other in found}]
    return sorted(ranks, key=lambda seen: seen.number or 0)


def workers_of(mark: str) -> list[Seen]:
    """Return the live data workers: the children of fork servers."""
    servers = {seen.process.pid: seen for seen in processes_of(mark) if seen.is_fork_server}
    return [seen for seen in servers.values() if seen.parent_pid in servers]


def freeze(processes: Sequence[psutil.Process], timeout_s: float = 5.0) -> None:
    """Stop processes and wait until they stand still."""
    for process in processes:
        send(process, signal.SIGSTOP)
    deadline = time.monotonic() + timeout_s
    while any(map(_moves, processes)) and time.monotonic() < deadline:
        time.sleep(0.005)


def _moves(process: psutil.Process) -> bool:
    try:
        return process.status() not in (psutil.STATUS_STOPPED, psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def kill_all(mark: str) -> None:
    """End every process that carries the mark.

    Raises:
        RuntimeError: where one still lives after half a minute.
    """
    deadline = time.monotonic() + KILL_SECONDS
    while living := processes_of(mark):
        for seen in living:
            send(seen.process, signal.SIGKILL)
        if time.monotonic() > deadline:
            raise RuntimeError(f"processes that kill -9 does not end: {[seen.process.pid for seen in living]}")
        time.sleep(POLL_SECONDS)
