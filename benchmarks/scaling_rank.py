"""One rank of `scaling.py`: median seconds of our training step on random images in memory."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from benchmarks.our_engine import make_engine, training_step
from models import build_model
from training.distributed import barrier, start_world, stop_world

CLASSES = 10
WARMUP_STEPS, STEPS = 3, 15


def main() -> None:
    """Measure; rank 0 writes."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-type", required=True)
    parser.add_argument("--batch-size", type=int, required=True)
    parser.add_argument("--image-size", type=int, required=True)
    parser.add_argument("--result", type=Path, required=True)
    given = parser.parse_args()
    world = start_world()
    torch.manual_seed(0)
    module = build_model(given.model_type, num_classes=CLASSES, image_size=given.image_size).module
    engine = make_engine(module, "ddp", "fp32", given.batch_size, world)
    step = training_step(engine)
    images = torch.randn(given.batch_size, 3, given.image_size, given.image_size, device=world.device)
    labels = torch.randint(CLASSES, (given.batch_size,), device=world.device)
    seconds = []
    for _ in range(WARMUP_STEPS + STEPS):
        barrier(world)
        start = time.perf_counter()
        step(images, labels)
        barrier(world)
        seconds.append(time.perf_counter() - start)
    if world.is_main:
        given.result.write_text(json.dumps(statistics.median(seconds[WARMUP_STEPS:])))
    engine.close()
    stop_world()


if __name__ == "__main__":
    main()
