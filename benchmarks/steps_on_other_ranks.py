"""How far a model without BatchNorm drifts apart on other numbers of ranks, after one epoch of 14 steps.

    python benchmarks/steps_on_other_ranks.py --seeds 2

The same training (the same seed, order, augmentation and global batch) runs on one, two, three and four ranks through
the real launcher, and once as a chain that starts on three ranks, goes on with one and ends on three again. The losses
of all steps and the weights after the last one are compared with those of one rank, the chain also with three ranks.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from digits_run import train
from safetensors.torch import load_file

from zerovision.training.base.progress import Progress
from zerovision.training.checkpoint.store import checkpoint_name

STEPS = 14  # 1,437 digits, 108 at a time
GLOBAL_BATCH = 108  # what 1, 2, 3 and 4 ranks share evenly
WORLDS = (1, 2, 3, 4)
CHAIN = ((3, 0), (1, 5), (3, 10))  # ranks, and the step after which they take over
RECIPE = ("--learning-rate", "0.001", "--warmup-epochs", "0", "--image-size", "64")
FLAGS = ("--log-every-steps", "1", "--workers", "0", "--save-every-steps", "5", "--keep-last", "9", "--report", "false")


def run(model: str, ranks: int, logs: Path, name: str, *flags: str) -> dict[int, float]:
    """Train; return the loss of each step."""
    lines = train(model, ranks, GLOBAL_BATCH // ranks, 1, logs, name, *RECIPE, *FLAGS, *flags)
    return {line["step"]: line["loss"] for line in lines if line["kind"] == "step"}


def run_chain(model: str, logs: Path, *flags: str) -> dict[int, float]:
    """Train a stretch on each number of ranks of the chain; return the loss of each step."""
    losses, name = {}, ""
    for part, (ranks, first) in enumerate(CHAIN):
        checkpoint = logs / "runs" / name / "checkpoints" / checkpoint_name(Progress(epoch=0, step=first))
        name = "chain" if part == len(CHAIN) - 1 else f"chain-{part}"
        losses |= run(model, ranks, logs, name, *flags, *(("--resume", str(checkpoint)) if first else ()))
    return losses


def differences(logs: Path, losses: dict[str, dict[int, float]], one: str, other: str) -> str:
    """Return two columns: the largest difference of a loss, and of a weight, between two runs."""
    steps = range(1, STEPS + 1)
    loss = max(abs(losses[one][step] - losses[other][step]) for step in steps)
    ours, theirs = (load_file(logs / "runs" / name / "model.safetensors") for name in (one, other))
    weight = max(float((ours[name] - theirs[name]).abs().max()) for name in ours)
    return f"{loss:.1e} | {weight:.1e}"


def compare(model: str, seed: int, logs: Path) -> Iterator[str]:
    """Train on every number of ranks, and yield the rows of the table."""
    flags = ("--seed", str(seed))
    losses = {f"on-{ranks}": run(model, ranks, logs, f"on-{ranks}", *flags) for ranks in WORLDS}
    losses["chain"] = run_chain(model, logs, *flags)
    for one, other in (("on-1", "on-2"), ("on-1", "on-3"), ("on-1", "on-4"), ("on-1", "chain"), ("on-3", "chain")):
        words = (name.replace("on-", "").replace("chain", "3 -> 1 -> 3") for name in (one, other))
        yield f"| {model} | {seed} | {' | '.join(words)} | {differences(logs, losses, one, other)} |"


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--models", nargs="+", default=["timm:vit_tiny_patch16_224"])
    given = parser.parse_args()
    print("| model | seed | ranks | other ranks | largest difference of a loss | of a weight after the last step |")
    print("|---|---|---|---|---|---|")
    for model in given.models:
        for seed in range(given.seeds):
            with tempfile.TemporaryDirectory() as folder:
                for row in compare(model, seed, Path(folder)):
                    print(row, flush=True)


if __name__ == "__main__":
    main()
