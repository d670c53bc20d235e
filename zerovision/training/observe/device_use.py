"""Measures the utilization of a run's devices, and its memory."""

from __future__ import annotations

import contextlib
import math
import shutil
import socket
import time

import torch

from zerovision.training.base.points import DeviceUse, RunPoint
from zerovision.training.base.run_folder import RunFolder
from zerovision.training.base.timing import mean_shares
from zerovision.training.engines.flops import TrainingFlops, peak_tflops
from zerovision.training.observe.memory_limit import peak_memory, used_memory
from zerovision.training.world.collectives import gather_objects
from zerovision.training.world.world import World

SECONDS_BETWEEN_UTILIZATIONS = 5.0


class DeviceGauge:
    """Measures this process and its device.

    Args:
        world: the ranks.
        folder: the run's folder.
        flops: counts the model's operations, or None.
    """

    def __init__(self, world: World, folder: RunFolder, flops: TrainingFlops | None) -> None:
        self._world, self._folder, self._flops = world, folder, flops
        self._asked_at = -math.inf
        self._utilization: float | None = None

    def read(self, images_per_second: float) -> DeviceUse:
        """Return this process's memory, the devices' utilization, and the free disk space.

        Args:
            images_per_second: the speed of all ranks together.
        """
        world = self._world
        tflops = mfu = utilization = free = None
        if self._flops is not None and self._flops.per_image is not None:
            tflops = images_per_second * self._flops.per_image / world.size / 1e12
        if world.device.type == "cuda":
            peak = peak_tflops(torch.cuda.get_device_name(world.device))
            mfu = tflops / peak if tflops is not None and peak is not None else None
            utilization = self._gpu_utilization()
        with contextlib.suppress(OSError):  # a disk that is gone is no reason to stop
            free = shutil.disk_usage(self._folder.path).free
        return DeviceUse(*_memory(world.device), tflops, mfu, utilization, free)

    def _gpu_utilization(self) -> float | None:
        """Return NVML's recent share of the time in which any kernel ran; the query takes milliseconds."""
        now = time.monotonic()
        if now - self._asked_at >= SECONDS_BETWEEN_UTILIZATIONS:
            self._asked_at, self._utilization = now, None
            # NVML, and its two dozen errors: in a container without the right, of a part of a GPU (MIG).
            with contextlib.suppress(Exception):
                self._utilization = torch.cuda.utilization(self._world.device) / 100
        return self._utilization


def run_point(step: int, images: int, spans: dict[str, float], gauge: DeviceGauge, world: World) -> RunPoint:
    """Return the numbers of a run; a collective.

    Args:
        step: the run's last step.
        images: images trained by all ranks since the clock was started.
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
    """Return the peak memory of every rank, see `DeviceUse`, in bytes; a collective."""
    return gather_objects(_memory(world.device)[0], world)


def name_hosts(world: World) -> list[str]:
    """Return the name of each rank's machine; a collective."""
    return gather_objects(socket.gethostname(), world)


def _memory(device: torch.device) -> tuple[int, int, int | None]:
    """Return the first three fields of `DeviceUse`."""
    reserved = torch.cuda.memory_reserved(device) if device.type == "cuda" else None
    return peak_memory(device), used_memory(device), reserved
