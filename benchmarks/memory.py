"""Memory per rank, predicted by `planning/memory.py` and measured: every model, strategy and engine on CPU ranks.

    python benchmarks/memory.py                                     # make check-memory
    python benchmarks/memory.py --models mobilenet --ranks 1,2 --engines torch

The strategies and engines of a model and number of ranks are one job. Measured is the
mean over the ranks of what the process needs beyond its libraries and their generated code; see `memory_rank.py`.
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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import psutil
import torch

from benchmarks.launch import torchrun
from benchmarks.report import Section, save, show, versions
from models import MODELS
from models.build import build_model
from planning.machines import detect_machine
from planning.search import PlannedJob, memory_of
from training.config import TrainConfig
from training.engines.build_engine import resolve_engine
from training.engines.deepspeed_config import read_strategy_json
from training.engines.strategies import STRATEGIES, plan_of

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

    def predicted(self) -> int:
        """Return the bytes of a rank's tensors at most, as the planner predicts them."""
        engine: Any = self.engine  # of the field's own values
        words = {"model_type": self.model, "strategy": self.strategy, "batch_size": self.batch_size}
        config = TrainConfig(**words, engine=engine, precision="fp32")
        job = PlannedJob(config, detect_machine(self.ranks), self.ranks, self.classes, self.image_size, 0)
        return memory_of(job, config)[2].tensors


@dataclass(frozen=True)
class Compared:
    """A case with its bytes."""

    case: Case
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Of the prediction, as a share of what was measured."""
        return self.predicted / self.measured - 1


def measured(cases: Sequence[Case]) -> list[dict[str, float]]:
    """Train cases of the same ranks one after another.

    Returns:
        The bytes of each held between steps and at most, means over the ranks; keys as `memory_rank.train`.

    Raises:
        RuntimeError: if the job failed.
    """
    rows = [[one.model, one.strategy, one.batch_size, one.image_size, one.classes, one.engine] for one in cases]
    with tempfile.TemporaryDirectory() as folder:
        words = (f"--cases={json.dumps(rows)}", f"--result={folder}/{{}}.jsonl")
        torchrun(cases[0].ranks, "benchmarks.memory_rank", *words)
        ranks = [path.read_text().splitlines() for path in Path(folder).glob("*.jsonl")]
    found = [[json.loads(line) for line in lines] for lines in zip(*ranks, strict=True)]
    return [{key: statistics.mean(rank[key] for rank in of_case) for key in of_case[0]} for of_case in found]


def resolved(case: Case) -> Case:
    """Return a case with the engine that it gets."""
    with torch.device("meta"):
        network = build_model(case.model, num_classes=case.classes, image_size=case.image_size).module
    engine = resolve_engine(case.engine, plan_of(case.strategy, case.ranks), read_strategy_json(case.strategy), network)
    return dataclasses.replace(case, engine=engine)


def compare(cases: Sequence[Case]) -> list[Compared]:
    """Predict and measure cases of the same model and ranks; those that do not fit here are left out."""
    room = FILL * psutil.virtual_memory().available
    predicted = {case: case.predicted() for case in cases}
    fitting = [case for case in cases if case.ranks * predicted[case] < room]
    for case in cases:
        if case not in fitting:
            print(f"left out, there is not enough memory: {case}", flush=True)
    found = measured(fitting) if fitting else []
    return [Compared(case, predicted[case], one["peak"]) for case, one in zip(fitting, found, strict=True)]


def section_of(compared: list[Compared]) -> Section:
    """Return the table."""
    rows = [
        (
            *(case.model, f"{case.strategy}, {case.engine}", str(case.ranks), str(case.batch_size)),
            *(str(case.image_size), f"{one.predicted / 1e6:.0f}", f"{one.measured / 1e6:.0f}", f"{one.error:+.0%}"),
        )
        for one in compared
        for case in (one.case,)
    ]
    errors = [abs(one.error) for one in compared]
    within = sum(error <= GOAL for error in errors)
    text = (
        f"fp32, AdamW, {compared[0].case.classes} classes. MB (10^6 bytes) per rank, at most within the third step. "
        f"{within} of {len(errors)} peaks within {GOAL:.0%}, the worst {max(errors):.0%} off."
    )
    columns = ("model", "strategy, engine", "ranks", "images", "pixels", "predicted", "measured", "error")
    return Section("Memory per rank", text, columns, rows)


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    models = [name for name, spec in MODELS.items() if not spec.always_pretrained]
    parser.add_argument("--models", default=",".join(models), help="comma-separated")
    parser.add_argument("--strategies", default=",".join(STRATEGIES), help="comma-separated")
    parser.add_argument("--engines", default="auto,torch,deepspeed", help="comma-separated")
    parser.add_argument("--ranks", default="1,2,4", help="comma-separated")
    parser.add_argument("--batch-size", type=int, default=0, help="images per rank; 0: 32, or 4 of large models")
    parser.add_argument("--image-size", type=int, default=96, help="pixels")
    parser.add_argument("--classes", type=int, default=1000)
    given = parser.parse_args()
    os.environ.update(MALLOC)
    strategies, engines = given.strategies.split(","), given.engines.split(",")
    compared = []
    for ranks, model in itertools.product(map(int, given.ranks.split(",")), given.models.split(",")):
        batch_size = given.batch_size or (4 if model in LARGE else 32)
        setting = (ranks, batch_size, given.image_size, given.classes)
        asked = [Case(model, *way, *setting) for way in itertools.product(strategies, engines)]
        try:
            found = compare([*dict.fromkeys(map(resolved, asked))])
        except RuntimeError as error:
            print(f"{model} on {ranks} rank(s) is left out: {error}", flush=True)
            continue
        compared += found
        for one in found:
            print(model, one.case.strategy, one.case.engine, ranks, f"{one.error:+.1%}", flush=True)
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
