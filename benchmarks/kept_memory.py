"""What keeping freed memory gives (`node_launcher.malloc_variables`): training with it against without.

    python benchmarks/kept_memory.py
    python benchmarks/kept_memory.py --models mobilenet --rounds 9

Whole trainings through the real launcher: `ddp` on 2 CPU ranks, the handwritten digits enlarged. "Without" has the
variable `MALLOC_PERTURB_=0`, which changes nothing but that malloc is left as glibc has it. Both run in every round,
in shuffled order; of each run counts the time of the steps, and the largest rank's whole process.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.digits_run import train
from benchmarks.report import Section, machine_name, save, show, spread, versions

JOBS = {  # images per rank and step, epochs, flags
    "basic_cnn": (64, 8, "--image-size 32"),
    "mobilenet": (16, 3, "--image-size 64"),
    "efficientnet": (16, 1, "--image-size 64"),
    "cnn_lstm": (16, 2, "--image-size 64"),
    "airbench_small": (96, 7, "--image-size 28 --precision bf16 --optimizer muon --whitened-stem true"),
}
RANKS = 2
VARIANTS: dict[str, dict[str, str]] = {"with": {}, "without": {"MALLOC_PERTURB_": "0"}}


def measure(model: str, variables: Mapping[str, str]) -> tuple[float, float]:
    """Return the seconds of a training's steps, and the peak of its largest process in MB."""
    batch_size, epochs, flags = JOBS[model]
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, variables):
        lines = train(model, RANKS, batch_size, epochs, Path(folder), "run", *flags.split(), "--report", "false")
    return lines[-1]["seconds"], max(lines[-1]["memory_bytes_per_rank"]) / 1e6


def main() -> None:
    """Measure, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=JOBS, default=list(JOBS))
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    shuffle = random.Random(0)
    ratios: dict[str, list[tuple[float, float]]] = {model: [] for model in given.models}
    for number in range(given.rounds):
        for model in given.models:
            found = {name: measure(model, VARIANTS[name]) for name in shuffle.sample(list(VARIANTS), len(VARIANTS))}
            ratios[model].append(tuple(kept / left for kept, left in zip(found["with"], found["without"], strict=True)))
            print(f"round {number + 1}, {model}: time {ratios[model][-1][0]:.3f}, memory {ratios[model][-1][1]:.3f}")
    rows = [(model, *(spread(column) for column in zip(*ratios[model], strict=True))) for model in given.models]
    text = f"{RANKS} ranks of {machine_name()}; {given.rounds} rounds; median (quartiles) of with / without."
    section = Section("Whole trainings", text, ("model", "time of the steps", "peak of the largest process"), rows)
    show(section)
    save("kept_memory", "What keeping freed memory gives", versions("torch"), f"python {' '.join(sys.argv)}", [section])


if __name__ == "__main__":
    main()
