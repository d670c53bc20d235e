"""A training on more and more ranks: images/s, efficiency, cost, failures, and from when on more do not pay."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from planning.communication import USUAL_BLOCKS, CommunicationTime, communication_s
from planning.failures import (
    FAILURES_PER_GPU_DAY,
    GPU_SPREAD,
    SECONDS_PER_DAY,
    daly_interval_s,
    expected_maximum,
    lost_share,
    mean_time_between_failures_s,
)
from planning.machines import Machine
from planning.memory import FLOAT32_BYTES
from training.errors import UserError, one_line
from training.parallel.strategies import plan_of

MOST_RANKS = 1 << 16
WORTH_IT = 0.5  # of a lone rank's images/s: what each further rank has to add
# Accuracy has been held to about so many images per step: You et al. 2018, arXiv:1709.05011, ResNet-50 with LARS.
LARGEST_BATCH = 32768
RESTART_S = 120.0  # assumed: notice a failure, start the processes, read the checkpoint
STATE_VALUES = 3  # per parameter in a checkpoint: weight and two moments
COPY_BYTES_PER_S = 10e9  # assumed, to the memory from which a checkpoint is written beside the steps
SAVE_FLOOR_S = 0.005  # of a save: benchmarks/checkpoint_stall.py


@dataclass(frozen=True)
class ScaleJob:
    """A training whose batch per rank stays as the ranks become more.

    Attributes:
        engine: 'native', 'torch' or 'deepspeed'.
        strategy: a key of `STRATEGIES`.
        parameters: trained ones.
        machine: one of those that the ranks fill.
        batch_size: images of a micro-batch.
        forward_s: of a micro-batch on a rank alone, predicted or measured.
        backward_s: likewise.
        update_s: of all parameters.
        images: of an epoch.
        accumulation_steps: micro-batches of an update.
        blocks: of the network.
        spread: standard deviation of the ranks' time for equal work, as a share of it.
        failures_per_gpu_day: on average.
    """

    engine: str
    strategy: str
    parameters: int
    machine: Machine
    batch_size: int
    forward_s: float
    backward_s: float
    update_s: float
    images: int
    accumulation_steps: int = 1
    blocks: int = USUAL_BLOCKS
    spread: float = GPU_SPREAD
    failures_per_gpu_day: float = FAILURES_PER_GPU_DAY


@dataclass(frozen=True)
class ScalePoint:
    """What is expected of so many ranks.

    Attributes:
        ranks: of the run.
        global_batch: images of an update.
        step_s: of an update.
        exposed_communication_s: of it, what nothing hides.
        straggler_s: of it, the wait for the slowest rank.
        images_per_s: of all ranks, without failures.
        efficiency: images/s per rank, as a share of a lone rank's.
        failures_per_day: of the run.
        save_every_s: interval that loses least.
        lost_share: of the run's time, by failures and saves at that interval.
        epoch_s: with what is lost.
        gpu_hours_per_epoch: likewise.
    """

    ranks: int
    global_batch: int
    step_s: float
    exposed_communication_s: float
    straggler_s: float
    images_per_s: float
    efficiency: float
    failures_per_day: float
    save_every_s: float
    lost_share: float
    epoch_s: float
    gpu_hours_per_epoch: float


def scale(job: ScaleJob, counts: Sequence[int]) -> list[ScalePoint]:
    """Predict a training on each of these numbers of ranks; plain arithmetic."""
    alone = _images_per_s(job, 1)
    return [_point(job, ranks, alone) for ranks in counts]


def read_counts(text: str) -> list[int]:
    """Return the numbers of ranks of '8..4096': the first, doubled as long as it is below the last, and the last.

    Raises:
        UserError: for anything else.
    """
    found = re.fullmatch(r"(\d{1,6})(?:\.\.(\d{1,6}))?", text)
    first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 1 <= first <= last <= MOST_RANKS:
        raise UserError(f"--scale {one_line(text, 50)}: give FIRST..LAST GPUs of 1 to {MOST_RANKS}, such as 8..4096.")
    counts = [first << doublings for doublings in range((last // first).bit_length())]
    return [count for count in counts if count < last] + [last]


def step_parts_s(job: ScaleJob, ranks: int) -> tuple[float, float, CommunicationTime]:
    """Return seconds of an update on so many ranks: all of it, the wait for the slowest rank, and the exchange."""
    plan = plan_of(job.strategy, ranks)
    compute_s = job.accumulation_steps * (job.forward_s + job.backward_s)
    straggler_s = job.spread * compute_s * expected_maximum(ranks)
    exchange = communication_s(
        job.engine,
        plan,
        job.parameters,
        job.machine,
        forward_s=job.forward_s,
        backward_s=job.backward_s,
        accumulation_steps=job.accumulation_steps,
        blocks=job.blocks,
    )
    is_replicated = job.engine == "torch" and plan.zero_stage == 1  # every rank updates all parameters
    update_s = job.update_s if is_replicated else job.update_s / ranks
    return compute_s + straggler_s + exchange.exposed_s + update_s, straggler_s, exchange


def verdict(points: Sequence[ScalePoint]) -> str:
    """Return in one sentence up to where more ranks pay, and what ends it."""
    for before, after in itertools.pairwise(points):
        alone = before.images_per_s / (before.ranks * before.efficiency)
        added = (_net(after) - _net(before)) / (after.ranks - before.ranks) / alone
        grown = f"from {before.ranks} to {after.ranks} GPUs"
        if added < WORTH_IT:
            return f"more than {before.ranks} GPUs do not pay: {grown} each adds {max(added, 0):.0%} of one alone."
        if after.global_batch > LARGEST_BATCH >= before.global_batch:
            return (
                f"more than {before.ranks} GPUs pay in images/s only: {grown} a step grows to {after.global_batch} "
                f"images, and accuracy has been held to about {LARGEST_BATCH}; give a smaller batch per GPU."
            )
    last = points[-1]
    return f"{last.ranks} GPUs still pay: efficiency {last.efficiency:.0%}, {last.lost_share:.1%} lost to failures."


def _net(point: ScalePoint) -> float:
    return point.images_per_s * (1 - point.lost_share)


def _images_per_s(job: ScaleJob, ranks: int) -> float:
    return ranks * job.batch_size * job.accumulation_steps / step_parts_s(job, ranks)[0]


def _point(job: ScaleJob, ranks: int, alone: float) -> ScalePoint:
    step_s, straggler_s, exchange = step_parts_s(job, ranks)
    global_batch = ranks * job.batch_size * job.accumulation_steps
    rate = global_batch / step_s
    save_s = SAVE_FLOOR_S + STATE_VALUES * FLOAT32_BYTES * job.parameters / ranks / COPY_BYTES_PER_S
    between_s = mean_time_between_failures_s(ranks, job.failures_per_gpu_day)
    interval_s = daly_interval_s(save_s, between_s)
    lost = lost_share(interval_s, save_s, RESTART_S, between_s)
    steps = math.ceil(job.images / global_batch)
    epoch_s = steps * step_s / (1 - lost) if lost < 1 else math.inf
    return ScalePoint(
        ranks=ranks,
        global_batch=global_batch,
        step_s=step_s,
        exposed_communication_s=exchange.exposed_s,
        straggler_s=straggler_s,
        images_per_s=rate,
        efficiency=rate / ranks / alone,
        failures_per_day=SECONDS_PER_DAY / between_s,
        save_every_s=interval_s,
        lost_share=lost,
        epoch_s=epoch_s,
        gpu_hours_per_epoch=ranks * epoch_s / 3600,
    )
