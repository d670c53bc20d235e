"""One rank of `ledger.py`: seconds of forward, backward and update of our engine for several cases, one after another.

The engine sums gradients and spreads weights inside backward and update, so a rank's waiting for others is in them.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import statistics
import time
from pathlib import Path

import torch

from benchmarks.our_engine import make_engine
from models.build import build_model
from training.observe.scores import sample_losses
from training.parallel.collectives import barrier, broadcast_object
from training.parallel.engine import Engine
from training.parallel.world import World, start_world, stop_world

CLASSES = 10
WARMUP_STEPS, FEWEST_STEPS, MOST_STEPS = 2, 4, 60


def step_seconds(engine: Engine, images: torch.Tensor, labels: torch.Tensor, world: World) -> list[float]:
    """Return the seconds of a step's forward, backward and update; the ranks begin together; a collective."""
    images = images.contiguous(memory_format=torch.channels_last)
    barrier(world)
    marks = [time.perf_counter()]
    loss = sample_losses(engine.forward(images), labels).mean()
    marks.append(time.perf_counter())
    engine.backward(loss)
    marks.append(time.perf_counter())
    engine.step()
    marks.append(time.perf_counter())
    return [end - start for start, end in itertools.pairwise(marks)]


def measure(model: str, batch_size: int, image_size: int, strategy: str, seconds: float, world: World) -> list[float]:
    """Return the medians over the steps of `seconds`; a collective."""
    torch.manual_seed(0)
    module = build_model(model, num_classes=CLASSES, image_size=image_size, batch_size=batch_size).module
    engine = make_engine(module, strategy, "fp32", batch_size, world)
    images = torch.randn(batch_size, 3, image_size, image_size)
    labels = torch.randint(CLASSES, (batch_size,))
    for _ in range(WARMUP_STEPS):
        longest = sum(step_seconds(engine, images, labels, world))
    steps = broadcast_object(min(MOST_STEPS, max(FEWEST_STEPS, round(seconds / longest))), lambda value: value, world)
    rows = [step_seconds(engine, images, labels, world) for _ in range(steps)]
    engine.close()
    return [statistics.median(row) for row in zip(*rows, strict=True)]


def main() -> None:
    """Measure all cases; rank 0 writes a line for each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=json.loads, required=True, help="[[model, batch, size, strategy], ...]")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--result", type=Path, required=True)
    given = parser.parse_args()
    world = start_world()
    for case in given.cases:
        parts = measure(*case, given.seconds, world)
        if world.is_main:
            with given.result.open("a") as lines:
                lines.write(json.dumps(parts) + "\n")
        gc.collect()
    stop_world()


if __name__ == "__main__":
    main()
