"""Steps of every mesh against `ddp` on the same CPU ranks, at the same global batch.

    python benchmarks/mesh_steps.py
    python benchmarks/mesh_steps.py --models vgg --ranks 2 --rounds 3

All meshes of a model and number of ranks run in one job, every one in every round, in shuffled order, after one round
that warms up; ratios are within each round. Images are in memory; fp32, AdamW, no clipping. `--only` is for models of
which not all engines fit into memory at a time.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import shlex
import statistics
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch.distributed as dist

from benchmarks.launch import torchrun
from benchmarks.our_engine import make_engine, training_step
from benchmarks.peers.job import Batches, Job, Measure, make_batches, make_network, take_turns, timed
from benchmarks.report import Section, ratios_to, save, show, spread, versions
from zerovision.training.base.errors import UserError
from zerovision.training.world.mesh import form_mesh
from zerovision.training.world.world import World, start_world, stop_world

BASELINE = "ddp"
meshes = functools.cache(form_mesh)


class Division(NamedTuple):
    """How the ranks of a job are divided, and each image group's part of the global batch."""

    strategy: str = "ddp"
    tensor: int = 1
    pipeline: int = 1
    micro_batches: int = 1
    schedule: str = "1f1b"

    def describe(self) -> str:
        """Return the strategy and what differs from the defaults."""
        words = [self.strategy]
        words += [f"tensor {self.tensor}"] if self.tensor > 1 else []
        words += [f"pipeline {self.pipeline} {self.schedule}"] if self.pipeline > 1 else []
        words += [f"{self.micro_batches} micro-batches"] if self.micro_batches > 1 else []
        return ", ".join(words)


DIVISIONS = {
    2: (
        Division(),
        Division(micro_batches=4),
        Division("fsdp_stage3"),
        Division(tensor=2),
        Division(pipeline=2, micro_batches=4),
        Division(pipeline=2, micro_batches=8),
        Division(pipeline=2, micro_batches=8, schedule="gpipe"),
        Division(pipeline=2, micro_batches=8, schedule="interleaved"),
    ),
    4: (
        Division(),
        Division("fsdp_stage3"),
        Division(tensor=2),
        Division("fsdp_stage3", tensor=2),
        Division(tensor=4),
        Division(pipeline=2, micro_batches=4),
        Division(pipeline=4, micro_batches=8),
        Division(tensor=2, pipeline=2, micro_batches=8),
    ),
}


def measure_of(division: Division, job: Job, world: World) -> Measure:
    """Build the engine of a division, and return what times it over global batches; a collective.

    Raises:
        UserError: if the model cannot be divided so.
    """
    mesh = meshes(world, division.tensor, division.pipeline)
    share = job.batch_size // mesh.data.size
    engine = make_engine(
        make_network(job),
        division.strategy,
        "fp32",
        share // division.micro_batches,
        mesh,
        accumulation_steps=division.micro_batches,
        pipeline_schedule=division.schedule,
        image_shape=(3, job.image_size, job.image_size),
    )
    measure = timed(training_step(engine, division.micro_batches))
    part = slice(mesh.data.rank * share, (mesh.data.rank + 1) * share)

    def over_own_part(batches: Batches) -> float:
        return measure([(images[part], labels[part]) for images, labels in batches])

    return over_own_part


def be_a_rank(job: Job, only: str, rounds: int, steps: int, result: Path) -> None:
    """Time those divisions that the model knows, or `only` some; rank 0 writes each round's seconds by division."""
    world = start_world()
    measures = {}
    for division in DIVISIONS[world.size]:
        if only and division.describe() not in (BASELINE, *only.split("; ")):
            continue
        try:
            measures[division.describe()] = measure_of(division, job, world)
        except UserError as error:
            if world.is_main:
                print(f"{job.model_type}, {division.describe()} is left out: {error}", flush=True)
    taken = take_turns(measures, make_batches(job, steps, seed=0), rounds)
    if world.is_main:
        result.write_text(json.dumps(taken))
    dist.barrier()
    stop_world()


def main() -> None:
    """Measure, print and save; under torchrun, be a rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = "timm:vit_small_patch16_224,timm:resnet18"
    parser.add_argument("--models", default=models, help="comma-separated")
    parser.add_argument("--ranks", default="2,4", help=f"comma-separated, of {', '.join(map(str, DIVISIONS))}")
    parser.add_argument("--batch-size", type=int, default=32, help="images of all ranks")
    parser.add_argument("--image-size", type=int, default=96, help="pixels")
    parser.add_argument("--only", default="", help="of the meshes, by their names in the table; '; ' between them")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="steps per mesh and round")
    parser.add_argument("--result", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.result:
        job = Job(model_type=given.models, batch_size=given.batch_size, image_size=given.image_size)
        be_a_rank(job, given.only, given.rounds, given.steps, given.result)
        return
    sections = []
    shared = [f"--{name}={getattr(given, name.replace('-', '_'))}" for name in ("batch-size", "image-size", "steps")]
    for model, ranks in itertools.product(given.models.split(","), map(int, given.ranks.split(","))):
        with tempfile.TemporaryDirectory() as folder:
            words = [
                f"--models={model}",
                f"--only={given.only}",
                f"--rounds={given.rounds}",
                *shared,
                f"--result={folder}/seconds.json",
            ]
            print(torchrun(ranks, "benchmarks.mesh_steps", *words), end="", flush=True)
            rounds = json.loads(Path(folder, "seconds.json").read_text())
        ratios = ratios_to(BASELINE, rounds)
        rows = [
            (name, spread(ratios[name]), f"{1e3 * statistics.median(taken[name] for taken in rounds):.0f}")
            for name in rounds[0]
        ]
        text = (
            f"{given.batch_size} images of {given.image_size} pixels in each step; {given.rounds} rounds of "
            f"{given.steps} steps; median (quartiles) of the ratio within each round."
        )
        sections.append(Section(f"{model}, {ranks} ranks", text, ("mesh", "time / ddp", "ms (median)"), rows))
        show(sections[-1])
    facts = f"CPU ranks over gloo, one thread each, fp32, AdamW, no clipping. {versions('torch', 'timm')}."
    save("mesh_steps", "Steps of every mesh", facts, shlex.join(["python", *sys.argv]), sections)


if __name__ == "__main__":
    main()
