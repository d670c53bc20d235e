"""What a move to another number of ranks in the middle of an epoch changes for a model with BatchNorm, in one run.

    python benchmarks/resume_on_other_ranks.py --seeds 3

A training on two ranks saves in the middle of an epoch and goes on to its end. The same checkpoint is then resumed on
two, one and four ranks, the global batch held, through the real launcher, and compared with the training that went on:
the losses of the steps that follow, and the validation of the epoch's end and of the last one. The micro-batches of
four ranks are half as large, those of one rank (`--batch-size` kept, accumulation 2) the same ones.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from digits_run import train

from zerovision.training.base.progress import Progress
from zerovision.training.checkpoint.store import checkpoint_name

BATCH_SIZE, EPOCHS = 16, 4
STEPS_PER_EPOCH = 45  # 1,437 digits, 32 at a time
SAVED = Progress(epoch=1, step=20)
SAVED_POSITION = SAVED.epoch * STEPS_PER_EPOCH + SAVED.step
STEPS_COMPARED = 5
# ranks -> images per rank: two as before, then one with two accumulation steps, then four with half the micro-batch.
MOVES = {2: BATCH_SIZE, 1: BATCH_SIZE, 4: BATCH_SIZE // 2}


def losses_after_the_move(lines: list[dict]) -> list[float]:
    """Return the training losses of the first steps after the checkpoint."""
    steps = [line for line in lines if line["kind"] == "step" and line["epoch"] == SAVED.epoch + 1]
    return [line["loss"] for line in steps if 0 < line["step"] - SAVED_POSITION <= STEPS_COMPARED]


def validations(lines: list[dict]) -> tuple[dict, dict]:
    """Return the epoch line that follows the move, and the last one."""
    epochs = {line["epoch"]: line for line in lines if line["kind"] == "epoch"}
    return epochs[SAVED.epoch + 1], epochs[EPOCHS]


def compare(model: str, seed: int, logs: Path) -> Iterator[str]:
    """Train, move, and yield a row of the table for each number of ranks."""
    flags = ("--seed", str(seed), "--log-every-steps", "1", "--workers", "0")
    saving = ("--save-every-steps", str(SAVED_POSITION), "--keep-last", "99")
    went_on = train(model, 2, BATCH_SIZE, EPOCHS, logs, "whole", *flags, *saving)
    checkpoint = logs / "runs" / "whole" / "checkpoints" / checkpoint_name(SAVED)
    for ranks, batch_size in MOVES.items():
        moved = train(model, ranks, batch_size, EPOCHS, logs, f"on-{ranks}", *flags, "--resume", str(checkpoint))
        pairs = zip(losses_after_the_move(went_on), losses_after_the_move(moved), strict=True)
        difference = max(abs(one - other) for one, other in pairs)
        columns = [
            ", ".join(f"{epoch['val_loss']:.4f} ({epoch['val_top1']:.4f})" for epoch in both)
            for both in zip(validations(went_on), validations(moved), strict=True)
        ]
        yield f"| {model} | {seed} | {ranks} | {difference:.1e} | {' | '.join(columns)} |"


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--models", nargs="+", default=["basic_cnn", "mobilenet"])
    given = parser.parse_args()
    print(f"| model | seed | ranks | largest difference of the next {STEPS_COMPARED} losses ", end="")
    print("| val loss (top-1) at the epoch's end: went on, moved | at the last epoch's end: went on, moved |")
    print("|---|---|---|---|---|---|")
    for model in given.models:
        for seed in range(given.seeds):
            with tempfile.TemporaryDirectory() as folder:
                for row in compare(model, seed, Path(folder)):
                    print(row, flush=True)


if __name__ == "__main__":
    main()
