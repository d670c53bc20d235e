"""The memory that a rank uses, its peak, and what it may still take.

On a GPU, a rank may take what PyTorch's allocator has free and can still get. On a CPU, it may take its share of what
the machine and control group have left, or less under the process's limits (RLIMIT_DATA, RLIMIT_AS).
"""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path
from typing import TYPE_CHECKING

from zerovision.training.base.control_groups import ROOT, bytes_by_name, free_memory

if TYPE_CHECKING:
    import torch

FILL = 0.9  # share of the room that is planned for: other steps may need more, and other processes too
# A process's own limits, and the line of /proc/self/status that counts against each.
OWN_LIMITS = ((resource.RLIMIT_DATA, "VmData"), (resource.RLIMIT_AS, "VmSize"))


def memory_room(device: torch.device, sharing: int, root: Path = ROOT) -> int:
    """Return the bytes that this rank may take in addition.

    Args:
        device: the rank's device.
        sharing: number of ranks on this machine, which share free memory equally.
        root: folder that contains /proc and /sys.
    """
    if device.type == "cuda":
        import torch

        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    status, rooms = bytes_by_name((root / "proc/self/status").read_text()), [free_memory(root) // sharing]
    for limit, name in OWN_LIMITS:
        most, _ = resource.getrlimit(limit)
        if most != resource.RLIM_INFINITY:
            rooms.append(most - status[name])
    return max(min(rooms), 1)


def used_memory(device: torch.device) -> int:
    """Return the bytes that this rank uses: of tensors on a GPU, else resident, with pages that others share."""
    if device.type == "cuda":
        import torch

        return torch.cuda.memory_allocated(device)
    return bytes_by_name((ROOT / "proc/self/status").read_text())["VmRSS"]


def peak_memory(device: torch.device) -> int:
    """Return the peak of `used_memory` since `reset_peak_memory`."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    status = bytes_by_name((ROOT / "proc/self/status").read_text())
    return max(status["VmRSS"], status.get("VmHWM", 0))  # not every sandbox has the peak


def reset_peak_memory(device: torch.device) -> None:
    """Begin a new peak; if the kernel does not allow this, the old peak remains, which is never too low."""
    if device.type == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(OSError):
            (ROOT / "proc/self/clear_refs").write_text("5")  # proc(5): the peak of resident memory
