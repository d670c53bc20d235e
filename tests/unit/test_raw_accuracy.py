"""The accuracy of the weights themselves beside that of their average."""

from __future__ import annotations

import json

import pytest

from delivery.evaluate import evaluate
from tests.rounding import ROUNDING
from training.config import TrainConfig
from training.run import run


def train(log_dir, name, **changes):
    """Return the folder and the lines of its epochs."""
    recipe = {"model_type": "basic_cnn", "data": "fake", "image_size": 8, "batch_size": 125, "epochs": 2}
    output = {"progress": "off", "tensorboard": False, "report": False, "log_dir": str(log_dir), "run_name": name}
    assert run(TrainConfig(**recipe, **output, **changes)) == 0
    folder = log_dir / "runs" / name
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return folder, [line for line in lines if line["kind"] == "epoch"]


def test_it_is_that_of_a_training_without_the_average_and_changes_nothing(tmp_path):
    _, plain = train(tmp_path, "plain")
    average, without = train(tmp_path, "average", ema=0.9)
    compared, both = train(tmp_path, "compared", ema=0.9, raw_accuracy=True)
    scores = [(line["val_loss"], line["val_top1"]) for line in plain]
    assert [(line["raw_loss"], line["raw_top1"]) for line in both] == scores
    assert [(line["val_loss"], line["val_top1"]) for line in both] != scores
    for name in ("model.safetensors", "checkpoints/step-00002-0000000/shard-00000.safetensors"):
        assert (compared / name).read_bytes() == (average / name).read_bytes(), name
    exported = evaluate(average, split="val", output=None)
    best = max(without, key=lambda line: line["val_top1"])
    assert exported["top1"] == pytest.approx(best["val_top1"], abs=1e-12), "the average is what is exported"
    assert exported["loss"] == pytest.approx(best["val_loss"], rel=ROUNDING)
    assert all("raw_top1" not in line for line in [*plain, *without])
    assert f"raw top-1 {100 * scores[0][1]:.2f} %" in (tmp_path / "training.log").read_text()
