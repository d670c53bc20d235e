"""Trains the six reference runs and records their losses: `python -m tests.references.record`.

Record anew, and say so in the commit, when a change is meant to alter what a training computes, or for new versions of
PyTorch or DeepSpeed. `make test-slow` compares.
"""

from __future__ import annotations

import json
import os
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from benchmarks.report import machine_name
from tests.training.commands import assert_success, launch, read_metrics

FOLDER = Path(__file__).parent
MODELS = {"basic_cnn": "basic_cnn", "mobilenet": "mobilenet", "ensemble": "ensemble:mobilenet,efficientnet"}
ENGINES = {"torch": "ddp", "deepspeed": "fsdp_stage2"}  # and its strategy
RANKS, BATCH_SIZE_PER_RANK, EPOCHS = 2, 16, 1
FLAGS = ["--val-fraction", "0.5", "--log-every-steps", "15", "--learning-rate", "0.001"]
# What leaves a processor with fewer instructions (`make test-processors`), beside what PyTorch counts as capability.
LIMITS = ("ONEDNN_MAX_CPU_ISA", "MKL_CBWR")
SILENT = ["--tensorboard", "false", "--report", "false", "--progress", "off"]


def train(model: str, engine: str, **variables: str) -> dict[str, Any]:
    """Train a reference run of digits, and return its losses and what they depend on."""
    limits = [f"{name}={os.environ[name]}" for name in LIMITS if name in os.environ]
    sizes = map(str, (RANKS, BATCH_SIZE_PER_RANK, EPOCHS))
    words = [MODELS[model], ENGINES[engine], *sizes, "--engine", engine, *FLAGS]
    with tempfile.TemporaryDirectory() as logs:
        place = ["--log-dir", logs, "--run-name", "reference"]
        assert_success(launch(*words, *SILENT, *place, OMP_NUM_THREADS="1", **variables))
        run = Path(logs) / "runs" / "reference"
        steps, (epoch,) = read_metrics(run, "step"), read_metrics(run, "epoch")
    return {
        "command": " ".join(words),
        "machine": ", ".join([machine_name(), torch.backends.cpu.get_cpu_capability(), *limits]),
        "versions": versions(),
        "step_losses": {str(point["step"]): point["loss"] for point in steps},
        "epoch": {name: epoch[name] for name in ("train_loss", "train_top1", "val_loss", "val_top1")},
    }


def reference_file(model: str, engine: str) -> Path:
    """Return the file of a run with the installed versions."""
    names = "_".join(f"{name}{number}" for name, number in versions().items())
    return FOLDER / f"{model}_{engine}_{RANKS}cpu_{names}.json"


def versions() -> dict[str, str]:
    """Return the versions of the libraries that compute, without their build ('+cpu')."""
    return {name: version(name).partition("+")[0] for name in ("torch", "deepspeed")}


def main() -> None:
    """Record all six."""
    for model in MODELS:
        for engine in ENGINES:
            path = reference_file(model, engine)
            path.write_text(json.dumps(train(model, engine), indent=1) + "\n")
            print(path.name)


if __name__ == "__main__":
    main()
