"""Memory per rank, predicted by `planning/memory.py` and measured: every model, strategy and engine on CPU ranks.

    python benchmarks/memory.py                                     # make check-memory
    python benchmarks/memory.py --models mobilenet --ranks 1,2 --engines torch

Each case is a job of its own, and goes into the ledger. Measured is the mean over the ranks of what the process needs
beyond its libraries; see `memory_rank.py`.
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

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.launch import torchrun
from benchmarks.ledger import entry_of
from benchmarks.our_engine import engine_of
from benchmarks.report import Section, save, show, versions
from models import MODELS
from models.build import build_model
from planning.ledger import MEMORY, LedgerEntry, replace_entries
from training.parallel.strategies import STRATEGIES

LARGE = ("vgg", "ensemble")
GOAL = 0.1  # largest error of a peak

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


def measured(case: Case) -> dict[str, float]:
    """Train, and return the bytes held between steps and at most, means over the ranks; keys as `memory_rank.train`."""
    with tempfile.TemporaryDirectory() as folder:
        words = [f"--model-type={case.model}", f"--strategy={case.strategy}", f"--batch-size={case.batch_size}"]
        words += [f"--image-size={case.image_size}", f"--classes={case.classes}", f"--engine={case.engine}"]
        words += [f"--result={folder}/{{}}.json"]
        torchrun(case.ranks, "benchmarks.memory_rank", *words)
        found = [json.loads(path.read_text()) for path in Path(folder).glob("*.json")]
    return {key: statistics.mean(rank[key] for rank in found) for key in found[0]}


def entry_of_case(case: Case) -> LedgerEntry:
    """Measure one case and predict it."""
    with torch.device("meta"):
        network = build_model(case.model, num_classes=case.classes, image_size=case.image_size).module
    engine = engine_of(network, case.strategy, torch.device("cpu"), case.ranks, case.engine)
    return entry_of(MEMORY, measured(case)["peak"], **dataclasses.asdict(case) | {"engine": engine})


def section_of(entries: list[LedgerEntry]) -> Section:
    """Return the table."""
    rows = [
        (
            *(one.model, f"{one.strategy}, {one.engine}", str(one.ranks), str(one.batch_size), str(one.image_size)),
            *(f"{one.predicted / 1e6:.0f}", f"{one.measured / 1e6:.0f}", f"{one.error:+.0%}"),
        )
        for one in entries
    ]
    errors = [abs(one.error) for one in entries]
    within = sum(error <= GOAL for error in errors)
    text = (
        f"fp32, AdamW, {entries[0].classes} classes. MB (10^6 bytes) per rank, at most within the third step. "
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
    parser.add_argument("--engines", default="auto,torch", help="comma-separated")
    parser.add_argument("--ranks", default="1,2,4", help="comma-separated")
    parser.add_argument("--batch-size", type=int, default=0, help="images per rank; 0: 32, or 4 of large models")
    parser.add_argument("--image-size", type=int, default=96, help="pixels")
    parser.add_argument("--classes", type=int, default=1000)
    given = parser.parse_args()
    os.environ.update(MALLOC)
    words = (given.models, given.strategies, given.engines, given.ranks)
    entries = []
    for model, strategy, engine, ranks in itertools.product(*(word.split(",") for word in words)):
        batch_size = given.batch_size or (4 if model in LARGE else 32)
        entry = entry_of_case(Case(model, strategy, int(ranks), batch_size, given.image_size, given.classes, engine))
        replace_entries([entry])  # at once: all of them take an hour
        entries.append(entry)
        print(model, strategy, entry.engine, ranks, f"{entry.error:+.1%}", flush=True)
    section = section_of(entries)
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
