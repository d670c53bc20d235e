"""Steps from memory: all contestants in one job, in every round, in shuffled order; `compare.py` starts this.

    OMP_NUM_THREADS=1 torchrun --nproc_per_node=2 -m benchmarks.compare_steps --result seconds.json

The result holds one entry per round, the first of which only warms up: {contestant: seconds per step}.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import json
import os
import random
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.peers.job import NUM_CLASSES, Batches, Job, Measure

MODULES = (
    "bare_ddp",
    "bare_deepspeed",
    "accelerate_loop",
    "lightning_trainer",
    "transformers_trainer",
    "timm_loop",
    "ours",
)


def contestants(job: Job) -> dict[str, Measure]:
    """Build all of them; a peer that is not installed is left out, with a line that says so."""
    found: dict[str, Measure] = {}
    for name in MODULES:
        try:
            module = importlib.import_module(f"benchmarks.peers.{name}")
        except ModuleNotFoundError as error:
            print(f"{name} is left out: {error}", flush=True)
            continue
        found |= module.step_contestants(job)
    return found


def make_batches(job: Job, steps: int) -> Batches:
    """Random images, others on each rank."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    size = (job.batch_size, 3, job.image_size, job.image_size)
    return [
        (torch.randn(size, generator=generator), torch.randint(NUM_CLASSES, (job.batch_size,), generator=generator))
        for _ in range(steps)
    ]


def main() -> None:
    """Measure; rank 0 writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model-type", default="mobilenet")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=10, help="steps per contestant and round")
    parser.add_argument("--result", type=Path, required=True)
    given = parser.parse_args()
    dist.init_process_group("gloo")
    job = Job(model_type=given.model_type)
    measures = contestants(job)
    batches = make_batches(job, given.steps)
    order, shuffler, rounds = list(measures), random.Random(0), []
    for _ in range(given.rounds + 1):
        shuffler.shuffle(order)  # the same on all ranks
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            seconds = {name: measures[name](batches) for name in order}
        rounds.append({name: seconds[name] for name in measures})
    if dist.get_rank() == 0:
        given.result.write_text(json.dumps(rounds))
    dist.barrier()
    os._exit(0)  # several libraries hang their own closing on the process group; the result is written


if __name__ == "__main__":
    main()
