"""Lets the doctor look at the machines before a start."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

from zerovision.launch.arguments import LaunchArguments
from zerovision.training.base.places import ENTRIES

DOCTOR = str(ENTRIES / "doctor.py")


def run_preflight(given: LaunchArguments, training: Sequence[str], *where: str) -> int:
    """Let the doctor look at the machines if --preflight was given; return its exit code."""
    if not given.preflight:
        return 0
    return subprocess.run(
        [sys.executable, DOCTOR, *where, f"--gpus-per-node={given.ranks_per_node}", "--", *training]
    ).returncode
