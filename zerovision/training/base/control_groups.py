"""The resources that control groups, such as a container's, allow this process to use."""

from __future__ import annotations

import contextlib
import math
import os
import re
import resource
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
OLD_LIMIT = "memory.limit_in_bytes"  # file of the memory limit under version 1
# A process's own memory limits, each with the line of /proc/self/status that counts toward it.
OWN_LIMITS = ((resource.RLIMIT_DATA, "VmData"), (resource.RLIMIT_AS, "VmSize"))
OOM_KILLS = re.compile(r"^oom_kill (\d+)$", re.MULTILINE)


def group_files(controller: str, name: str, old_name: str, root: Path = ROOT) -> Iterator[Path]:
    """Yield the paths at which this process's control groups may have a file, innermost group first.

    The file of `controller`, 'memory' or 'cpu', is called `name` under version 2 of control groups and `old_name` under
    version 1. The folder `root` contains /proc and /sys.
    """
    with contextlib.suppress(OSError):
        for line in (root / "proc/self/cgroup").read_text().splitlines():
            _, controllers, group = line.split(":", 2)
            if controllers and controller not in controllers.split(","):
                continue
            # Version 1 may mount several controllers as one, with version 2 mounted next to it.
            tops = {"": (".", "unified")}.get(controllers, dict.fromkeys((controllers, controller)))
            inside = Path(group.lstrip("/"))
            for folder in dict.fromkeys((inside, *inside.parents)):  # a container may see its own group at the top
                for top in tops:
                    yield root / "sys/fs/cgroup" / top / folder / (old_name if controllers else name)


def usable_cores(root: Path = ROOT) -> int:
    """Return the number of cores that this process can use: those it may run on, or fewer if a control group limits it.

    Args:
        root: folder that contains /proc and /sys.
    """
    return max(1, math.ceil(min(len(os.sched_getaffinity(0)), cpu_quota(root))))


def cpu_quota(root: Path = ROOT) -> float:
    """Return the CPU seconds per second that the control groups allow, over all cores, or inf without a quota.

    Args:
        root: folder that contains /proc and /sys.
    """
    quotas = [math.inf]
    for path in group_files("cpu", "cpu.max", "cpu.cfs_quota_us", root):
        with contextlib.suppress(OSError, ValueError):  # no such group, or 'max'
            if path.name == "cpu.max":
                quota, period = map(int, path.read_text().split())
            else:
                quota, period = (int(path.with_name(f"cpu.cfs_{kind}_us").read_text()) for kind in ("quota", "period"))
            if quota > 0 and period > 0:  # a quota of -1 means no limit
                quotas.append(quota / period)
    return min(quotas)


def quota_note(root: Path = ROOT) -> str:
    """Return a phrase about a CPU quota that is smaller than this process's number of cores, or '' if there is none.

    Args:
        root: folder that contains /proc and /sys.
    """
    quota, cores = cpu_quota(root), len(os.sched_getaffinity(0))
    return f"a CPU quota of {quota:.3g} of {cores} cores" if quota < cores else ""


def usable_memory(root: Path = ROOT) -> int:
    """Return this machine's memory in bytes, or a control group's limit if it is lower.

    Args:
        root: folder that contains /proc and /sys.
    """
    whole = bytes_by_name((root / "proc/meminfo").read_text())["MemTotal"]
    return min([whole, *(limit for limit, _ in _memory_limits(root))])


def free_memory(root: Path = ROOT) -> int:
    """Return the free memory in bytes, within the control groups' limits; the kernel's file cache is counted as free.

    Args:
        root: folder that contains /proc and /sys.
    """
    found = [bytes_by_name((root / "proc/meminfo").read_text())["MemAvailable"]]
    for limit, path in _memory_limits(root):
        used = path.with_name("memory.usage_in_bytes" if path.name == OLD_LIMIT else "memory.current")
        with contextlib.suppress(OSError, ValueError):
            found.append(limit - int(used.read_text()))
            # the kernel can reclaim it
            if kept := re.search(r"^inactive_file (\d+)$", path.with_name("memory.stat").read_text(), re.MULTILINE):
                found[-1] += int(kept[1])
    return min(found)


def _memory_limits(root: Path) -> Iterator[tuple[int, Path]]:
    """Yield each memory limit, in bytes, that this process's control groups set, and the file with the limit."""
    for name in ("memory.max", "memory.high"):  # above memory.high, the kernel slows processes down to a halt
        for path in group_files("memory", name, OLD_LIMIT, root):
            with contextlib.suppress(OSError, ValueError):  # no such group, or 'max'
                yield int(path.read_text()), path


def bytes_by_name(text: str) -> dict[str, int]:
    """Return the numbers in a file with lines such as 'VmRSS:  123 kB', in bytes."""
    return {name: 1024 * int(number) for name, number in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}


def oom_kills(root: Path = ROOT) -> int:
    """Return how many processes in this process's control group the kernel has killed because memory ran out.

    If the group has no count, return the machine's count; if that is also missing, as in some sandboxes, return 0.

    Args:
        root: folder that contains /proc and /sys.
    """
    for path in [*group_files("memory", "memory.events", "memory.oom_control", root), root / "proc/vmstat"]:
        with contextlib.suppress(OSError):
            if found := OOM_KILLS.search(path.read_text()):
                return int(found[1])
    return 0


def limit_threads() -> None:
    """Limit the number of PyTorch's threads to the number of usable cores, because PyTorch ignores quotas."""
    import torch

    torch.set_num_threads(min(torch.get_num_threads(), usable_cores()))
