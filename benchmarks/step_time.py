"""Time of one optimizer step: our strategies against a bare DistributedDataParallel loop, in one run.

    OMP_NUM_THREADS=1 torchrun --nproc_per_node=2 benchmarks/step_time.py --gradient-clipping 0

Same model, data in memory, fp32, AdamW, ranks and threads for all; the bare loop has PyTorch's default settings. All
variants run in every round, in shuffled order; a ratio is taken within each round, and the median over the rounds is
printed with the quartiles. The first round only warms up.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.our_engine import Step, make_engine, training_step
from models.build import build_model
from training.config import TrainConfig
from training.parallel.build_engine import ENGINES
from training.parallel.collectives import barrier
from training.parallel.strategies import STRATEGIES
from training.parallel.world import World, start_world, stop_world

CLASSES = 10
BASELINE = "bare DDP"
# Every option that makes it faster, beside fused AdamW and channels_last.
TUNED_OPTIONS = {"gradient_as_bucket_view": True, "static_graph": True, "broadcast_buffers": False}


def make_model(name: str, image_size: int, world: World) -> nn.Module:
    """Build the model with the same weights for every variant."""
    torch.manual_seed(0)
    return build_model(name, num_classes=CLASSES, image_size=image_size).module.to(world.device)


def ddp_step(
    module: nn.Module,
    gradient_clipping: float = 0.0,
    *,
    fused: bool = False,
    channels_last: bool = False,
    **options: bool,
) -> Step:
    """The loop that everybody writes first, around DistributedDataParallel with `options`."""
    if channels_last:
        module = module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    config = TrainConfig()
    parallel = DistributedDataParallel(module, **options)
    optimizer = torch.optim.AdamW(
        parallel.parameters(), lr=config.learning_rate, weight_decay=config.weight_decay, fused=fused
    )

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        if channels_last:
            images = images.contiguous(memory_format=torch.channels_last)
        optimizer.zero_grad()
        nn.functional.cross_entropy(parallel(images), labels).backward()
        if gradient_clipping:
            nn.utils.clip_grad_norm_(parallel.parameters(), gradient_clipping)
        optimizer.step()

    return step


def seconds_per_step(step: Step, batches: list[tuple[torch.Tensor, torch.Tensor]], world: World) -> float:
    """Return the mean over the batches; the ranks start together."""
    barrier(world)
    start = time.perf_counter()
    for images, labels in batches:
        step(images, labels)
    if world.device.type == "cuda":
        torch.cuda.synchronize()
    barrier(world)
    return (time.perf_counter() - start) / len(batches)


def main() -> None:
    """Measure, and print the table on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-type", default="mobilenet")
    parser.add_argument("--batch-size", type=int, default=16, help="images per rank")
    parser.add_argument("--image-size", type=int, default=64, help="pixels")
    parser.add_argument("--gradient-clipping", type=float, default=0.0, help="largest norm, 0 for none")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=10, help="steps per variant and round")
    given = parser.parse_args()

    world = start_world()
    generator = torch.Generator().manual_seed(world.rank)
    size = (given.batch_size, 3, given.image_size, given.image_size)
    batches = [
        (torch.randn(size, generator=generator), torch.randint(CLASSES, (given.batch_size,), generator=generator))
        for _ in range(given.steps)
    ]
    batches = [(images.to(world.device), labels.to(world.device)) for images, labels in batches]
    clipping = given.gradient_clipping
    variants = {BASELINE: ddp_step(make_model(given.model_type, given.image_size, world), clipping)}
    tuned = make_model(given.model_type, given.image_size, world)
    variants["tuned DDP"] = ddp_step(tuned, clipping, fused=True, channels_last=True, **TUNED_OPTIONS)
    for name, strategy in product(ENGINES, STRATEGIES):
        module = make_model(given.model_type, given.image_size, world)
        engine = make_engine(module, strategy, "fp32", given.batch_size, world, engine=name, gradient_clipping=clipping)
        variants[f"{strategy}, {name}"] = training_step(engine)

    order, shuffler = list(variants), random.Random(0)
    rounds = []
    for _ in range(given.rounds + 1):
        shuffler.shuffle(order)  # the same on all ranks
        rounds.append({name: seconds_per_step(variants[name], batches, world) for name in order})
    if world.is_main:
        table = Table("variant", "ratio", "quartiles", "ms/step (median)")
        for name in variants:
            ratios = [seconds[name] / seconds[BASELINE] for seconds in rounds[1:]]
            low, _, high = statistics.quantiles(ratios, n=4)
            milliseconds = 1e3 * statistics.median(seconds[name] for seconds in rounds[1:])
            table.add_row(name, f"{statistics.median(ratios):.2f}", f"{low:.2f}-{high:.2f}", f"{milliseconds:.1f}")
        Console().print(
            f"{given.model_type}, {given.batch_size} x {given.image_size} px per rank, fp32, AdamW, "
            f"clipping {given.gradient_clipping:g}, {world.describe()}, {given.rounds} rounds of {given.steps} steps"
        )
        Console().print(table)
    stop_world()


if __name__ == "__main__":
    main()
