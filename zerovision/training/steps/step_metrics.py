"""Logs the numbers of each logging point: loss, speed, time shares, memory, and slow ranks.

All ranks finish a step together, because each waits for the slowest rank in the collectives. The detector of slow ranks
therefore compares the ranks' work: their time outside collectives, without possible waiting.
"""

from __future__ import annotations

import math
import socket
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import psutil
import torch

from zerovision.training.base.points import StepPoint
from zerovision.training.base.timing import ABSORBING, SPANS, mean_shares
from zerovision.training.observe.device_use import DeviceGauge
from zerovision.training.observe.observer import Observer, StepDone
from zerovision.training.steps.carrier import Run
from zerovision.training.steps.nonfinite_steps import NonFiniteGuard
from zerovision.training.world.collectives import gather_objects, gather_rows

SLOW_FACTOR = 1.3
CONSECUTIVE_POINTS = 2
SECONDS_BETWEEN_REPORTS = 600.0  # about the same rank
SHORTEST_INTERVAL_STEPS = 5  # the time of a single step varies too much


class SlowRank(NamedTuple):
    """A slow rank, its seconds of work per step, and the median of the other ranks' seconds."""

    rank: int
    step_seconds: float
    others_step_seconds: float


def work_seconds(ranks: Sequence[Mapping[str, float]]) -> list[float]:
    """Return the seconds that each rank spent on work, computed from the seconds of its spans.

    Work is what all ranks do in every step. It excludes waiting for other ranks, and logging, which only rank 0 does. A
    rank may also wait where the clock sees no collective: in the backward pass or the optimizer, if gradients are
    reduced from C++ (as in DDP) or on the engine's own stream. Time in these two spans that exceeds the fastest rank's
    is therefore counted only to the extent that other ranks waited for this rank in measured collectives.
    """
    exchanging = [rank["backward"] + rank["optimizer"] for rank in ranks]
    work = []
    for number, rank in enumerate(ranks):
        others = [other["communication"] for other in [*ranks[:number], *ranks[number + 1 :]]]
        waited_for = max(0.0, statistics.median(others) - rank["communication"]) if others else 0.0
        beyond = min(exchanging[number] - min(exchanging), waited_for)
        work.append(rank["data"] + rank["forward"] + rank["other"] + min(exchanging) + beyond)
    return work


class SlowRankDetector:
    """Compares the ranks' work at each logging point."""

    def __init__(self) -> None:
        self._work: list[float] = []
        self._steps = 0
        self._slow_points: dict[int, int] = {}  # number of consecutive slow points, by rank
        self._reported_at: dict[int, float] = {}

    def update(self, work: Sequence[float], steps: int) -> list[SlowRank]:
        """Return the ranks that were slow at consecutive logging points and were not reported recently.

        Args:
            work: seconds of work of each rank since the last call.
            steps: optimizer steps since the last call.
        """
        self._work = [old + new for old, new in zip(self._work or [0.0] * len(work), work, strict=True)]
        self._steps += steps
        if self._steps < SHORTEST_INTERVAL_STEPS or len(work) < 2:
            return []
        found, now = [], time.monotonic()
        for rank, own in enumerate(self._work):
            others = statistics.median(self._work[:rank] + self._work[rank + 1 :])
            self._slow_points[rank] = self._slow_points.get(rank, 0) + 1 if own > SLOW_FACTOR * others else 0
            is_new = now - self._reported_at.get(rank, -SECONDS_BETWEEN_REPORTS) >= SECONDS_BETWEEN_REPORTS
            if self._slow_points[rank] >= CONSECUTIVE_POINTS and is_new:
                self._reported_at[rank] = now
                found.append(SlowRank(rank, own / self._steps, others / self._steps))
        self._work, self._steps = [], 0
        return found


SECONDS_BETWEEN_POINTS = 1.0  # minimum if --log-every-steps is auto
STEPS_BETWEEN_POINTS = 10  # or a multiple of 10, if --log-every-steps is auto


def fewest_steps(ranks: Sequence[Mapping[str, float]], steps: int) -> int:
    """Return the number of steps that take `SECONDS_BETWEEN_POINTS`, the shortest automatic logging interval.

    `ranks` contains the seconds of each rank's spans in the last `steps` steps; it is the same on all ranks.
    """
    slowest = max(sum(span for name, span in rank.items() if name not in ABSORBING) for rank in ranks)
    return math.ceil(SECONDS_BETWEEN_POINTS * steps / max(slowest, 1e-9))


class StepMetrics(Observer):
    """Reads the sums and the clock at logging points, and logs their changes; the constructor is a collective."""

    span = "logging"

    def __init__(self, run: Run, guard: NonFiniteGuard) -> None:
        self._run, self._guard = run, guard
        self._hosts = gather_objects(socket.gethostname(), run.world)
        self._gauge = DeviceGauge(run.world, run.folder, run.model.flops)
        self._slow_ranks, self._fewest_steps = SlowRankDetector(), 1
        self._steps = -1  # since the last point, -1 before the first step of an epoch

    def before_step(self, position: int) -> None:
        if self._steps < 0:
            self._steps, self._last_time = 0, time.perf_counter()
            self._last_skipped = self._run.state.progress.skipped_steps
            self._last_sums, self._last_spans = self._run.state.sums.state(), self._run.clock.seconds()
            psutil.cpu_percent()  # starts the measurement

    def after_step(self, done: StepDone) -> None:
        """Count a step and, at a logging point, gather the metrics of all ranks and log them; a collective."""
        run, plan, position = self._run, self._run.plan, done.position
        self._steps += 1
        if not self._is_point(position % plan.steps_per_epoch + 1):
            return
        (loss_sum, _, _, count), spans, cpus = self._gather()  # the sync
        self._guard.settle()
        now = time.perf_counter()
        seconds = max(now - self._last_time, 1e-9)
        images_per_second = plan.images(position + 1 - self._steps, position + 1) / seconds
        gradient_norm = done.result.gradient_norm if done.result else None
        time_shares, skipped = mean_shares(spans), run.state.progress.skipped_steps
        run.loggers.steps(
            StepPoint(
                epoch=position // plan.steps_per_epoch + 1,
                step=position + 1,
                steps_per_epoch=plan.steps_per_epoch,
                total_steps=run.total_steps,
                loss=loss_sum / count if count else float("nan"),
                learning_rate=run.schedule.learning_rate(position),
                images_per_second=images_per_second,
                data_wait_share=time_shares["data"],
                seconds=seconds,
                seconds_left=(run.total_steps - position - 1) * seconds / self._steps,
                gradient_norm=float("nan") if gradient_norm is None else float(gradient_norm),
                skipped_steps=skipped - self._last_skipped,
                time_shares=time_shares,
                device=self._gauge.read(images_per_second),
                cpu_utilization=dict(zip(self._hosts, cpus, strict=True)),
            )
        )
        self._log_slow_ranks(position + 1, spans)
        self._fewest_steps = fewest_steps(spans, self._steps)
        self._last_time, self._last_skipped, self._steps = now, skipped, 0

    def after_steps(self) -> None:
        self._steps = -1

    def _is_point(self, step_of_epoch: int) -> bool:
        """Return whether a logging point follows a step of the epoch, counted from 1; the same on all ranks."""
        config, fewest = self._run.config, 0
        every = config.log_every_steps
        if every == "auto":
            every = config.steps_alone if config.steps_alone > 1 else STEPS_BETWEEN_POINTS
            fewest = self._fewest_steps
        is_due = step_of_epoch % every == 0 and self._steps >= fewest
        return is_due or step_of_epoch == self._run.plan.steps_per_epoch

    def _gather(self) -> tuple[list[float], list[dict[str, float]], list[float]]:
        """Return the score sums, and each rank's span seconds and CPU use, since the last call; a collective."""
        sums, spans = self._run.state.sums.state(), self._run.clock.seconds()
        own = [spans[name] - self._last_spans[name] for name in SPANS]
        row = torch.cat([sums - self._last_sums, sums.new_tensor([*own, psutil.cpu_percent() / 100])])
        rows = gather_rows(row, self._run.world).cpu()
        self._last_sums, self._last_spans = sums, spans
        scores, times, cpus = rows.split([len(sums), len(SPANS), 1], dim=1)
        by_rank = [dict(zip(SPANS, rank, strict=True)) for rank in times.tolist()]
        return scores.sum(0).tolist(), by_rank, cpus.flatten().tolist()

    def _log_slow_ranks(self, step: int, spans: list[dict[str, float]]) -> None:
        for slow in self._slow_ranks.update(work_seconds(spans), self._steps):
            host = self._hosts[slow.rank]
            self._run.loggers.message(
                f"rank {slow.rank} (host {host}) is slow: {1000 * slow.step_seconds:.3g} ms of work per step, "
                f"{1000 * slow.others_step_seconds:.3g} ms in the other ranks (median)"
            )
            self._run.loggers.event("slow_rank", {"step": step, **slow._asdict(), "host": host})
