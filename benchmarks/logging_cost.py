"""What logging, TensorBoard and checkpoints cost together: training with them against training without, in one run.

    python benchmarks/logging_cost.py --rounds 5

The job is `make train`'s (mobilenet, ddp, 2 ranks, handwritten digits), through the real launcher. "On" is as `make
train` runs it: a line at every tenth step to the log, metrics.jsonl and TensorBoard, a checkpoint after each epoch.
"Off" has no console, no TensorBoard, one logging point and one checkpoint per epoch, which cannot be switched off.
Both run in every round, in shuffled order. Of each run counts the time between the ends of its first and last epoch,
evaluation left out: the first epoch has start-up costs that no setting changes. The shares are those that the runs
say themselves.
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from pathlib import Path

from digits_run import train

VARIANTS = {
    "on": ("--progress", "lines", "--tensorboard", "true", "--log-every-steps", "10"),
    "off": ("--progress", "off", "--tensorboard", "false", "--log-every-steps", "1000000", "--save-every-minutes", "0"),
}


def training_seconds(lines: list[dict]) -> float:
    """Return the seconds from the end of the first epoch to that of the last, all but evaluation."""
    epochs = [line for line in lines if line["kind"] == "epoch"]
    (end,) = (line for line in lines if line["kind"] == "end")
    evaluation_seconds = end["evaluation_seconds"] * (len(epochs) - 1) / len(epochs)
    return epochs[-1]["time"] - epochs[0]["time"] - evaluation_seconds


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--epochs", type=int, default=8)
    given = parser.parse_args()
    shuffle = random.Random(0)
    rounds: list[dict[str, float]] = []
    shares: dict[str, list[dict[str, float]]] = {name: [] for name in VARIANTS}
    for number in range(given.rounds):
        seconds = {}
        for name in shuffle.sample(list(VARIANTS), len(VARIANTS)):
            with tempfile.TemporaryDirectory() as folder:
                lines = train("mobilenet", 2, 16, given.epochs, Path(folder), "run", *VARIANTS[name])
            seconds[name] = training_seconds(lines)
            shares[name].append(lines[-1]["time_shares"])
        rounds.append(seconds)
        print(f"round {number + 1}: on {seconds['on']:.2f} s, off {seconds['off']:.2f} s", flush=True)
    ratios = [seconds["on"] / seconds["off"] for seconds in rounds]
    print(f"time on / time off: median {statistics.median(ratios):.4f} ({min(ratios):.4f}-{max(ratios):.4f})\n")
    print("| share of the time, median | " + " | ".join(shares["on"][0]) + " |")
    print("|---|" + "---|" * len(shares["on"][0]))
    for name in VARIANTS:
        medians = [statistics.median(run[span] for run in shares[name]) for span in shares[name][0]]
        print(f"| {name} | " + " | ".join(f"{median:.2%}" for median in medians) + " |")


if __name__ == "__main__":
    main()
