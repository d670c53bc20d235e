"""The GPUs of this machine, by nvidia-smi and CUDA_VISIBLE_DEVICES; imports no torch."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence

NVIDIA_SMI_SECONDS = 60.0


def machine_gpus() -> list[str]:
    """Return the number of every GPU of this machine; empty without nvidia-smi, or if it fails."""
    try:
        listing = subprocess.run(
            ["nvidia-smi", "-L"], capture_output=True, text=True, timeout=NVIDIA_SMI_SECONDS, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return re.findall(r"^GPU ([0-9]+):", listing, re.MULTILINE)


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
