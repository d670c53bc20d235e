"""Numbers of a logging point and of a run: losses, speed, time shares, memory."""

from __future__ import annotations

import contextlib
import math
import resource
import shutil
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import torch

from zerovision.training.base.points import DeviceUse, RunPoint, StepPoint
from zerovision.training.base.run_logger import Loggers
from zerovision.training.base.timing import ABSORBING, SPANS, SpanClock, shares, start_clock
from zerovision.training.engines.engine import StepResult
from zerovision.training.engines.flops import TrainingFlops, peak_tflops
from zerovision.training.observe.slow_ranks import SlowRankDetector, work_seconds
from zerovision.training.tasks.scores import ScoreSums
from zerovision.training.world.collectives import gather_objects, gather_rows
from zerovision.training.world.world import World

if TYPE_CHECKING:
    from zerovision.training.observe.profiler import StepProfiler
    from zerovision.training.steps.context import TrainContext


SECONDS_BETWEEN_UTILIZATIONS = 5.0
SECONDS_BETWEEN_POINTS = 1.0  # at least, and
STEPS_BETWEEN_POINTS = 10  # or a multiple of them, if --log-every-steps is auto


class LogPace:
    """How far apart automatic logging points are: by the steps before them, which all ranks know from the last point.

    Attributes:
        fewest_steps: from one point to the next.
    """

    fewest_steps = 1

    def update(self, ranks: Sequence[Mapping[str, float]], steps: int) -> None:
        """Choose as many steps as take `SECONDS_BETWEEN_POINTS`.

        Args:
            ranks: of each rank the seconds of its spans since the last point, the same on all ranks.
            steps: optimizer steps since the last point.
        """
        slowest = max(sum(span for name, span in rank.items() if name not in ABSORBING) for rank in ranks)
        self.fewest_steps = math.ceil(SECONDS_BETWEEN_POINTS * steps / max(slowest, 1e-9))


class GpuUtilization:
    """NVML's share of the latest moments in which any kernel ran: asking takes milliseconds, so it is kept a while."""

    def __init__(self) -> None:
        self._asked_at = -math.inf
        self._share: float | None = None

    def read(self, device: torch.device) -> float | None:
        """Return the share, not older than `SECONDS_BETWEEN_UTILIZATIONS`; None if it is unknown."""
        now = time.monotonic()
        if now - self._asked_at >= SECONDS_BETWEEN_UTILIZATIONS:
            self._asked_at, self._share = now, None
            # NVML, and its two dozen errors: in a container without the right, of a part of a GPU (MIG).
            with contextlib.suppress(Exception):
                self._share = torch.cuda.utilization(device) / 100
        return self._share


@dataclass(frozen=True)
class Timing:
    """What measures time on this rank.

    Attributes:
        clock: spans of the loop.
        slow_ranks: detects a rank that slows down the others.
        hosts: name of each rank's machine, by rank.
        folder: of the run.
        flops: counts the model's operations, None if they are not wanted.
        profiler: `--profile`, None on ranks other than 0.
        utilization: how hard the GPU works.
        pace: of automatic logging points.
    """

    clock: SpanClock = field(default_factory=SpanClock)
    slow_ranks: SlowRankDetector = field(default_factory=SlowRankDetector)
    hosts: tuple[str, ...] = ()
    folder: Path = Path()
    flops: TrainingFlops | None = None
    profiler: StepProfiler | None = None
    utilization: GpuUtilization = field(default_factory=GpuUtilization)
    pace: LogPace = field(default_factory=LogPace)


class StepMetrics:
    """Reads one epoch's sums and the clock at logging points, and logs the differences."""

    def __init__(self, context: TrainContext, epoch: int, sums: ScoreSums) -> None:
        self._context, self._epoch, self._sums, self._guard = context, epoch, sums, context.guard
        self._world, self._loggers, self._timing = context.world, context.loggers, context.timing
        self._start = self._last_time = time.perf_counter()
        self._steps = 0
        self._last_skipped = self._guard.skipped
        self._last_sums = sums.state()
        self._last_spans = self._timing.clock.seconds()
        psutil.cpu_percent()  # from now on
        self._epoch_spans = [dict.fromkeys(SPANS, 0.0) for _ in range(self._world.size)]

    def after_step(self, position: int, result: StepResult | None) -> None:
        """Count an optimizer step; at a logging point gather over the ranks and log. A collective."""
        context = self._context
        self._steps += 1
        if not self._is_point(position % context.plan.steps_per_epoch + 1):
            return
        (loss_sum, _, _, count), spans, cpus = self._gather()  # the sync
        self._guard.settle()
        now = time.perf_counter()
        seconds = max(now - self._last_time, 1e-9)
        images_per_second = context.plan.images(position + 1 - self._steps, position + 1) / seconds
        gradient_norm = result.gradient_norm if result else None
        time_shares = _mean_shares(spans)
        self._loggers.steps(
            StepPoint(
                epoch=self._epoch + 1,
                step=position + 1,
                steps_per_epoch=context.plan.steps_per_epoch,
                total_steps=context.total_steps,
                loss=loss_sum / count if count else float("nan"),
                learning_rate=context.schedule.learning_rate(position),
                images_per_second=images_per_second,
                data_wait_share=time_shares["data"],
                seconds=seconds,
                seconds_left=(context.total_steps - position - 1) * seconds / self._steps,
                gradient_norm=float("nan") if gradient_norm is None else float(gradient_norm),
                skipped_steps=self._guard.skipped - self._last_skipped,
                time_shares=time_shares,
                device=device_use(images_per_second, self._timing, self._world),
                cpu_utilization=dict(zip(self._timing.hosts, cpus, strict=False)),
            )
        )
        self._log_slow_ranks(position + 1, spans)
        self._timing.pace.update(spans, self._steps)
        self._last_time, self._last_skipped, self._steps = now, self._guard.skipped, 0

    def _is_point(self, step_of_epoch: int) -> bool:
        """Return whether there is a logging point after a step of the epoch, from 1; the same on all ranks."""
        every, fewest = self._context.log_every_steps, 0
        if every == "auto":
            local_steps = self._context.local_steps
            every, fewest = local_steps if local_steps > 1 else STEPS_BETWEEN_POINTS, self._timing.pace.fewest_steps
        is_due = step_of_epoch % every == 0 and self._steps >= fewest
        return is_due or step_of_epoch == self._context.plan.steps_per_epoch

    def elapsed_seconds(self) -> float:
        """Seconds since the epoch began."""
        return max(time.perf_counter() - self._start, 1e-9)

    @property
    def data_wait_share(self) -> float:
        """Share of the epoch's time, up to its last logging point, in which the devices waited for data."""
        return _mean_shares(self._epoch_spans)["data"]

    def _gather(self) -> tuple[list[float], list[dict[str, float]], list[float]]:
        """Return score sums over all ranks, each rank's span seconds, and its machine's share of busy cores.

        All since the last call. A collective.
        """
        sums, spans = self._sums.state(), self._timing.clock.seconds()
        own = [spans[name] - self._last_spans[name] for name in SPANS]
        row = torch.cat([sums - self._last_sums, sums.new_tensor([*own, psutil.cpu_percent() / 100])])
        rows = gather_rows(row, self._world).cpu()
        self._last_sums, self._last_spans = sums, spans
        scores, times, cpus = rows.split([len(sums), len(SPANS), 1], dim=1)
        by_rank = [dict(zip(SPANS, rank, strict=True)) for rank in times.tolist()]
        for total, rank in zip(self._epoch_spans, by_rank, strict=True):
            total.update({name: total[name] + rank[name] for name in SPANS})
        return scores.sum(0).tolist(), by_rank, cpus.flatten().tolist()

    def _log_slow_ranks(self, step: int, spans: list[dict[str, float]]) -> None:
        hosts = self._timing.hosts
        for slow in self._timing.slow_ranks.update(work_seconds(spans), self._steps):
            host = f" (host {hosts[slow.rank]})" if hosts else ""
            self._loggers.message(
                f"rank {slow.rank}{host} is slow: {1000 * slow.step_seconds:.3g} ms of work a step, "
                f"the others {1000 * slow.others_step_seconds:.3g} ms (median)"
            )
            self._loggers.event(
                "slow_rank", {"step": step, **slow._asdict(), "host": hosts[slow.rank] if hosts else ""}
            )


def start_timing(
    world: World, flops: TrainingFlops | None, profile_steps: int, folder: Path, loggers: Loggers
) -> Timing:
    """Start the clock of this rank; a collective.

    Args:
        world: the ranks.
        flops: counts the model's operations, on rank 0.
        profile_steps: steps that rank 0 profiles, 0 for none.
        folder: of the run.
        loggers: of the run.
    """
    hosts = name_hosts(world)  # all ranks meet here, so their clocks start together
    clock = start_clock(world.device)
    profiler = None
    if profile_steps and world.is_main:
        from zerovision.training.observe.profiler import StepProfiler

        profiler = StepProfiler(profile_steps, folder / "profile", clock, loggers)
    return Timing(clock, hosts=hosts, folder=folder, flops=flops, profiler=profiler)


def run_point(step: int, images: int, timing: Timing, world: World) -> RunPoint:
    """Return the numbers of a run; a collective.

    Args:
        step: the run's last step.
        images: images trained by all ranks since the clock was started.
        timing: what measures time.
        world: the ranks.
    """
    own = timing.clock.seconds()
    rows = gather_objects([own[name] for name in SPANS], world)
    ranks = [dict(zip(SPANS, row, strict=True)) for row in rows]
    evaluation_seconds = ranks[0]["evaluation"]
    seconds = sum(ranks[0].values()) - evaluation_seconds
    images_per_second = images / max(seconds, 1e-9)
    return RunPoint(
        step=step,
        seconds=seconds,
        evaluation_seconds=evaluation_seconds,
        images_per_second=images_per_second,
        time_shares=_mean_shares(ranks),
        device=device_use(images_per_second, timing, world),
        memory_bytes_per_rank=peak_memory_per_rank(world),
    )


def peak_memory_per_rank(world: World) -> list[int]:
    """Return the peak memory of every rank, see `DeviceUse`, in bytes; a collective."""
    return gather_objects(_memory(world.device)[0], world)


def name_hosts(world: World) -> tuple[str, ...]:
    """Return the name of each rank's machine; a collective."""
    return tuple(gather_objects(socket.gethostname(), world))


def device_use(images_per_second: float, timing: Timing, world: World) -> DeviceUse:
    """Return this process's memory, how hard the devices work, and how much room the disk has.

    Args:
        images_per_second: of all ranks together.
        timing: counts the model's operations, and asks NVML.
        world: the ranks.
    """
    flops = timing.flops
    tflops = mfu = utilization = free = None
    if flops is not None and flops.per_image is not None:
        tflops = images_per_second * flops.per_image / world.size / 1e12
    if world.device.type == "cuda":
        peak = peak_tflops(torch.cuda.get_device_name(world.device))
        mfu = tflops / peak if tflops is not None and peak is not None else None
        utilization = timing.utilization.read(world.device)
    with contextlib.suppress(OSError):  # a disk that is gone is no reason to stop
        free = shutil.disk_usage(timing.folder).free
    return DeviceUse(*_memory(world.device), tflops, mfu, utilization, free)


def _memory(device: torch.device) -> tuple[int, int, int | None]:
    """Return the first three fields of `DeviceUse`."""
    if device.type == "cuda":
        cuda = torch.cuda
        return cuda.max_memory_allocated(device), cuda.memory_allocated(device), cuda.memory_reserved(device)
    # Pages that it shares with others included.
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    # The kernel updates the peak now and then only.
    return max(resident, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024), resident, None


def _mean_shares(ranks: list[dict[str, float]]) -> Mapping[str, float]:
    """Return the mean over the ranks of each span's share."""
    by_rank = [shares(seconds) for seconds in ranks]
    return {name: sum(rank[name] for rank in by_rank) / len(by_rank) for name in by_rank[0]}
