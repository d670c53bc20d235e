"""Measures contestants on one model: builds them, lets them take turns, and returns what each reached."""

from __future__ import annotations

import gc
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu.contestants import COMPILED, MAKERS, Contestant, Switches, make_network
from benchmarks.gpu.lines import emit
from benchmarks.gpu.roofline import peak_of, step_costs
from benchmarks.report import ratios_to
from zerovision.training.world.world import World

LONGEST_TIMING_SECONDS = 0.5
FEWEST_ROUNDS = 3


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    image_size: int = 224
    num_classes: int = 1000
    warmup_steps: int = 8
    rounds: int = 7
    steps: int = 10

    def steps_of(self, step_seconds: float) -> int:
        """Return how many steps are timed at once: fewer where a step is long."""
        return max(1, min(self.steps, round(LONGEST_TIMING_SECONDS / step_seconds)))


QUICK = Effort(image_size=64, num_classes=10, warmup_steps=1, rounds=2, steps=1)


@dataclass
class Timed:
    """A contestant with what was measured of it."""

    contestant: Contestant
    memory_bytes: int
    step_seconds: float


def synchronize(world: World) -> None:
    """Wait for the GPU."""
    if world.device.type == "cuda":
        torch.cuda.synchronize()


def reserved(world: World, *, peak: bool = False) -> int:
    """Return bytes that PyTorch's allocator has of the GPU, those of CUDA graphs too; 0 on a CPU."""
    if world.device.type != "cuda":
        return 0
    return torch.cuda.max_memory_reserved() if peak else torch.cuda.memory_reserved()


def make_batch(effort: Effort, batch_size: int, world: World) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images in channels_last, as our data path hands them over, and labels."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(batch_size, 3, effort.image_size, effort.image_size, generator=generator)
    labels = torch.randint(effort.num_classes, (batch_size,), generator=generator)
    return images.to(world.device, memory_format=torch.channels_last), labels.to(world.device)


def seconds_per_step(
    contestant: Contestant, batch: tuple[torch.Tensor, torch.Tensor], steps: int, world: World
) -> float:
    """Time steps under the contestant's own switches; afterwards they are as before."""
    as_before = Switches.current()
    contestant.switches.set()
    synchronize(world)
    start = time.perf_counter()
    for _ in range(steps):
        contestant.step(*batch)
    synchronize(world)
    seconds = (time.perf_counter() - start) / steps
    as_before.set()
    return seconds


def make_timed(name: str, model: str, batch: tuple[torch.Tensor, torch.Tensor], effort: Effort, world: World) -> Timed:
    """Build a contestant, warm it up, and note the memory that it and a step need."""
    release(world)
    before = reserved(world)
    batch_size = len(batch[1])
    network = make_network(model, effort.image_size, effort.num_classes, batch_size)
    contestant = (MAKERS | COMPILED)[name](network, world, batch_size, effort.image_size)
    seconds_per_step(contestant, batch, effort.warmup_steps, world)
    release(world)
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    step_seconds = seconds_per_step(contestant, batch, 1, world)
    return Timed(contestant, reserved(world, peak=True) - before, step_seconds)


def release(world: World) -> None:
    """Give the cached memory back, so that the next contestants begin alike."""
    gc.collect()
    if world.device.type == "cuda":
        torch.cuda.empty_cache()


def compare(
    names: Sequence[str], model: str, batch_size: int, effort: Effort, world: World, deadline: float
) -> list[dict[str, Any]]:
    """Measure contestants in turns at one batch size, past the deadline in fewer rounds; return a row of each.

    One that cannot be built, or past the deadline, is left out with a line that says so.
    """
    batch, entries = make_batch(effort, batch_size, world), dict[str, Timed]()
    for name in names:
        if time.monotonic() > deadline and entries:
            emit("left_out", what=f"{name}, {model}, {batch_size} images")
            continue
        try:
            entries[name] = make_timed(name, model, batch, effort, world)
        except Exception as error:  # time on a GPU is dear: the others are still measured
            emit("failed", what=f"{name}, {model}, {batch_size} images", error=f"{type(error).__name__}: {error}"[:300])
            release(world)
    if not entries:
        return []
    steps = effort.steps_of(next(iter(entries.values())).step_seconds)
    order, shuffler, rounds = list(entries), random.Random(0), []
    while len(rounds) < effort.rounds and (len(rounds) < FEWEST_ROUNDS or time.monotonic() < deadline):
        shuffler.shuffle(order)
        rounds.append({name: seconds_per_step(entries[name].contestant, batch, steps, world) for name in order})
    for entry in entries.values():
        entry.contestant.close()
    costs, peak = step_costs(model, batch_size, effort.image_size, effort.num_classes), peak_of(world.device)
    rows = []
    for name, entry in entries.items():
        seconds = statistics.median(values[name] for values in rounds)
        rows.append(
            {
                "contestant": name,
                "images_per_s": batch_size / seconds,
                # Of the speeds within each round; more is faster.
                "ratios": ratios_to(name, rounds),
                "memory_bytes": entry.memory_bytes,
                "mfu": costs.flops / seconds / peak.flops_per_second if peak else None,
                "share_of_roofline": costs.least_seconds(peak) / seconds if peak else None,
            }
        )
    return rows
