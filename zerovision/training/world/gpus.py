"""Lists this machine's GPUs, from nvidia-smi or device files and CUDA_VISIBLE_DEVICES; does not import torch."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

NVIDIA_SMI_SECONDS = 60.0
DEVICE_FILES = Path("/dev")


def machine_gpus() -> list[str]:
    """Return the indices of all GPUs in this machine.

    A container that exposes GPUs only for compute has neither nvidia-smi nor NVML, and nvidia-smi fails if its version
    does not match the driver. In these cases, return CUDA's indices of the device files that this process may use.
    """
    try:
        listing = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=NVIDIA_SMI_SECONDS, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        files = [file for file in DEVICE_FILES.glob("nvidia[0-9]*") if os.access(file, os.R_OK | os.W_OK)]
        return [str(number) for number in range(len(files))]
    return re.findall(r"^GPU ([0-9]+):", listing, re.MULTILINE)


def usable_gpus() -> list[str]:
    """Return the indices or UUIDs of the GPUs that are visible to this process."""
    return visible_gpus(machine_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))


def visible_gpus(present: Sequence[str], visible: str | None) -> list[str]:
    """Return the indices or UUIDs of the GPUs that ranks may use.

    Args:
        present: the GPUs in the machine.
        visible: value of CUDA_VISIBLE_DEVICES; None if it is not set.
    """
    if visible is None or not present:
        return list(present)
    chosen = "".join(visible.split()).split(",")
    if "-1" in chosen:  # CUDA ignores -1 and every GPU after it
        chosen = chosen[: chosen.index("-1")]
    return [gpu for gpu in chosen if gpu]
