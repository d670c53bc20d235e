"""What saving costs: training with frequent checkpoints against training with none within the epochs, in one run.

    python benchmarks/checkpoint_stall.py --rounds 3

The job is `make train`'s (mobilenet, ddp, 2 ranks, handwritten digits) with fewer epochs, through the real launcher.
Both variants run in every round, in shuffled order. Of each run counts the time that its steps took (`seconds` of the
epochs in metrics.jsonl, without evaluation). A save comes every few seconds instead of once a minute, so that a short
run has many; the share of one save a minute follows from the stall of each.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from pathlib import Path

from digits_run import train


def step_seconds(lines: list[dict]) -> float:
    """Return the seconds of training, without evaluation."""
    return sum(line["seconds"] for line in lines if line["kind"] == "epoch")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--every-seconds", type=float, default=2.0)
    given = parser.parse_args()
    ratios, stalls, writes = [], [], []
    shuffle = random.Random(0)
    for number in range(given.rounds):
        seconds = {}
        for every_minutes in shuffle.sample([0.0, given.every_seconds / 60], 2):
            with tempfile.TemporaryDirectory() as folder:
                saving = ("--save-every-minutes", str(every_minutes))
                lines = train("mobilenet", 2, 16, given.epochs, Path(folder), "run", *saving)
            seconds[every_minutes] = step_seconds(lines)
            if every_minutes:
                saves = [line for line in lines if line["kind"] == "checkpoint"]
                stalls += [save["stall_seconds"] for save in saves]
                writes += [save["seconds"] for save in saves]
        ratios.append(seconds[given.every_seconds / 60] / seconds[0.0])
        print(f"round {number + 1}: {seconds}, ratio {ratios[-1]:.3f}", flush=True)
    stall = statistics.median(stalls)
    print(f"{len(stalls)} saves: stall median {1000 * stall:.1f} ms, worst {1000 * max(stalls):.1f} ms; ", end="")
    print(f"writing in the background median {1000 * statistics.median(writes):.0f} ms")
    print(f"one save a minute stalls training for {stall / 60:.4%} of its time (worst save: {max(stalls) / 60:.4%})")
    print(f"time of all steps with a save every {given.every_seconds:g} s against none: median ratio ", end="")
    print(f"{statistics.median(ratios):.3f} ({min(ratios):.3f}-{max(ratios):.3f})")


if __name__ == "__main__":
    main()
