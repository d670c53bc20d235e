"""Measures the contestants on one model: builds them, finds the best batch, lets them take turns, makes the table."""

from __future__ import annotations

import gc
import random
import statistics
import time
from dataclasses import dataclass

import torch

from benchmarks.gpu.contestants import MAKERS, OURS, PLAIN, TIMM, Contestant, Switches, make_network
from benchmarks.gpu.roofline import StepCosts, peak_of, step_costs
from benchmarks.report import Section, ratios_to, spread
from training.parallel.world import World

CANDIDATE_BATCHES = (32, 64, 128, 256, 512, 1024)
LONGEST_TIMING_SECONDS = 0.5
FEWEST_ROUNDS = 3
WORTHWHILE_GAIN = 1.05  # a doubled batch that brings less ends the search


@dataclass(frozen=True)
class Effort:
    """How much is measured."""

    image_size: int = 224
    num_classes: int = 1000
    warmup_steps: int = 8
    rounds: int = 7
    steps: int = 10
    batches: tuple[int, ...] = CANDIDATE_BATCHES

    def steps_of(self, step_seconds: float) -> int:
        """Return how many steps are timed at once: fewer where a step is long."""
        return max(1, min(self.steps, round(LONGEST_TIMING_SECONDS / step_seconds)))


QUICK = Effort(image_size=64, num_classes=10, warmup_steps=1, rounds=2, steps=1, batches=(4,))


@dataclass
class Timed:
    """A contestant with what was measured of it."""

    contestant: Contestant
    state_bytes: int
    working_bytes: int
    step_seconds: float


def synchronize(world: World) -> None:
    """Wait for the GPU."""
    if world.device.type == "cuda":
        torch.cuda.synchronize()


def allocated(world: World, *, peak: bool = False) -> int:
    """Return bytes of tensors on the GPU; 0 on a CPU."""
    if world.device.type != "cuda":
        return 0
    return torch.cuda.max_memory_allocated() if peak else torch.cuda.memory_allocated()


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
    """Build a contestant, warm it up, and note the memory that it holds and the memory that a step needs beside."""
    before = allocated(world)
    batch_size = len(batch[1])
    network = make_network(model, effort.image_size, effort.num_classes, batch_size)
    contestant = MAKERS[name](network, world, batch_size)
    seconds_per_step(contestant, batch, effort.warmup_steps, world)
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    held = allocated(world)
    step_seconds = seconds_per_step(contestant, batch, 1, world)
    return Timed(contestant, held - before, allocated(world, peak=True) - held, step_seconds)


def best_batch(model: str, effort: Effort, world: World, deadline: float) -> int:
    """Return the batch size at which our images/s stop growing, or memory or time end."""
    best, best_rate = effort.batches[0], 0.0
    for batch_size in effort.batches:
        if time.monotonic() > deadline:
            break
        try:
            batch = make_batch(effort, batch_size, world)
            timed = make_timed(OURS, model, batch, effort, world)
            rate = batch_size / seconds_per_step(timed.contestant, batch, effort.steps_of(timed.step_seconds), world)
            timed.contestant.close()
        except torch.OutOfMemoryError:
            break
        finally:
            timed = batch = None
            release(world)
        if rate < WORTHWHILE_GAIN * best_rate:
            break
        best, best_rate = batch_size, rate
    return best


def release(world: World) -> None:
    """Give the cached memory back, so that the next contestants begin alike."""
    gc.collect()
    if world.device.type == "cuda":
        torch.cuda.empty_cache()


def compare(model: str, batch_size: int, effort: Effort, world: World, deadline: float) -> Section:
    """Measure the contestants in turns at one batch size; past the deadline in fewer rounds."""
    batch = make_batch(effort, batch_size, world)
    entries = {name: make_timed(name, model, batch, effort, world) for name in MAKERS}
    steps = effort.steps_of(entries[PLAIN].step_seconds)
    order, shuffler, rounds = list(entries), random.Random(0), []
    while len(rounds) < effort.rounds and (len(rounds) < FEWEST_ROUNDS or time.monotonic() < deadline):
        shuffler.shuffle(order)
        rounds.append({name: seconds_per_step(entries[name].contestant, batch, steps, world) for name in order})
    for entry in entries.values():
        entry.contestant.close()
    costs = step_costs(model, batch_size, effort.image_size, effort.num_classes)
    return tabulate(f"{model}, {batch_size} images", batch_size, entries, rounds, costs, world)


def tabulate(
    title: str,
    batch_size: int,
    entries: dict[str, Timed],
    rounds: list[dict[str, float]],
    costs: StepCosts,
    world: World,
) -> Section:
    """Turn the seconds of each round into the table's rows."""
    peak = peak_of(world.device)
    speeds = [{name: batch_size / seconds for name, seconds in values.items()} for values in rounds]
    to_plain, to_timm = ratios_to(PLAIN, speeds), ratios_to(TIMM, speeds)
    rows = []
    for name, entry in entries.items():
        seconds = statistics.median(values[name] for values in rounds)
        rate = f"{batch_size / seconds:.0f}"
        mfu = f"{costs.flops / seconds / peak.flops_per_second:.1%}" if peak else "-"
        share = f"{costs.least_seconds(peak) / seconds:.0%}" if peak else "-"
        memory = f"{(entry.state_bytes + entry.working_bytes) / 1e9:.2f}" if world.device.type == "cuda" else "-"
        rows.append((name, rate, spread(to_plain[name]), spread(to_timm[name]), memory, mfu, share))
    text = (
        f"{costs.flops / batch_size / 1e9:.2f} GFLOP per image forward and backward; median (quartiles) of the ratio "
        "of images/s within each round, more is faster. Memory: tensors held and needed by a step, allocated. MFU and "
        f"roofline against {peak.source if peak else 'no known peak'}; how it is counted: benchmarks/gpu/roofline.py."
    )
    columns = ("contestant", "images/s", "/ plain loop", "/ timm's loop", "memory, GB", "MFU", "share of roofline")
    return Section(title, text, columns, rows)
