"""One rank of `scaling.py`: seconds of our training step for several batch and image sizes, in turns in one job."""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from pathlib import Path

import torch

from benchmarks.our_engine import Step, make_engine, training_step
from zerovision.models.build import build_model
from zerovision.training.world.collectives import barrier
from zerovision.training.world.world import World, start_world, stop_world

CLASSES = 10
ROUNDS, STEPS = 7, 4  # and one round that only warms up


def make_step(model: str, batch_size: int, image_size: int, world: World) -> Step:
    """Build our engine under ddp for one case."""
    torch.manual_seed(0)
    module = build_model(model, num_classes=CLASSES, image_size=image_size, batch_size=batch_size).module
    return training_step(make_engine(module, "ddp", "fp32", batch_size, world))


def seconds_per_step(step: Step, batch_size: int, image_size: int, world: World) -> float:
    """Time a few steps; the ranks start and end together."""
    images = torch.randn(batch_size, 3, image_size, image_size, device=world.device)
    labels = torch.randint(CLASSES, (batch_size,), device=world.device)
    barrier(world)
    start = time.perf_counter()
    for _ in range(STEPS):
        step(images, labels)
    barrier(world)
    return (time.perf_counter() - start) / STEPS


def main() -> None:
    """Measure all cases in every round, in shuffled order; rank 0 writes the median of each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-type", required=True)
    parser.add_argument("--cases", type=json.loads, required=True, help="[[batch size, image size], ...]")
    parser.add_argument("--result", type=Path, required=True)
    given = parser.parse_args()
    world = start_world()
    cases = [tuple(case) for case in given.cases]
    steps = {case: make_step(given.model_type, *case, world) for case in cases}
    seconds: dict[tuple[int, int], list[float]] = {case: [] for case in cases}
    order, shuffler = list(cases), random.Random(0)
    for _ in range(1 + ROUNDS):
        shuffler.shuffle(order)  # the same on all ranks
        for case in order:
            seconds[case].append(seconds_per_step(steps[case], *case, world))
    if world.is_main:
        given.result.write_text(json.dumps([statistics.median(seconds[case][1:]) for case in cases]))
    stop_world()


if __name__ == "__main__":
    main()
