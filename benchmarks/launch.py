"""Starts CPU ranks under torchrun, for the benchmarks that measure whole jobs."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def torchrun(ranks: int, module: str, *words: str, threads: int = 1) -> str:
    """Run a module under torchrun with so many threads per rank; return what it said.

    Raises:
        RuntimeError: with the end of what it said, where it failed.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    launch = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}", f"--master_port={port}"]
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    command = [*launch, "-m", module, *words]
    result = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT, env=environment)
    if result.returncode:
        raise RuntimeError(f"{shlex.join(command)} ended with {result.returncode}: {result.stderr[-2000:]}")
    return result.stdout
