"""Runs a function on several real CPU ranks, each a process of its own, and brings back what each returned.

    python tests/training/ranks.py module:function '[{"key": "value"}]' result.json

The function is called once per set of arguments, in processes that start once: most of a rank's time is its start.
Each rank writes its results as JSON; tensors travel as nested lists.
"""

from __future__ import annotations

import importlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_SECONDS = 240


def run_ranks(function: str, world_size: int, folder: Path, cases: list[dict[str, Any]]) -> list[list[Any]]:
    """Call 'module:function' with (world, **case) on `world_size` gloo ranks; return result [rank][case].

    Raises:
        AssertionError: with every rank's output, where one failed or took too long.
    """
    port = free_port()
    processes = []
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
        command = [sys.executable, __file__, function, json.dumps(cases), str(folder / f"rank{rank}.json")]
        processes.append(
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        )
    outputs = []
    try:
        for process in processes:
            outputs.append(process.communicate(timeout=TIMEOUT_SECONDS)[0])
    finally:
        for process in processes:
            process.kill()
    failed = [f"rank {rank}:\n{output}" for rank, output in enumerate(outputs) if processes[rank].returncode != 0]
    assert not failed, "\n".join(failed)
    return [json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(world_size)]


def free_port() -> int:
    """Return a port on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def main() -> None:
    """Be one rank."""
    name, cases, result_file = sys.argv[1:]
    module_name, function_name = name.split(":")
    from training.distributed import start_world, stop_world

    world = start_world()
    function = getattr(importlib.import_module(module_name), function_name)
    Path(result_file).write_text(json.dumps([function(world, **case) for case in json.loads(cases)]))
    stop_world()


if __name__ == "__main__":
    main()
