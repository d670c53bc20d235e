"""How much memory a rank has, has had at most, and may still take.

On a GPU what PyTorch's allocator has free and may still get. On a CPU the rank's share of what machine and control
group have left, or less by the process's own limits (RLIMIT_DATA, RLIMIT_AS).
"""

from __future__ import annotations

import contextlib
import re
import resource
from pathlib import Path
from typing import TYPE_CHECKING

from training.base.control_groups import ROOT, group_files

if TYPE_CHECKING:
    import torch

FILL = 0.9  # share of the room that is planned for: other steps may need more, and other processes too
# A process's own limits, and the line of /proc/self/status that counts against each.
OWN_LIMITS = ((resource.RLIMIT_DATA, "VmData"), (resource.RLIMIT_AS, "VmSize"))


def memory_room(device: torch.device, sharing: int, root: Path = ROOT) -> int:
    """Return the bytes that this rank may take beside what it has.

    Args:
        device: of the rank.
        sharing: ranks of this machine, which take equal parts of what is free.
        root: that /proc and /sys are below.
    """
    if device.type == "cuda":
        import torch

        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    status, rooms = _bytes_by_name((root / "proc/self/status").read_text()), [_free_bytes(root) // sharing]
    for limit, name in OWN_LIMITS:
        most, _ = resource.getrlimit(limit)
        if most != resource.RLIM_INFINITY:
            rooms.append(most - status[name])
    return max(min(rooms), 1)


def used_memory(device: torch.device) -> int:
    """Return the bytes that this rank has: of tensors on a GPU, else resident."""
    if device.type == "cuda":
        import torch

        return torch.cuda.memory_allocated(device)
    return _bytes_by_name((ROOT / "proc/self/status").read_text())["VmRSS"]


def peak_memory(device: torch.device) -> int:
    """Return the most bytes, of the same kind, since `reset_peak_memory`."""
    if device.type == "cuda":
        import torch

        return torch.cuda.max_memory_allocated(device)
    return _bytes_by_name((ROOT / "proc/self/status").read_text())["VmHWM"]


def reset_peak_memory(device: torch.device) -> None:
    """Begin a new peak; where the kernel does not allow it, the old one stays, which is never too low."""
    if device.type == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(OSError):
            (ROOT / "proc/self/clear_refs").write_text("5")  # proc(5): the peak of resident memory


def _free_bytes(root: Path) -> int:
    """Return the bytes that machine and control groups have left; files that the kernel keeps in memory are free."""
    found = [_bytes_by_name((root / "proc/meminfo").read_text())["MemAvailable"]]
    for path in group_files("memory", "memory.max", "memory.limit_in_bytes", root):
        used = path.with_name("memory.current" if path.name == "memory.max" else "memory.usage_in_bytes")
        with contextlib.suppress(OSError, ValueError):  # no such group, or 'max'
            found.append(int(path.read_text()) - int(used.read_text()) + _kept_files(path.with_name("memory.stat")))
    return min(found)


def _kept_files(statistics: Path) -> int:
    """Return the bytes of a control group that the kernel gives back when they are asked for."""
    with contextlib.suppress(OSError):
        if kept := re.search(r"^inactive_file (\d+)$", statistics.read_text(), re.MULTILINE):
            return int(kept[1])
    return 0


def _bytes_by_name(text: str) -> dict[str, int]:
    """Return the numbers of a file of lines such as 'VmRSS:  123 kB', in bytes."""
    return {name: 1024 * int(number) for name, number in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}
