"""Real CPU ranks, each a process of its own, that run functions and bring back what each returned.

The ranks stay until they are closed and take one job after another: most of a rank's time is its start. A job is a
line of JSON on their standard input, the results are JSON in a file; tensors travel as nested lists.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_SECONDS = 240


class Ranks:
    """`world_size` gloo ranks on this machine."""

    def __init__(self, world_size: int, folder: Path) -> None:
        """Start them; `folder` takes what they print and their results."""
        self._folder = folder
        self._jobs = 0
        port = free_port()
        self._processes = []
        for rank in range(world_size):
            environment = os.environ | {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "LOCAL_WORLD_SIZE": str(world_size),
                "WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(ROOT),
            }
            with self._log(rank).open("w") as log:
                self._processes.append(
                    subprocess.Popen(
                        [sys.executable, __file__],
                        env=environment,
                        stdin=subprocess.PIPE,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        text=True,
                    )
                )

    def run(self, function: str, cases: list[dict[str, Any]]) -> list[list[Any]]:
        """Call 'module:function' with (world, **case) for every case on every rank; return result [rank][case].

        Raises:
            AssertionError: with every rank's output, where one failed or took too long.
        """
        self._jobs += 1
        files = [self._folder / f"job{self._jobs}-rank{rank}.json" for rank in range(len(self._processes))]
        for process, file in zip(self._processes, files, strict=True):
            assert process.stdin
            with contextlib.suppress(BrokenPipeError):  # of a rank that has ended: seen below
                process.stdin.write(json.dumps({"function": function, "cases": cases, "result": str(file)}) + "\n")
                process.stdin.flush()
        deadline = time.monotonic() + TIMEOUT_SECONDS
        while not all(file.exists() for file in files):
            late = time.monotonic() > deadline
            if late or any(process.poll() is not None for process in self._processes):
                what = "took too long" if late else "failed"
                outputs = [f"rank {rank}:\n{self._log(rank).read_text()}" for rank in range(len(files))]
                raise AssertionError(f"{function} {what}\n" + "\n".join(outputs))
            time.sleep(0.02)
        return [json.loads(file.read_text()) for file in files]

    def close(self) -> None:
        """End the ranks at once: between two jobs there is nothing to save."""
        for process in self._processes:
            process.kill()
            process.communicate()

    def _log(self, rank: int) -> Path:
        return self._folder / f"rank{rank}.log"


def run_ranks(function: str, world_size: int, folder: Path, cases: list[dict[str, Any]]) -> list[list[Any]]:
    """Run one job on ranks of its own, as `Ranks.run` does: for a test that must not share a process with others."""
    ranks = Ranks(world_size, folder)
    try:
        return ranks.run(function, cases)
    finally:
        ranks.close()


def free_port() -> int:
    """Return a port on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main() -> None:
    """Be one rank, until standard input ends."""
    from training.parallel.world import start_world, stop_world

    world = start_world()
    for line in sys.stdin:
        job = json.loads(line)
        module_name, function_name = job["function"].split(":")
        function = getattr(importlib.import_module(module_name), function_name)
        result, unfinished = Path(job["result"]), Path(job["result"] + ".tmp")
        unfinished.write_text(json.dumps([function(world, **case) for case in job["cases"]]))
        unfinished.rename(result)
    stop_world()


if __name__ == "__main__":
    main()
