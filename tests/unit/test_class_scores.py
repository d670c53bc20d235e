"""Scores by which an epoch is chosen, against scikit-learn's on the same predictions."""

from __future__ import annotations

import typing
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sklearn.metrics import average_precision_score, balanced_accuracy_score, f1_score, log_loss, roc_auc_score

from training.base.errors import UserError
from training.base.points import SCORE_NAMES, merit
from training.base.progress import Progress
from training.config import FIELDS, TrainConfig
from training.observe import class_areas
from training.observe.class_scores import check_best_by, count_classes, score_of
from training.observe.scores import SampleRecorder, sample_losses
from training.world.world import World

ALONE = World(0, 0, 1, 1, torch.device("cpu"))
SAMPLES, CLASSES = 300, 6


def made_predictions(decimals: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Labels [300] 1 : 50 and logits [300, 6]; class 4 has no sample, and with few decimals there are many ties."""
    generator = torch.Generator().manual_seed(decimals)
    shares = torch.tensor([0.6, 0.25, 0.1, 0.04, 0.0, 0.01])
    labels = shares.multinomial(SAMPLES, replacement=True, generator=generator)
    logits = torch.randn(SAMPLES, CLASSES, generator=generator)
    logits[torch.arange(SAMPLES), labels] += 1
    return labels, logits.round(decimals=decimals)


def recorded(labels, logits, batch_size, order):
    """The scores of an evaluation in batches of a size, in an order of them, the last filled up with weight 0."""
    recorder = SampleRecorder(CLASSES, keeps_probabilities=True)
    for start in order(range(0, SAMPLES, batch_size)):
        places = torch.arange(start, start + batch_size)
        part, weights = places % SAMPLES, (places < SAMPLES).float()
        losses = sample_losses(logits[part], labels[part])
        recorder.add(losses, logits[part], labels[part], weights, part)
    return recorder.gather(ALONE)


@pytest.mark.parametrize("decimals", [7, 1, 0])
def test_scores_are_scikit_learns(decimals, monkeypatch):
    labels, logits = made_predictions(decimals)
    scores = recorded(labels, logits, 64, list)
    found = {name: score_of(scores, name, CLASSES) for name in SCORE_NAMES}
    probabilities, predictions = logits.softmax(1).numpy(), logits.topk(5).indices[:, 0].numpy()
    assert found["macro_f1"] == f1_score(labels, predictions, labels=range(CLASSES), average="macro", zero_division=0)
    assert found["balanced_accuracy"] == balanced_accuracy_score(labels, predictions)
    assert found["loss"] == pytest.approx(log_loss(labels, probabilities, labels=range(CLASSES)), rel=1e-5)
    columns = [((labels == one).numpy(), probabilities[:, one]) for one in labels.unique().tolist()]
    assert len(columns) == CLASSES - 1
    assert found["auroc"] == pytest.approx(np.mean([roc_auc_score(*column) for column in columns]), abs=1e-12)
    assert found["map"] == pytest.approx(np.mean([average_precision_score(*column) for column in columns]), abs=1e-12)
    recall = {one: float((predictions == one)[labels == one].mean()) for one in labels.unique().tolist()}
    assert count_classes(scores, CLASSES).lowest_recall == min(recall.items(), key=lambda pair: pair[1])
    monkeypatch.setattr(class_areas, "SORTED_AT_ONCE", 2 * SAMPLES)  # two classes at a time
    other = recorded(labels, logits, 7, reversed)
    assert {name: score_of(other, name, CLASSES) for name in SCORE_NAMES} == found, "to the last bit"


def test_what_cannot_be_told_is_no_number():
    labels, logits = torch.zeros(SAMPLES, dtype=torch.int64), torch.randn(SAMPLES, CLASSES)
    areas = recorded(labels, logits, 64, list).areas
    assert (str(areas.auroc), areas.map) == ("nan", 1.0), "there is one class, which no threshold tells from others"
    logits[0] = torch.nan
    assert {*map(str, recorded(labels, logits, 64, list).areas)} == {"nan"}


def test_of_the_loss_less_is_better():
    assert set(typing.get_args(typing.get_type_hints(TrainConfig)["best_by"])) == {*SCORE_NAMES}
    assert FIELDS["best_by"].default == "top1"
    for name in SCORE_NAMES:
        assert merit(name, 0.25) == (-0.25 if name == "loss" else 0.25)
        assert merit(name, merit(name, 3.5)) == 3.5
    assert Progress().after_epoch(-7.0, is_best=True, has_diverged=False).best_score == -7.0


def data_of(val_counts, samples):
    return SimpleNamespace(
        val=range(samples), test=None, class_names=val_counts, val_counts=val_counts, label_sets=None
    )


@pytest.mark.parametrize(
    ("score", "val_counts", "samples", "ranks", "complaint"),
    [
        ("auroc", [0, 9], 9, 1, "all validation images are of one class"),
        ("auroc", [1] * 20_000, 100_000, 1, "100000 images x 20000 classes take 8 GB of each of 1 rank"),
        ("map", [1] * 20_000, 100_000, 1, "give more ranks, or --best-by macro_f1 or balanced_accuracy."),
        ("map", [1] * 20_000, 100_000, 2, None),
        ("map", [0, 9], 9, 1, None),
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
