"""Supervised contrastive training, then a head, beside cross-entropy at the same cost; several seeds of each.

    python benchmarks/contrast.py npz:fashion-mnist.npz --seeds 5

Both train the same network on the same images, equally augmented. An epoch of `--loss supcon` costs what one of
cross-entropy does, and three of the frozen network's head about one: so features have an epoch less. The lines of a
seed follow each other. benchmarks/results gets the table, with what was run on what.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.report import RESULTS, hardware, machine_name, today, versions
from training.config.command_line import OneLineParser, run_script

ROOT = Path(__file__).resolve().parents[1]
MODEL, RANKS, BATCH_SIZE, HEAD_EPOCHS = "airbench_small", 2, 128, 3
SHARED = "--workers 0 --tensorboard false --report false --progress off --augmentation shift_flip"
CROSS_ENTROPY = "--learning-rate 0.004 --label-smoothing 0.1"
FEATURES = "--learning-rate 0.004 --loss supcon"
HEAD = "--learning-rate 0.03 --tune head"


def train(log_dir: Path, name: str, epochs: int, same: list[str], recipe: str) -> dict[str, Any]:
    """Train one line; return the last epoch's top-1 and the seconds of all epochs."""
    start = ["bash", "scripts/launch_distributed.sh", MODEL, "ddp", str(RANKS), str(BATCH_SIZE), str(epochs)]
    subprocess.run(
        [*start, *SHARED.split(), *same, *recipe.split(), "--log-dir", str(log_dir), "--run-name", name],
        cwd=ROOT,
        check=True,
        stdout=subprocess.DEVNULL,
    )
    lines = (log_dir / "runs" / name / "metrics.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    ends = [event for event in events if event["kind"] == "epoch"]
    return {"top1": ends[-1]["val_top1"], "seconds": round(sum(event["seconds"] for event in ends), 1)}


def one_seed(data: str, epochs: int, seed: int) -> dict[str, dict[str, Any]]:
    """Train all lines with one seed; return their scores by column of the table."""
    with tempfile.TemporaryDirectory() as folder:
        log_dir, same = Path(folder), ["--data", data, "--seed", str(seed)]
        ours = train(log_dir, "cross-entropy", epochs, same, CROSS_ENTROPY)
        features = train(log_dir, "features", epochs - 1, same, FEATURES)
        weights = log_dir / "runs" / "features" / "model.safetensors"
        head = train(log_dir, "head", HEAD_EPOCHS, [*same, "--weights", str(weights)], HEAD)
    head["seconds"] = round(head["seconds"] + features["seconds"], 1)
    return {"cross-entropy": ours, "supcon, 20 neighbours": features, "supcon, head": head}


def table(study: dict[str, Any]) -> str:
    """Return the table: top-1 of the last epoch, mean and sample standard deviation, and seconds of training."""
    rows = ["| training | top-1 | seconds, median |", "|---|---|---|"]
    for name in study["runs"][0]["scores"]:
        scores = [run["scores"][name] for run in study["runs"]]
        top1 = [100 * score["top1"] for score in scores]
        deviation = f" ± {statistics.stdev(top1):.2f}" if len(top1) > 1 else ""
        seconds = statistics.median(score["seconds"] for score in scores)
        rows.append(f"| {name} | {statistics.mean(top1):.2f}{deviation} % | {seconds:.0f} |")
    return "\n".join(rows)


def parse(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = OneLineParser("contrast", __doc__)
    parser.add_value("data", str, "text", help="as of --data of a training")
    parser.add_number("--epochs", 2, 1000, default=8, help="of cross-entropy (default: 8)")
    parser.add_number("--seeds", 1, 100, default=5, help="how many (default: 5)")
    return parser.parse(words)


def run(given: argparse.Namespace) -> int:
    """Train all seeds and write the file after each, so that a break keeps what is there."""
    name = Path(given.data.rpartition(":")[2]).stem
    file = RESULTS / f"contrast_{name}_{hardware()}_{today()}.md"
    study: dict[str, Any] = {"runs": []}
    about = f"{MODEL}, {RANKS} ranks of {BATCH_SIZE} images, {given.epochs} epochs of cross-entropy; {machine_name()}"
    for seed in range(given.seeds):
        study["runs"].append({"seed": seed, "scores": one_seed(given.data, given.epochs, seed)})
        print(study["runs"][-1], flush=True)
        facts = f"{about}; {versions('torch', 'torchvision', 'timm')}"
        lines = ["# Contrastive training beside cross-entropy", f"{name}, {seed + 1} seed(s): {facts}.", table(study)]
        file.write_text("\n\n".join([*lines, f"```json\n{json.dumps(study['runs'])}\n```"]) + "\n")
    return 0


def main() -> int:
    """Return the exit code."""
    return run_script("contrast", parse, run)


if __name__ == "__main__":
    sys.exit(main())
