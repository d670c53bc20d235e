"""Scores by which an epoch is chosen, against scikit-learn's on the same predictions."""

from __future__ import annotations

import json
import math
import typing
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn import metrics

from tests.kit import ALONE, train
from tests.training.commands import read_metrics
from zerovision.training.base.errors import UserError
from zerovision.training.base.points import SCORE_NAMES, best_epoch, merit
from zerovision.training.base.progress import Progress
from zerovision.training.config import TrainConfig
from zerovision.training.data.reading.sources import Source
from zerovision.training.observe.best_weights import epoch_of
from zerovision.training.observe.evaluation import describe_scores
from zerovision.training.tasks import scores as task_scores
from zerovision.training.tasks.labels import OneLabel
from zerovision.training.tasks.scores import check_best_by, count_classes, score_of

SAMPLES, CLASSES = 300, 7


def made_predictions(decimals: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels [300] 1 : 50 and logits [300, 7]; with few decimals there are many ties.

    Class 4 has no sample, but is predicted; class 6 is not predicted either.
    """
    generator = torch.Generator().manual_seed(decimals)
    shares = torch.tensor([0.6, 0.25, 0.1, 0.04, 0.0, 0.01, 0.0])
    labels = shares.multinomial(SAMPLES, replacement=True, generator=generator)
    logits = torch.randn(SAMPLES, CLASSES, generator=generator)
    logits[torch.arange(SAMPLES), labels] += 1
    logits[:, 6] -= 20
    return labels, logits.round(decimals=decimals)


def recorded(labels, logits, batch_size, order):
    """The scores of an evaluation in batches of a size, in an order of them, the last filled up with weight 0."""
    recorder = OneLabel(CLASSES).recorder(keeps_probabilities=True)
    for start in order(range(0, SAMPLES, batch_size)):
        places = torch.arange(start, start + batch_size)
        part, weights = places % SAMPLES, (places < SAMPLES).float()
        recorder.add(logits[part], labels[part], weights, part)
    return recorder.gather(ALONE)


@pytest.mark.parametrize("decimals", [7, 1, 0])
def test_scores_are_scikit_learns(decimals, monkeypatch):
    labels, logits = made_predictions(decimals)
    scores = recorded(labels, logits, 64, list)
    found = {name: score_of(scores, name, CLASSES) for name in SCORE_NAMES}
    probabilities, predictions = logits.softmax(1).numpy(), logits.topk(5).indices[:, 0].numpy()
    assert set(predictions) == {*range(6)}
    assert found["macro_f1"] == metrics.f1_score(labels, predictions, average="macro", zero_division=0)
    assert describe_scores(scores, "abcdefg", Source())["macro"] == {
        name: pytest.approx(
            getattr(metrics, f"{name}_score")(labels, predictions, average="macro", zero_division=0), abs=1e-12
        )
        for name in ("precision", "recall", "f1")
    }
    assert found["balanced_accuracy"] == metrics.balanced_accuracy_score(labels, predictions)
    assert found["loss"] == pytest.approx(metrics.log_loss(labels, probabilities, labels=range(CLASSES)), rel=1e-5)
    columns = [((labels == one).numpy(), probabilities[:, one]) for one in labels.unique().tolist()]
    assert len(columns) == CLASSES - 2
    assert found["auroc"] == pytest.approx(np.mean([metrics.roc_auc_score(*column) for column in columns]), abs=1e-12)
    assert found["map"] == pytest.approx(
        np.mean([metrics.average_precision_score(*column) for column in columns]), abs=1e-12
    )
    recall = {one: float((predictions == one)[labels == one].mean()) for one in labels.unique().tolist()}
    assert count_classes(scores, CLASSES).lowest_recall == min(recall.items(), key=lambda pair: pair[1])
    monkeypatch.setattr(task_scores, "SORTED_AT_ONCE", 2 * SAMPLES)  # two classes at a time
    other = recorded(labels, logits, 7, reversed)
    assert {name: score_of(other, name, CLASSES) for name in SCORE_NAMES} == found, "to the last bit"


def test_what_cannot_be_told_is_no_number():
    labels, logits = torch.zeros(SAMPLES, dtype=torch.int64), torch.randn(SAMPLES, CLASSES)
    scores = recorded(labels, logits, 64, list)
    areas = scores.areas
    assert (str(areas.auroc), areas.map) == ("nan", 1.0), "there is one class, which no threshold tells from others"
    facts = describe_scores(scores, "abcdefg", Source())
    assert ("auroc" in facts, facts["map"]) == (False, 1.0)
    json.dumps(facts, allow_nan=False)
    logits[0] = torch.nan
    assert {*map(str, recorded(labels, logits, 64, list).areas)} == {"nan"}


def test_of_the_loss_less_is_better():
    assert set(typing.get_args(typing.get_type_hints(TrainConfig)["best_by"])) == {*SCORE_NAMES}
    for name in SCORE_NAMES:
        assert merit(name, 0.25) == (-0.25 if name == "loss" else 0.25)
        assert merit(name, merit(name, 3.5)) == 3.5
        assert merit(name, math.nan) == merit(name, None) == -math.inf
    assert Progress().after_epoch(-7.0, 7.0, is_best=True, has_diverged=False).best_score == -7.0


def test_the_best_epoch_is_that_of_the_lowest_loss_among_those_of_the_best_score():
    lines = [
        {"epoch": 1, "best_by": "auroc", "score": math.nan, "val_loss": 0.1},
        {"epoch": 2, "best_by": "auroc", "score": 0.6, "val_loss": 0.5},
        {"epoch": 3, "best_by": "auroc", "score": 0.9, "val_loss": math.inf, "diverged": "the validation loss is inf"},
        {"epoch": 4, "best_by": "auroc", "score": 0.6, "val_loss": 0.4},
        {"epoch": 5, "best_by": "auroc", "score": 0.6, "val_loss": 0.4},
        {"epoch": 6, "best_by": "auroc", "score": 0.5, "val_loss": 0.3},
    ]
    assert best_epoch(lines)["epoch"] == 4
    assert best_epoch(lines[:1]) is best_epoch([]) is None
    progress, best = Progress(), []
    for line in lines:
        score = merit("auroc", line["score"])
        is_best = "diverged" not in line and progress.is_beaten_by(score, line["val_loss"])
        progress = progress.after_epoch(score, line["val_loss"], is_best=is_best, has_diverged=False)
        best.append((progress.best_epoch, progress.epochs_without_better))
    assert best == [(0, 1), (2, 0), (2, 1), (4, 2), (4, 3), (4, 4)], "early stopping waits for a better score"
    of_older_checkpoint = Progress(epoch=2, best_epoch=2, best_score=0.6)
    assert not of_older_checkpoint.is_beaten_by(0.6, 0.4)


def test_an_epoch_whose_score_is_no_number_is_never_the_best(few_images, tmp_path, monkeypatch):
    scores = iter([math.nan, 0.4, math.nan, 0.3])
    monkeypatch.setattr("zerovision.training.epoch.score_of", lambda *_: next(scores))
    folder = train(tmp_path, data="fake", image_size=8, batch_size=128, epochs=4)
    assert epoch_of(folder / "model.safetensors") == 2
    assert [line["is_best"] for line in read_metrics(folder, "epoch")] == [False, True, False, False]


def data_of(val_counts, samples, sets=None):
    return SimpleNamespace(val=range(samples), test=None, class_names=val_counts, val_counts=val_counts, sets=sets)


@pytest.mark.parametrize(
    ("score", "val_counts", "cure"),
    [
        ("auroc", [0, 9, 0], None),  # one class has positives and negatives
        ("map", [0, 0, 0], "loss"),
        ("auroc", [10, 10, 10], "loss"),
        ("macro_f1", [0, 10, 10], "loss"),
        ("loss", [0, 0, 0], None),
    ],
)
def test_of_several_labels_one_class_with_and_without_images_is_enough(score, val_counts, cure):
    data = data_of(val_counts, 10, SimpleNamespace())
    if cure is None:
        assert check_best_by(score, data, 100, 1)
        return
    with pytest.raises(UserError, match=f"--best-by {score} .* all 10 .* images or none: use --best-by {cure}"):
        check_best_by(score, data, 100, 1)


@pytest.mark.parametrize(
    ("score", "val_counts", "samples", "ranks", "complaint"),
    [
        ("auroc", [0, 9], 9, 1, "each class has all 9 validation images or none: use --best-by top1"),
        ("map", [0, 9], 9, 1, "--best-by map needs images with and without each class"),
        ("auroc", [1] * 20_000, 100_000, 1, "100000 images x 20000 classes take 8 GB on each of 1 rank"),
        ("map", [1] * 20_000, 100_000, 1, "use more ranks, or --best-by macro_f1 or balanced_accuracy."),
        ("map", [1] * 20_000, 100_000, 2, None),
        ("map", [1, 8], 9, 1, None),
        ("macro_f1", [0, 9], 9, 1, None),
    ],
)
def test_what_a_run_cannot_be_chosen_by_is_refused(score, val_counts, samples, ranks, complaint):
    data = data_of(val_counts, samples)
    if complaint is None:
        assert check_best_by(score, data, 100, ranks) == (score == "map")
        return
    with pytest.raises(UserError, match=complaint):
        check_best_by(score, data, 100, ranks)
