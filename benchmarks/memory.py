"""Memory per rank, predicted by `planning.memory` and measured: every model, strategy and engine on CPU ranks.

    python benchmarks/memory.py                                     # make check-memory
    python benchmarks/memory.py --models mobilenet --ranks 1,2 --engines torch
    python benchmarks/memory.py --models timm:vit_small_patch16_224 --engines torch --ranks 4 --meshes 2x1x1,1x2x4

Measured is the mean over the ranks of what the process needs beyond its libraries and their generated code; see
`memory_rank.py`.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import shlex
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil
import torch

from benchmarks.launch import run
from benchmarks.report import Section, save, show, versions
from zerovision.models import MODELS
from zerovision.models.build import build_model
from zerovision.planning.machines import detect_machine
from zerovision.planning.search import PlannedJob, evaluate
from zerovision.training.base.settings import RunSettings
from zerovision.training.config import TrainConfig
from zerovision.training.engines.build import resolve_engine
from zerovision.training.engines.ways import STRATEGIES, plan_of

FILL = 0.8  # of the free memory
LARGE = ("vgg", "ensemble")
GOAL = 0.1  # largest error of a peak

# Freed memory goes back to the kernel at once where a piece is larger than this, so that resident means in use. At
# 4 MiB a step of mobilenet left 75 MB resident that nothing used.
PIECE_BYTES = 64 * 2**10
MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": str(PIECE_BYTES),
    "MALLOC_TRIM_THRESHOLD_": str(PIECE_BYTES),
    "MALLOC_ARENA_MAX": "1",
}


@dataclass(frozen=True)
class Case:
    """What is trained."""

    model: str
    strategy: str
    engine: str
    ranks: int
    batch_size: int
    image_size: int
    classes: int
    tensor: int = 1
    pipeline: int = 1
    micro_batches: int = 1

    @property
    def mesh(self) -> tuple[int, int, int]:
        """Ranks of a tensor group and of a pipeline, and the micro-batches of a step."""
        return self.tensor, self.pipeline, self.micro_batches

    def predicted(self) -> int:
        """Return the bytes of a rank's tensors at most, as the planner predicts them."""
        engine: Any = self.engine  # of the field's own values
        words: dict[str, Any] = {"model_type": self.model, "strategy": self.strategy, "batch_size": self.batch_size}
        words |= {"tensor_parallel": self.tensor, "pipeline_parallel": self.pipeline}
        words["gradient_accumulation_steps"] = self.micro_batches
        config = TrainConfig(**words, engine=engine, precision="fp32")
        job = PlannedJob(config, detect_machine(self.ranks), self.ranks, self.classes, self.image_size, 0)
        return evaluate(job, config).memory.tensors


@dataclass(frozen=True)
class Compared:
    """A case with its bytes: a rank's at most, and what it was measured to hold between steps."""

    case: Case
    predicted: float
    measured: float
    held: float

    @property
    def error(self) -> float:
        """Of the prediction, as a share of what was measured."""
        return self.predicted / self.measured - 1


def measured(case: Case) -> dict[str, float]:
    """Train a case in a job of its own: what a case before leaves behind would count as there at the start.

    Returns:
        The bytes held between steps and at most, means over the ranks, or of a pipeline the most; keys as
        `memory_rank.train`.

    Raises:
        RuntimeError: if the job failed.
    """
    row = [case.model, case.strategy, case.batch_size, case.image_size, case.classes, case.engine, *case.mesh]
    with tempfile.TemporaryDirectory() as folder:
        run(["benchmarks.memory_rank", f"--case={json.dumps(row)}", f"--result={folder}/{{}}.json"], case.ranks)
        ranks = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    summary = max if case.pipeline > 1 else statistics.mean  # stages differ: planned is the largest
    return {key: summary(rank[key] for rank in ranks) for key in ranks[0]}


def resolved(case: Case) -> Case:
    """Return a case with the engine that it gets."""
    with torch.device("meta"):
        network = build_model(RunSettings(model_type=case.model), case.classes, case.image_size).module
    config = TrainConfig(engine=case.engine, strategy=case.strategy)  # type: ignore[arg-type]  # one of its values
    engine = resolve_engine(config, plan_of(case.strategy, case.ranks), network)
    return dataclasses.replace(case, engine=engine)


def compare(case: Case) -> Compared | None:
    """Predict and measure a case; None if it does not fit here, or fails."""
    predicted = case.predicted()
    if case.ranks * predicted > FILL * psutil.virtual_memory().available:
        print(f"left out, there is not enough memory: {case}", flush=True)
        return None
    try:
        found = measured(case)
    except RuntimeError as error:
        print(f"{case} is left out: {error}", flush=True)
        return None
    return Compared(case, predicted, found["peak"], found["held"])


def described(case: Case) -> str:
    """Return strategy, engine and mesh of a case."""
    names = zip(("tensor", "pipeline", "micro-batches"), case.mesh, strict=True)
    return ", ".join([case.strategy, case.engine, *(f"{name} {size}" for name, size in names if size > 1)])


def section_of(compared: list[Compared]) -> Section:
    """Return the table."""
    rows = [
        (
            *(case.model, described(case), str(case.ranks), str(case.batch_size)),
            *(str(case.image_size), f"{one.predicted / 1e6:.0f}", f"{one.measured / 1e6:.0f}", f"{one.error:+.0%}"),
            f"{one.held / 1e6:.0f}",
        )
        for one in compared
        for case in (one.case,)
    ]
    errors = [abs(one.error) for one in compared]
    within = sum(error <= GOAL for error in errors)
    text = (
        f"fp32, AdamW, {compared[0].case.classes} classes. MB (10^6 bytes) per rank, at most within the third step. "
        f"{within} of {len(errors)} peaks within {GOAL:.0%}, the worst {max(errors):.0%} off. Held is measured, too: "
        "what stays between steps."
    )
    columns = ("model", "strategy, engine", "ranks", "images", "pixels", "predicted", "measured", "error", "held")
    return Section("Memory per rank", text, columns, rows)


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = [name for name, spec in MODELS.items() if not spec.always_pretrained]
    parser.add_argument("--models", default=",".join(models), help="comma-separated")
    parser.add_argument("--strategies", default=",".join(STRATEGIES), help="comma-separated")
    parser.add_argument("--engines", default="auto,torch,deepspeed", help="comma-separated")
    parser.add_argument("--ranks", default="1,2,4", help="comma-separated")
    parser.add_argument("--meshes", default="1x1x1", help="tensor x pipeline x micro-batches, comma-separated")
    parser.add_argument("--batch-size", type=int, default=0, help="images per rank; 0: 32, or 4 of large models")
    parser.add_argument("--image-size", type=int, default=96, help="pixels")
    parser.add_argument("--classes", type=int, default=1000)
    given = parser.parse_args()
    os.environ.update(MALLOC)
    strategies, engines = given.strategies.split(","), given.engines.split(",")
    meshes = [[*map(int, mesh.split("x"))] for mesh in given.meshes.split(",")]
    compared = []
    for ranks, model in itertools.product(map(int, given.ranks.split(",")), given.models.split(",")):
        batch_size = given.batch_size or (4 if model in LARGE else 32)
        setting = (ranks, batch_size, given.image_size, given.classes)
        asked = [
            Case(model, strategy, engine, *setting, *mesh)
            for strategy, engine, mesh in itertools.product(strategies, engines, meshes)
            if ranks % (mesh[0] * mesh[1]) == 0 and (mesh[1] == 1 or strategy == "ddp")
        ]
        for one in filter(None, map(compare, dict.fromkeys(map(resolved, asked)))):
            compared.append(one)
            print(model, described(one.case), ranks, f"{one.error:+.1%}", flush=True)
    section = section_of(compared)
    show(section)
    save(
        "memory",
        "Memory per rank, predicted and measured",
        versions("torch", "deepspeed"),
        shlex.join(["python", *sys.argv]),
        [section],
    )


if __name__ == "__main__":
    main()
