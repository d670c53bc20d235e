"""What the same bytes on any number of ranks cost: a step of the native engine with and without them, in one run.

    OMP_NUM_THREADS=1 torchrun --nproc_per_node=2 benchmarks/leaf_tree.py

The opponent is the same engine without the promise: backward adds all micro-batches of a rank to one buffer, in their
order, BatchNorm has one version of its statistics, and the ranks' sums of squares are all-reduced. Both run in every
round, in shuffled order; a ratio is taken within each round, and its median is printed with the quartiles.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.our_engine import make_engine
from benchmarks.peers.job import mean_cross_entropy
from models.build import build_model
from training.parallel.block_norms import BLOCK, squares_of_rows
from training.parallel.collectives import barrier, sum_over_ranks
from training.parallel.native_engine import NativeEngine
from training.parallel.summation_tree import LeafAdditions, LeafSums
from training.parallel.world import World, start_world, stop_world

CLASSES = 10


def engine_of(
    name: str, image_size: int, batch_size: int, accumulation: int, world: World, *, tree: bool
) -> NativeEngine:
    """Build the native engine, with the tree or without."""
    torch.manual_seed(0)
    module = build_model(name, num_classes=CLASSES, image_size=image_size).module
    engine = make_engine(
        module,
        "ddp",
        "fp32",
        batch_size,
        world,
        engine="native",
        gradient_clipping=1.0,
        accumulation_steps=accumulation,
    )
    assert isinstance(engine, NativeEngine)
    if not tree:
        for bucket in engine._buckets:
            bucket.buffers.sums = LeafSums([bucket.buffers.gradients], [LeafAdditions(False, 0)] * accumulation)
        engine.buffers.select = lambda version: None  # type: ignore[method-assign]
        engine._block_sum = lambda parts: sum_over_ranks(  # type: ignore[assignment]
            squares_of_rows(parts.view(-1, BLOCK)).sum(), world
        )
    return engine


def seconds_of_step(engine: NativeEngine, batches: list[tuple[torch.Tensor, torch.Tensor]], world: World) -> float:
    """Return the time of one optimizer step over these micro-batches; the ranks start together."""
    barrier(world)
    start = time.perf_counter()
    for images, labels in batches:
        engine.backward(mean_cross_entropy(engine.forward(images), labels))
        engine.step()
    barrier(world)
    return time.perf_counter() - start


def main() -> None:
    """Measure, and print the table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-type", default="mobilenet")
    parser.add_argument("--batch-size", type=int, default=16, help="images of a micro-batch")
    parser.add_argument("--image-size", type=int, default=64, help="pixels")
    parser.add_argument("--accumulation", default="1,2,4,8", help="accumulation steps, comma-separated")
    parser.add_argument("--rounds", type=int, default=30)
    given = parser.parse_args()

    world = start_world()
    generator = torch.Generator().manual_seed(world.rank)
    size = (given.batch_size, 3, given.image_size, given.image_size)
    table = Table("accumulation steps", "with / without (quartiles)", "buffers of the gradients' size", "MB of them")
    for accumulation in map(int, given.accumulation.split(",")):
        images = torch.randn(size, generator=generator).contiguous(memory_format=torch.channels_last)
        batches = [(images, torch.randint(CLASSES, (given.batch_size,), generator=generator))] * accumulation
        settings = (given.model_type, given.image_size, given.batch_size, accumulation, world)
        engines = {tree: engine_of(*settings, tree=tree) for tree in (True, False)}
        order, shuffler, ratios = [True, False], random.Random(0), []
        for number in range(given.rounds + 2):
            shuffler.shuffle(order)  # the same on all ranks
            seconds = {tree: seconds_of_step(engines[tree], batches, world) for tree in order}
            if number >= 2:  # the first rounds only warm up
                ratios.append(seconds[True] / seconds[False])
        low, middle, high = statistics.quantiles(ratios, n=4)
        rows = len(engines[True]._buckets[0].buffers.sums._rows)
        values = sum(bucket.buffers.gradients.numel() for bucket in engines[True]._buckets)
        table.add_row(
            str(accumulation), f"{middle:.3f} ({low:.3f}-{high:.3f})", str(rows), f"{rows * values * 4 / 1e6:.1f}"
        )
    if world.is_main:
        command = (
            f"{world.describe()}: {given.model_type}, {given.image_size} px, {given.batch_size} images a micro-batch"
        )
        Console(width=120).print(command, table)
    stop_world()


if __name__ == "__main__":
    main()
