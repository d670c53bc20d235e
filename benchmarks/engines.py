"""Every engine under every strategy on 1, 2 and 4 CPU ranks: time of a step against default DDP, and memory per rank.

    python benchmarks/engines.py
    python benchmarks/engines.py --models mobilenet --ranks 2 --rounds 2 --gradient-clipping 1

Steps from memory: all in one job per number of ranks, every one in every round. Memory: a job of its own for each.
"""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.compare_steps import step_rounds
from benchmarks.memory import MALLOC, Case, measured
from benchmarks.peers.bare_ddp import BASELINE, FLOOR
from benchmarks.peers.job import NUM_CLASSES, Job
from benchmarks.peers.ours import SHARED_MEMORY
from benchmarks.report import Section, ratios_to, save, show, spread, versions

Rounds = Sequence[Mapping[str, float]]


def count(ranks: int) -> str:
    """Return '1 rank', '2 ranks'."""
    return f"{ranks} rank{'s' if ranks > 1 else ''}"


def names_of(rounds_of: Mapping[int, Rounds]) -> list[str]:
    """Return all contestants of all numbers of ranks, in their order."""
    return list(dict.fromkeys(name for rounds in rounds_of.values() for name in rounds[0]))


def step_section(job: Job, rounds_of: Mapping[int, Rounds], steps: int) -> Section:
    """Tabulate seconds per step by number of ranks; a dash where an engine refused."""
    columns, cells = ["contestant"], {name: [name] for name in names_of(rounds_of)}
    for ranks, rounds in rounds_of.items():
        columns += [f"time / {BASELINE}, {count(ranks)}", "ms (median)"]
        ratios = ratios_to(BASELINE, rounds)
        for name, row in cells.items():
            is_there = name in ratios
            row += [spread(ratios[name])] if is_there else ["-"]
            row += [f"{1e3 * statistics.median(taken[name] for taken in rounds):.1f}"] if is_there else ["-"]
    text = (
        f"{job.batch_size} images of {job.image_size} pixels per rank, clipping {job.gradient_clipping:g}; rounds of "
        f"{steps} steps in one job per number of ranks, order shuffled; median (quartiles) of the ratio within each "
        f"round. '{FLOOR}' has neither exchange nor optimizer. {SHARED_MEMORY}"
    )
    return Section(f"One step, {job.model_type}", text, tuple(columns), [tuple(row) for row in cells.values()])


def memory_of(name: str, job: Job, ranks: int) -> tuple[str, ...]:
    """Measure one contestant's MB per rank: held and at most as proportional set size, and at most resident."""
    strategy, _, engine = name.rpartition(", ")
    case = Case(job.model_type, strategy or "ddp", engine, ranks, job.batch_size, job.image_size, NUM_CLASSES)
    try:
        found = measured(case)
    except RuntimeError as error:
        print(f"{name} on {count(ranks)} is left out: {error}", flush=True)
        return ("-",) * 3
    return tuple(f"{found[key] / 1e6:.0f}" for key in ("held", "peak", "peak_resident"))


def memory_section(job: Job, rounds_of: Mapping[int, Rounds]) -> Section:
    """Measure everyone who took part in the steps."""
    columns, rows = ["contestant"], []
    for ranks in rounds_of:
        columns += [f"held, {count(ranks)}", "peak", "peak resident"]
    for name in names_of(rounds_of):
        if name == FLOOR:
            continue
        row = [name]
        for ranks, rounds in rounds_of.items():
            row += memory_of(name, job, ranks) if name in rounds[0] else ("-",) * 3
        rows.append(tuple(row))
        print(*row, flush=True)
    text = (
        f"MB (10^6 bytes) per rank beyond the libraries, mean over the ranks, {job.batch_size} images of "
        f"{job.image_size} pixels per rank, no clipping; each case once. Held: between two steps; peak: within the "
        "third step. Both are proportional set sizes: a page that k ranks share counts as a k-th for each. Peak "
        f"resident counts shared pages in full on every rank, as `top` does. {SHARED_MEMORY}"
    )
    return Section(f"Memory per rank, {job.model_type}", text, tuple(columns), rows)


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default="mobilenet,timm:resnet18", help="comma-separated")
    parser.add_argument("--ranks", default="1,2,4", help="comma-separated")
    parser.add_argument("--image-size", type=int, default=64, help="pixels")
    parser.add_argument("--gradient-clipping", type=float, default=0.0, help="of the steps; largest norm, 0 for none")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=5, help="steps per contestant and round")
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True, help="measure memory too")
    given = parser.parse_args()
    sections, measured_steps = [], []
    for model in given.models.split(","):
        job = Job(model_type=model, image_size=given.image_size, gradient_clipping=given.gradient_clipping)
        rounds_of = {
            int(ranks): step_rounds(int(ranks), job, given.rounds, given.steps, ("bare_ddp", "every_engine"))
            for ranks in given.ranks.split(",")
        }
        measured_steps.append((job, rounds_of))
        sections.append(step_section(job, rounds_of, given.steps))
        show(sections[-1])
    os.environ.update(MALLOC)
    for job, rounds_of in measured_steps if given.memory else ():
        sections.append(memory_section(job, rounds_of))
        show(sections[-1])
    facts = (
        f"CPU ranks over gloo, 1 thread each, fp32, AdamW, {given.rounds} rounds. "
        f"{versions('torch', 'deepspeed', 'timm')}."
    )
    save("engines", "Every engine", facts, shlex.join(["python", *sys.argv]), sections)


if __name__ == "__main__":
    main()
