"""A recipe of many ingredients, on grey images: two ranks that nothing disturbed, and one that goes on from them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from commands import launch, read_metrics, train_here
from safetensors.numpy import load_file

LEAVES = 2  # a step: of 2 ranks, or of 2 micro-steps of one
RECIPE = {
    "data": "fake",
    "image-size": 16,
    "image-channels": 1,
    "whitened-stem": "true",
    "loss": "bce",
    "repeated-augmentation": 3,
    "progressive-size": "12:0:2",
    "eval-image-size": 20,
    "augmentation": "shift_flip",
    "mirror": "alternate",
    "shift-padding": "reflect",
    "random-erasing": 0.3,
    "mixup": 0.4,
    "cutmix": 1.0,
    "mixup-probability": 0.7,
    "ema": 0.8,
    "lookahead": 3,
    "layer-decay": 0.8,
}
RARE = [{"sampling": "balanced"}, {"class-weights": "wave-3=2.5"}]  # they exclude each other
OUTPUT = {"run-name": "run", "progress": "off", "tensorboard": "false", "report": "false", "keep-last": 99}


def flags(log_dir: Path, **more: object) -> list[str]:
    values = RECIPE | OUTPUT | {"log-dir": log_dir, "save-every-steps": 1} | more
    return [f"--{name}={value}" for name, value in values.items()]


@pytest.fixture(scope="module", params=RARE, ids=lambda more: "".join(more))
def whole(request, tmp_path_factory) -> tuple[Path, dict[str, str]]:
    """The folder of three epochs of 8 steps on two ranks, with a checkpoint after each step, and a flag of it."""
    log_dir = tmp_path_factory.mktemp("whole")
    result = launch("airbench_small", "ddp", "2", "64", "3", *flags(log_dir, **request.param))
    assert result.returncode == 0, result.stderr
    return log_dir / "runs" / "run", request.param


def epochs(folder: Path) -> dict[int, tuple[float, ...]]:
    names = ("train_loss", "train_top1", "val_loss", "val_top1")
    return {entry["epoch"]: tuple(entry[name] for name in names) for entry in read_metrics(folder, "epoch")}


def weights(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("checkpoint", ["step-00000-0000001", "step-00002-0000003"])
def test_one_rank_goes_on_from_any_step_of_two_and_ends_with_the_same_bytes(whole, tmp_path, checkpoint):
    folder, flag = whole
    line = ["--model-type=airbench_small", "--strategy=ddp", "--batch-size=64", "--epochs=3"]
    more = flag | {"gradient-accumulation-steps": LEAVES, "resume": folder / "checkpoints" / checkpoint}
    result = train_here(*line, *flags(tmp_path, **more))
    assert result.returncode == 0, result.stderr
    resumed = tmp_path / "runs" / "run"
    ours, theirs = weights(resumed), weights(folder)
    assert ours.keys() == theirs.keys()
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in ours)
    assert epochs(resumed).items() <= epochs(folder).items()
    assert max(epochs(resumed)) == 3


def test_the_stem_still_whitens_at_the_end(whole):
    """Its filters are pairs with opposite signs, which no training would leave so."""
    filters = weights(whole[0])["stem.weight"]
    assert filters.any()
    assert (filters[: len(filters) // 2] == -filters[len(filters) // 2 :]).all()
