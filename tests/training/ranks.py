"""Real CPU ranks, each a process of its own, that run functions and bring back what each returned.

The ranks stay until they are closed and take one job after another. Most of a rank's time would be its imports: they
are forked from one server process that has imported all there is, as `launch.local_ranks` does it. Tensors travel as
nested lists.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import pkgutil
import random
import signal
import socket
import sys
import time
from multiprocessing.connection import Connection
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch.distributed import distributed_c10d

from zerovision.launch.node_launcher import PRELOADED

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_SECONDS = 240
SERVER = multiprocessing.get_context("forkserver")
# The last is imported by DeepSpeed's engine, and compiles something with all of torch.compile as it is.
SERVER.set_forkserver_preload([*PRELOADED, "deepspeed"])
# For what it imports: OpenMP reads its threads as it is loaded, and nothing may use CUDA before a fork.
SERVER_VARIABLES = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}


class Ranks:
    """`world_size` gloo ranks on this machine."""

    def __init__(self, world_size: int, folder: Path) -> None:
        """Start them; `folder` takes what they print."""
        self._logs = [folder / f"rank{rank}.log" for rank in range(world_size)]
        self._processes, self._connections = [], []
        shared = {"LOCAL_WORLD_SIZE": world_size, "WORLD_SIZE": world_size}
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        with mock.patch.dict(os.environ, SERVER_VARIABLES):
            ensure_running()
        for rank, log in enumerate(self._logs):
            ours, theirs = SERVER.Pipe()
            log.touch()
            place = shared | {"RANK": rank, "LOCAL_RANK": rank}
            process = SERVER.Process(target=be_rank, args=(theirs, place, log))
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def run(self, function: str, cases: list[dict[str, Any]]) -> list[list[Any]]:
        """Call 'module:function' with (world, **case) for every case on every rank; return result [rank][case].

        Raises:
            AssertionError: with every rank's output, where one failed or took too long.
        """
        self._signal(signal.SIGCONT)
        for connection in self._connections:
            with contextlib.suppress(BrokenPipeError):  # of a rank that has ended: seen below
                connection.send((function, cases))
        deadline = time.monotonic() + TIMEOUT_SECONDS
        results = []
        for connection in self._connections:
            while not connection.poll(0.05):
                if any(process.exitcode is not None for process in self._processes):
                    raise self._failure(f"{function} failed")
                if time.monotonic() > deadline:
                    raise self._failure(f"{function} took too long")
            try:
                results.append(connection.recv())
            except (EOFError, ConnectionResetError):
                raise self._failure(f"{function} failed") from None
        self._signal(signal.SIGSTOP)
        return results

    def close(self) -> None:
        """End the ranks at once: between two jobs there is nothing to save."""
        for process in self._processes:
            process.kill()
            process.join()

    def _signal(self, number: signal.Signals) -> None:
        """Stop the ranks or let them go on: between two jobs, their groups' threads would take a tenth of the time."""
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def _failure(self, what: str) -> AssertionError:
        outputs = [f"rank {rank}:\n{log.read_text()}" for rank, log in enumerate(self._logs)]
        return AssertionError("\n".join([what, *outputs]))


def run_ranks(function: str, world_size: int, folder: Path, cases: list[dict[str, Any]]) -> list[list[Any]]:
    """Run one job on ranks of its own, as `Ranks.run` does: for a test that must not share a process with others."""
    ranks = Ranks(world_size, folder)
    try:
        return ranks.run(function, cases)
    finally:
        ranks.close()


def free_port() -> int:
    """Return a port on which nothing listens, below those that Linux gives to whoever connects in the meantime."""
    while True:
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", random.SystemRandom().randrange(15_000, 32_000)))
            return probe.getsockname()[1]


def groups() -> set[dist.ProcessGroup]:
    """Return this rank's process groups."""
    return set(distributed_c10d._world.pg_map)


def leave_groups(kept: set[dist.ProcessGroup]) -> None:
    """End the groups that a job has left, but those that DeepSpeed keeps for its next engine.

    Each has threads that wake a hundred times a second: those of some hundred jobs would keep both cores busy.
    """
    deepspeed = vars(sys.modules.get("deepspeed.utils.groups", object)).values()
    for group in groups() - kept:
        if not any(group is one for one in deepspeed):
            dist.destroy_process_group(group)
    group = None
    gc.collect()
    gc.freeze()  # what is left stays for good; the next job's collection need not look at it


def be_rank(jobs: Connection, place: dict[str, Any], log: Path) -> None:
    """Be one rank, until nobody has a job for it any more."""
    with log.open("w") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    sys.stdout.reconfigure(line_buffering=True)
    os.environ.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)  # if the server was not started by `Ranks`
    os.environ.update({name: str(value) for name, value in place.items()})
    from zerovision.training.world.world import start_world, stop_world

    world = start_world()
    kept = groups()
    gc.freeze()  # what has been imported
    gc.set_threshold(20_000, 20, 20)  # each job is followed by a collection
    with contextlib.suppress(EOFError):
        while True:
            name, cases = jobs.recv()
            function = pkgutil.resolve_name(name)
            jobs.send([function(world, **case) for case in cases])
            leave_groups(kept)
    stop_world()
