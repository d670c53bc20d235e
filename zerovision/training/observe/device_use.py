"""Measures the utilization of a run's devices, and the used, peak and available memory of each rank.

On a GPU, the available memory is the unused memory of PyTorch's allocator plus the free memory of the GPU. On a CPU, it
is the rank's share of the free memory of the machine and the control group, or less if the limits of the process
(RLIMIT_DATA, RLIMIT_AS) are lower.
"""

from __future__ import annotations

import contextlib
import math
import resource
import shutil
import time
from pathlib import Path

import torch

from zerovision.training.base.control_groups import OWN_LIMITS, ROOT, bytes_by_name, free_memory
from zerovision.training.base.points import DeviceUse, RunPoint
from zerovision.training.base.run_folder import RunFolder
from zerovision.training.base.timing import mean_shares
from zerovision.training.engines.flops import TrainingFlops, peak_tflops
from zerovision.training.world.collectives import gather_objects
from zerovision.training.world.world import World

FILL = 0.9  # share of the available memory to plan with, because other steps and processes may need more


def memory_room(device: torch.device, sharing: int, root: Path = ROOT) -> int:
    """Return the number of bytes that this rank can still allocate.

    Args:
        device: the rank's device.
        sharing: number of ranks on this machine, which share free memory equally.
        root: folder that contains /proc and /sys.
    """
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    status, rooms = bytes_by_name((root / "proc/self/status").read_text()), [free_memory(root) // sharing]
    for limit, name in OWN_LIMITS:
        most, _ = resource.getrlimit(limit)
        if most != resource.RLIM_INFINITY:
            rooms.append(most - status[name])
    return max(min(rooms), 1)


def used_memory(device: torch.device) -> int:
    """Return the bytes that this rank uses: its tensors on a GPU, or resident memory with shared pages on a CPU."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return bytes_by_name((ROOT / "proc/self/status").read_text())["VmRSS"]


def peak_memory(device: torch.device) -> int:
    """Return the peak of `used_memory` since `reset_peak_memory`."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    status = bytes_by_name((ROOT / "proc/self/status").read_text())
    return max(status["VmRSS"], status.get("VmHWM", 0))  # not every sandbox reports the peak


def reset_peak_memory(device: torch.device) -> None:
    """Reset the peak to the current use; if the kernel does not allow this, the old peak remains, as an upper bound."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(OSError):
            (ROOT / "proc/self/clear_refs").write_text("5")  # resets the peak of resident memory; see proc(5)


SECONDS_BETWEEN_UTILIZATIONS = 5.0


class DeviceGauge:
    """Measures this process and its device.

    Args:
        world: the ranks.
        folder: the run's folder.
        flops: counter of the model's operations, or None.
    """

    def __init__(self, world: World, folder: RunFolder, flops: TrainingFlops | None) -> None:
        self._world, self._folder, self._flops = world, folder, flops
        self._asked_at = -math.inf
        self._utilization: float | None = None

    def read(self, images_per_second: float) -> DeviceUse:
        """Return this process's memory, the devices' utilization, and the free disk space.

        Args:
            images_per_second: combined speed of all ranks.
        """
        world = self._world
        tflops = mfu = free = None
        if self._flops is not None and self._flops.per_image is not None:
            tflops = images_per_second * self._flops.per_image / world.size / 1e12
        if world.device.type == "cuda":
            peak = peak_tflops(torch.cuda.get_device_name(world.device))
            mfu = tflops / peak if tflops is not None and peak is not None else None
            if time.monotonic() - self._asked_at >= SECONDS_BETWEEN_UTILIZATIONS:  # the query takes milliseconds
                self._asked_at, self._utilization = time.monotonic(), None
                # NVML can raise two dozen errors, e.g. in a container without permission or on a part of a GPU (MIG).
                with contextlib.suppress(Exception):
                    self._utilization = torch.cuda.utilization(world.device) / 100
        with contextlib.suppress(OSError):  # a disk that has become unavailable is no reason to stop
            free = shutil.disk_usage(self._folder.path).free
        return DeviceUse(*_memory(world.device), tflops, mfu, self._utilization, free)


def run_point(step: int, images: int, spans: dict[str, float], gauge: DeviceGauge, world: World) -> RunPoint:
    """Return the numbers that a run logs at its end; a collective.

    Args:
        step: the run's last step.
        images: number of images on which all ranks have trained since the clock started.
        spans: seconds of each span of this rank's clock.
        gauge: gauge of this process.
        world: the ranks.
    """
    ranks = gather_objects(spans, world)
    evaluation_seconds = ranks[0]["evaluation"]
    seconds = sum(ranks[0].values()) - evaluation_seconds
    images_per_second = images / max(seconds, 1e-9)
    return RunPoint(
        step=step,
        seconds=seconds,
        evaluation_seconds=evaluation_seconds,
        images_per_second=images_per_second,
        time_shares=mean_shares(ranks),
        device=gauge.read(images_per_second),
        memory_bytes_per_rank=peak_memory_per_rank(world),
    )


def peak_memory_per_rank(world: World) -> list[int]:
    """Return the peak memory of each rank in bytes, as defined in `DeviceUse`; a collective."""
    return gather_objects(_memory(world.device)[0], world)


def _memory(device: torch.device) -> tuple[int, int, int | None]:
    """Return the first three fields of `DeviceUse`."""
    reserved = torch.cuda.memory_reserved(device) if device.type == "cuda" else None
    return peak_memory(device), used_memory(device), reserved
