"""The GPUs of this machine, from nvidia-smi or device files, and CUDA_VISIBLE_DEVICES; does not import torch."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Sequence
from pathlib import Path

NVIDIA_SMI_SECONDS = 60.0
DEVICE_FILES = Path("/dev")


def machine_gpus() -> list[str]:
    """Return the index of every GPU of this machine.

    A container with GPUs only for compute has no nvidia-smi (nor NVML), and nvidia-smi fails if it does not match the
    driver. Then CUDA's indices of the device files that this process may use are returned.
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
    """Return the GPUs that ranks of this process may use, by number or UUID."""
    return visible_gpus(machine_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))


def visible_gpus(present: Sequence[str], visible: str | None) -> list[str]:
    """Return the GPUs that ranks may use, by number or UUID.

    Args:
        present: the GPUs of the machine.
        visible: CUDA_VISIBLE_DEVICES, None if it is not set.
    """
    if visible is None or not present:
        return list(present)
    chosen = "".join(visible.split()).split(",")
    if "-1" in chosen:  # CUDA's own way to hide this one and all after it
        chosen = chosen[: chosen.index("-1")]
    return [gpu for gpu in chosen if gpu]
