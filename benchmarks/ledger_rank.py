"""One rank of `step_phases.py`: seconds of a step's parts for several cases one after another, and of collectives.

The native engine sums gradients and spreads weights inside backward and update, so a rank's waiting for others is in
them. With more ranks than cores a rank that is not running cannot look at its clock: a block of steps is timed from one
meeting of all ranks to the next.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.our_engine import make_engine
from benchmarks.peers.job import mean_cross_entropy
from models.build import build_model
from planning.doctor.network import all_reduce_seconds
from training.parallel.buckets import FEWEST_ELEMENTS
from training.parallel.collectives import barrier, broadcast_object
from training.parallel.engine import Engine
from training.parallel.world import World, start_world, stop_world

CLASSES = 10
FEWEST_STEPS, MOST_STEPS = 3, 60
WARMUP_STEPS = 2  # the second one still meets memory that no step has touched
MESSAGES = 6  # of a megabyte, one after another, as the native engine sends the buckets of a small network


def block_seconds(engine: Engine, images: torch.Tensor, labels: torch.Tensor, world: World, steps: int) -> list[float]:
    """Return the seconds of a step's forward, of its backward and of the rest, means over a block; a collective."""
    images = images.contiguous(memory_format=torch.channels_last)
    forward_s = backward_s = 0.0
    barrier(world)
    start = time.perf_counter()
    for _ in range(steps):
        before = time.perf_counter()
        loss = mean_cross_entropy(engine.forward(images), labels)
        between = time.perf_counter()
        engine.backward(loss)
        backward_s += time.perf_counter() - between
        forward_s += between - before
        engine.step()
    barrier(world)
    rest_s = time.perf_counter() - start - forward_s - backward_s
    return [seconds / steps for seconds in (forward_s, backward_s, rest_s)]


def measure(case: Mapping[str, Any], seconds: float, world: World) -> list[float]:
    """Return the seconds of the parts of one case, from a block of about so many seconds; a collective."""
    batch_size, image_size = case["batch_size"], case["image_size"]
    torch.manual_seed(0)
    module = build_model(case["model"], num_classes=CLASSES, image_size=image_size, batch_size=batch_size).module
    engine = make_engine(module, case["strategy"], "fp32", batch_size, world, engine=case["engine"])
    batch = torch.randn(batch_size, 3, image_size, image_size), torch.randint(CLASSES, (batch_size,))
    for _ in range(WARMUP_STEPS):
        step_s = sum(block_seconds(engine, *batch, world, 1))
    wanted = min(MOST_STEPS, max(FEWEST_STEPS, round(seconds / step_s) + 1))
    steps = broadcast_object(wanted, lambda value: value, world)
    found = block_seconds(engine, *batch, world, steps)
    engine.close()
    return found


def collective_seconds(device: torch.device) -> list[dict[str, Any]]:
    """Return what gloo's collectives take of as many bytes as a bucket has, and the doctor's all-reduces."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    whole = [torch.zeros(FEWEST_ELEMENTS) for _ in range(MESSAGES)]
    other = [torch.zeros(FEWEST_ELEMENTS) for _ in range(MESSAGES)]
    parts = [one.view(ranks, -1)[rank] for one in other]

    started: Mapping[str, Callable[[int], Sequence[Any]]] = {
        "all_reduce": lambda place: [dist.all_reduce(whole[place], async_op=True)],
        "all_to_all": lambda place: [dist.all_to_all_single(other[place], whole[place], async_op=True)],
        "all_gather": lambda place: [dist.all_gather_into_tensor(whole[place], parts[place], async_op=True)],
        "reduce_scatter": lambda place: [dist.reduce_scatter_tensor(parts[place], whole[place], async_op=True)],
    }
    rows: list[dict[str, Any]] = [
        {"collective": "all_reduce", "messages": 1, "bytes": size, "seconds": taken}
        for size, taken in all_reduce_seconds(device)
    ]
    for name, start in started.items():
        dist.barrier()
        begin = time.perf_counter()
        for work in [work for place in range(MESSAGES) for work in start(place)]:
            work.wait()
        dist.barrier()
        row = {"collective": name, "messages": MESSAGES, "bytes": MESSAGES * 4 * FEWEST_ELEMENTS}
        rows.append(row | {"seconds": time.perf_counter() - begin})
    return rows


def main() -> None:
    """Measure all cases; rank 0 writes a line for each."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=json.loads, required=True, help="[{model, batch_size, image_size, ...}, ...]")
    parser.add_argument("--collectives", action="store_true")
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--result", type=Path, required=True)
    given = parser.parse_args()
    world = start_world()

    def write(row: Mapping[str, Any]) -> None:
        if world.is_main:
            with given.result.open("a") as lines:
                lines.write(json.dumps(row) + "\n")

    for row in collective_seconds(world.device) if given.collectives else ():
        write(row)
    for case in given.cases:
        write(case | {"seconds": measure(case, given.seconds, world)})
        gc.collect()
    stop_world()


if __name__ == "__main__":
    main()
