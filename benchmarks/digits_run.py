"""One run on the handwritten digits through the real launcher, for the benchmarks of whole runs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def train(model: str, ranks: int, batch_size: int, epochs: int, logs: Path, name: str, *flags: str) -> list[dict]:
    """Train under `ddp`; return the lines of metrics.jsonl.

    Args:
        model: a key of `MODELS`.
        ranks: CPU ranks or GPUs.
        batch_size: images per rank and micro-step.
        epochs: epochs in all.
        logs: folder for `--log-dir`.
        name: the run's name in it.
        flags: any flags of `train_distributed.py` beside these.

    Raises:
        RuntimeError: with what the launcher said, where it failed.
    """
    words = [model, "ddp", str(ranks), str(batch_size), str(epochs), "--run-name", name, "--log-dir", str(logs)]
    recipe = ["--learning-rate", "0.004", "--tensorboard", "false"]
    command = ["bash", str(ROOT / "scripts" / "launch_distributed.sh"), *words, *recipe, *flags]
    result = subprocess.run(command, check=False, capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {result.returncode}: {result.stderr[-2000:]}")
    return [json.loads(line) for line in (logs / "runs" / name / "metrics.jsonl").read_text().splitlines()]
