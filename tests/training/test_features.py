"""Features without a classifier, as a user trains them: on any number of ranks, and then with a head."""

from __future__ import annotations

import json

import pytest
from commands import launch, read_metrics, train_here

from zerovision.delivery.evaluate import evaluate
from zerovision.delivery.predict import predict
from zerovision.training.base.errors import UserError
from zerovision.training.base.run_folder import CARD, SCORES, WEIGHTS

FEATURES = ("--data", "digits", "--image-size", "8", "--loss", "supcon", "--gradient-cache", "32")


def test_a_head_makes_a_classifier_of_features(tmp_path):
    flags = ("--model-type", "basic_cnn", "--batch-size", "128", "--learning-rate", "0.003", "--log-dir", str(tmp_path))
    done = train_here(*flags, *FEATURES, "--epochs", "2", "--run-name", "features")
    assert done.returncode == 0, done.stderr
    run = tmp_path / "runs" / "features"
    assert max(epoch["val_top1"] for epoch in read_metrics(run, "epoch")) > 0.85
    assert json.loads((run / "evaluation" / SCORES).read_text())["top1"] > 0.85
    assert "top-1 is by the 20 nearest training images" in done.stdout
    assert not (run / CARD).exists()
    for use in (lambda: evaluate(str(run)), lambda: predict(str(run), [str(tmp_path)])):
        with pytest.raises(UserError, match=r"is of --loss supcon and tells no classes apart yet"):
            use()
    head = ("--data", "digits", "--image-size", "8", "--weights", str(run / WEIGHTS), "--tune", "head")
    done = train_here(*flags, *head, "--epochs", "3", "--learning-rate", "0.02", "--run-name", "head")
    assert done.returncode == 0, done.stderr
    assert max(epoch["val_top1"] for epoch in read_metrics(tmp_path / "runs" / "head", "epoch")) > 0.85
    assert evaluate(str(tmp_path / "runs" / "head"), verbose=False)["top1"] > 0.85


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp_stage2"])
def test_any_number_of_ranks_leaves_the_same_file_and_scores(strategy, tmp_path):
    found = []
    for ranks in (1, 2, 4):
        words = ("basic_cnn", strategy, str(ranks), str(128 // ranks), "1", "--threads-per-rank", "1")
        done = launch(*words, *FEATURES, "--log-dir", str(tmp_path), "--run-name", f"on-{ranks}")
        assert done.returncode == 0, done.stderr
        run = tmp_path / "runs" / f"on-{ranks}"
        (epoch,) = read_metrics(run, "epoch")
        scores = (epoch["val_top1"], epoch["val_loss"], epoch["train_loss"], epoch["train_top1"])
        found.append(((run / WEIGHTS).read_bytes(), scores))
    assert found[0] == found[1] == found[2]
