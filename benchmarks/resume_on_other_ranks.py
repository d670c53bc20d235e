"""What a move to another number of ranks in the middle of an epoch changes for a model with BatchNorm, in one run.

    python benchmarks/resume_on_other_ranks.py --seeds 3

A training on two ranks saves in the middle of an epoch and goes on to its end. The same checkpoint is then resumed on
two, one and four ranks, the global batch held, through the real launcher, and compared with the training that went on:
the losses of the steps that follow, and the validation of the epoch's end and of the last one. The micro-batches of
four ranks are half as large, those of one rank (`--batch-size` kept, accumulation 2) the same ones.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BATCH_SIZE, EPOCHS = 16, 4
STEPS_PER_EPOCH = 45  # 1,437 digits, 32 at a time
SAVED_EPOCH, SAVED_STEP = 1, 20
SAVED_POSITION = SAVED_EPOCH * STEPS_PER_EPOCH + SAVED_STEP
STEPS_COMPARED = 5
# ranks -> images per rank: two as before, then one with two accumulation steps, then four with half the micro-batch.
MOVES = {2: BATCH_SIZE, 1: BATCH_SIZE, 4: BATCH_SIZE // 2}


def train(model: str, ranks: int, batch_size: int, logs: Path, name: str, *flags: str) -> list[dict]:
    """Train through the launcher; return the lines of metrics.jsonl."""
    words = [model, "ddp", str(ranks), str(batch_size), str(EPOCHS), "--run-name", name, "--log-dir", str(logs), *flags]
    steps = ["--log-every-steps", "1", "--tensorboard", "false", "--learning-rate", "0.004", "--workers", "0"]
    command = ["bash", str(ROOT / "scripts" / "launch_distributed.sh"), *words, *steps]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return [json.loads(line) for line in (logs / "runs" / name / "metrics.jsonl").read_text().splitlines()]


def losses_after_the_move(lines: list[dict]) -> list[float]:
    """Return the training losses of the first steps after the checkpoint."""
    steps = [line for line in lines if line["kind"] == "step" and line["epoch"] == SAVED_EPOCH + 1]
    return [line["loss"] for line in steps if 0 < line["step"] - SAVED_POSITION <= STEPS_COMPARED]


def validations(lines: list[dict]) -> tuple[dict, dict]:
    """Return the epoch line that follows the move, and the last one."""
    epochs = {line["epoch"]: line for line in lines if line["kind"] == "epoch"}
    return epochs[SAVED_EPOCH + 1], epochs[EPOCHS]


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
                logs, seeded = Path(folder), ("--seed", str(seed))
                saving = ("--save-every-steps", str(SAVED_POSITION), "--keep-last", "99")
                went_on = train(model, 2, BATCH_SIZE, logs, "whole", *seeded, *saving)
                checkpoint = logs / "runs" / "whole" / "checkpoints" / f"step-{SAVED_EPOCH:05d}-{SAVED_STEP:07d}"
                for ranks, batch_size in MOVES.items():
                    moved = train(model, ranks, batch_size, logs, f"on-{ranks}", *seeded, "--resume", str(checkpoint))
                    pairs = zip(losses_after_the_move(went_on), losses_after_the_move(moved), strict=True)
                    difference = max(abs(one - other) for one, other in pairs)
                    columns = [
                        ", ".join(f"{epoch['val_loss']:.4f} ({epoch['val_top1']:.4f})" for epoch in both)
                        for both in zip(validations(went_on), validations(moved), strict=True)
                    ]
                    print(f"| {model} | {seed} | {ranks} | {difference:.1e} | {' | '.join(columns)} |", flush=True)


if __name__ == "__main__":
    main()
