"""Steps from memory: all contestants in one job, in every round, in shuffled order; `step_rounds` starts this.

    OMP_NUM_THREADS=1 torchrun --nproc_per_node=2 -m benchmarks.compare_steps --result seconds.json

The result holds one entry per round: {contestant: seconds per step}.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from benchmarks.launch import run
from benchmarks.peers.job import Job, Measure, make_batches, read_job, take_turns, write_job

MODULES = (
    "bare_ddp",
    "fsdp2",
    "bare_deepspeed",
    "accelerate_loop",
    "lightning_trainer",
    "transformers_trainer",
    "timm_loop",
    "ours",
)


def step_rounds(
    ranks: int, job: Job, rounds: int, steps: int, modules: Sequence[str] = MODULES
) -> list[dict[str, float]]:
    """Measure on CPU ranks in a job of its own; return each round's seconds per step by contestant."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "seconds.json"
        words = [f"--job={write_job(job)}", f"--modules={','.join(modules)}", f"--rounds={rounds}", f"--steps={steps}"]
        said = run(["benchmarks.compare_steps", *words, f"--result={result}"], ranks)
        for line in sorted({line for line in said.splitlines() if "is left out" in line}):
            print(line, flush=True)
        return json.loads(result.read_text())


def contestants(job: Job, modules: Sequence[str]) -> dict[str, Measure]:
    """Build all of them; a peer that is not installed is left out, with a line that says so."""
    found: dict[str, Measure] = {}
    for name in modules:
        try:
            module = importlib.import_module(f"benchmarks.peers.{name}")
        except ModuleNotFoundError as error:
            print(f"{name} is left out: {error}", flush=True)
            continue
        found |= module.step_contestants(job)
    return found


def main() -> None:
    """Measure; rank 0 writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", type=read_job, default=Job(), help="fields of `Job` as JSON")
    parser.add_argument("--modules", default=",".join(MODULES), help="comma-separated, of benchmarks/peers")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=10, help="steps per contestant and round")
    parser.add_argument("--result", type=Path, required=True)
    given = parser.parse_args()
    dist.init_process_group("gloo")
    measures = contestants(given.job, given.modules.split(","))
    rounds = take_turns(measures, make_batches(given.job, given.steps), given.rounds)
    if dist.get_rank() == 0:
        given.result.write_text(json.dumps(rounds))
    dist.barrier()
    os._exit(0)  # several libraries hang their own closing on the process group; the result is written


if __name__ == "__main__":
    main()
