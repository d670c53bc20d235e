"""A recipe whose samples, targets and sizes change from epoch to epoch ends with the same bytes after a resume.

On grey images.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from training.config import TrainConfig
from training.run import run

RECIPE = {
    "data": "fake",
    "model_type": "basic_cnn",
    "image_size": 16,
    "image_channels": 1,
    "epochs": 3,
    "batch_size": 125,
    "loss": "bce",
    "sampling": "balanced",
    "repeated_augmentation": 3,
    "progressive_size": "8:0:2",
    "eval_image_size": 20,
    "augmentation": "shift_flip",
    "cutmix": 1.0,
    "mixup_probability": 0.5,
}


def train(log_dir: Path, **changes) -> Path:
    output = {"progress": "off", "tensorboard": False, "report": False, "keep_last": 99, "save_every_steps": 3}
    config = TrainConfig(**RECIPE, **output, log_dir=str(log_dir), run_name="run", **changes)
    assert run(config) == 0
    return log_dir / "runs" / "run"


def epochs(folder: Path) -> dict[int, tuple[float, ...]]:
    entries = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    names = ("train_loss", "train_top1", "val_loss", "val_top1")
    return {entry["epoch"]: tuple(entry[name] for name in names) for entry in entries if entry["kind"] == "epoch"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    return train(tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("checkpoint", ["step-00000-0000003", "step-00001-0000004"])
def test_a_resumed_run_ends_with_the_same_bytes(whole, tmp_path, checkpoint):
    resumed = train(tmp_path, resume=str(whole / "checkpoints" / checkpoint))
    for name in ("model.safetensors", "checkpoints/step-00003-0000000/shard-00000.safetensors"):
        assert (resumed / name).read_bytes() == (whole / name).read_bytes(), name
    assert epochs(resumed).items() <= epochs(whole).items()
    assert max(epochs(resumed)) == 3
