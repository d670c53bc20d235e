"""Memory per rank, predicted by `planning/memory.py` and measured: VGG-16 and the ensemble under every strategy.

    python benchmarks/memory.py
    python benchmarks/memory.py --models mobilenet --ranks 1,2

Small batches, so that the training state is what fills the memory. Each case is a job of its own. The measured value
is the mean over the ranks of what the process needs beyond its libraries; see `memory_rank.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.launch import torchrun
from benchmarks.our_engine import engine_of
from benchmarks.report import Section, save, show, versions
from models.build import build_model
from models.dry_run import activation_bytes, model_sizes
from planning.memory import MemoryPlan, bucket_elements, plan_memory
from training.parallel.deepspeed_config import read_strategy_json
from training.parallel.strategies import STRATEGIES

# Freed memory goes back to the kernel at once where a piece is larger than this, so that resident means in use.
PIECE_BYTES = 4 * 2**20
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
    ranks: int
    batch_size: int
    image_size: int
    classes: int
    engine: str = "auto"


def predicted(case: Case) -> tuple[MemoryPlan, str]:
    """Ask the formula; return the engine too."""
    module = build_model(
        case.model, num_classes=case.classes, image_size=case.image_size, batch_size=case.batch_size
    ).module
    sizes = model_sizes(module)
    engine = engine_of(module, case.strategy, torch.device("cpu"), case.ranks)
    plan = plan_memory(
        **sizes,
        engine=engine,
        zero_stage=STRATEGIES[case.strategy].zero_stage,
        ranks=case.ranks,
        optimizer="adamw",
        bucket_elements=bucket_elements(read_strategy_json(case.strategy)),
        activation_bytes=activation_bytes(module, case.batch_size, case.image_size),
    )
    return plan, engine


def measured(case: Case) -> dict[str, float]:
    """Train, and return the bytes held between steps and at most, means over the ranks; keys as `memory_rank.train`."""
    with tempfile.TemporaryDirectory() as folder:
        words = [f"--model-type={case.model}", f"--strategy={case.strategy}", f"--batch-size={case.batch_size}"]
        words += [f"--image-size={case.image_size}", f"--classes={case.classes}", f"--engine={case.engine}"]
        words += [f"--result={folder}/{{}}.json"]
        torchrun(case.ranks, "benchmarks.memory_rank", *words)
        found = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    return {key: statistics.mean(rank[key] for rank in found) for key in found[0]}


def row(case: Case) -> tuple[str, ...]:
    """Predict and measure one case."""
    (plan, engine), found = predicted(case), measured(case)
    figures = []
    for ours, theirs in ((plan.held, found["held"]), (plan.peak, found["peak"])):
        figures += [f"{ours / 1e9:.2f}", f"{theirs / 1e9:.2f}", f"{(ours - theirs) / theirs:+.1%}"]
    return (case.model, f"{case.strategy}, {engine}", str(case.ranks), *figures)


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="vgg,ensemble", help="comma-separated")
    parser.add_argument("--strategies", default=",".join(STRATEGIES), help="comma-separated")
    parser.add_argument("--ranks", default="1,2,4", help="comma-separated")
    parser.add_argument("--batch-size", type=int, default=2, help="images per rank")
    parser.add_argument("--image-size", type=int, default=64, help="pixels")
    parser.add_argument("--classes", type=int, default=1000)
    given = parser.parse_args()
    os.environ.update(MALLOC)
    rows = []
    for model in given.models.split(","):
        for strategy in given.strategies.split(","):
            for ranks in given.ranks.split(","):
                case = Case(model, strategy, int(ranks), given.batch_size, given.image_size, given.classes)
                rows.append(row(case))
                print(*rows[-1], flush=True)
    text = (
        f"{given.batch_size} images of {given.image_size} pixels per rank, fp32, AdamW, {given.classes} "
        f"classes. Held: between two steps; peak: within the third step. GB (10^9 bytes) per rank."
    )
    kinds = ("held, predicted", "measured", "error", "peak, predicted", "measured", "error")
    section = Section("Memory per rank", text, ("model", "strategy, engine", "ranks", *kinds), rows)
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
