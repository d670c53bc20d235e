"""Starts programs and trainings for the benchmarks that measure whole jobs."""

from __future__ import annotations

import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run(words: Sequence[str], ranks: int = 0, timeout_s: float | None = None) -> str:
    """Run a command, or a module of Python with its words on so many CPU ranks under torchrun; return what it said.

    Raises:
        RuntimeError: with the end of what it said, where it failed.
        TimeoutExpired: it took longer.
    """
    environment = {**os.environ}
    if ranks:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        torchrun = [sys.executable, "-m", "torch.distributed.run", f"--nproc_per_node={ranks}", f"--master_port={port}"]
        words = [*torchrun, "-m", *words]
        environment |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    result = subprocess.run(words, check=False, text=True, cwd=ROOT, env=environment, timeout=timeout_s, **pipes)
    if result.returncode:
        raise RuntimeError(f"{shlex.join(words)} ended with {result.returncode}: {result.stdout[-2000:]}")
    return result.stdout
