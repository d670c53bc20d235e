"""The training loss against PyTorch, timm and scikit-learn; bad values are one line."""

from __future__ import annotations

import copy
import csv

import numpy as np
import pytest
import torch
from sklearn.utils.class_weight import compute_class_weight
from timm.data.mixup import mixup_target
from timm.loss import BinaryCrossEntropy, SoftTargetCrossEntropy
from torch import nn
from torch.nn.functional import cross_entropy

from tests.kit import assert_same_but_rounding
from zerovision.models.ensemble import Ensemble
from zerovision.training.base.errors import UserError
from zerovision.training.config.command_line import parse_args
from zerovision.training.data.reader import Batch
from zerovision.training.tasks.class_weights import class_weights
from zerovision.training.tasks.labels import build_loss

NAMES = ["cat", "dog", "a=b", "owl"]
COUNTS = [5, 2, 40, 0]  # of no owl is there a training image
LABELS = torch.arange(4).repeat_interleave(torch.tensor(COUNTS))
LOGITS = torch.randn(len(LABELS), 4, generator=torch.Generator().manual_seed(1)) * 3
BALANCED = [*compute_class_weight("balanced", classes=np.arange(3), y=LABELS.numpy()), 0.0]
LAMBDA = 0.3


def losses(
    *flags: str, logits: torch.Tensor = LOGITS, targets: torch.Tensor | None = None, labels: torch.Tensor = LABELS
) -> torch.Tensor:
    """Return our loss of each sample, by the command line's flags."""
    config, _ = parse_args(flags)
    batch = Batch(torch.empty(0), labels, torch.ones(len(labels)), torch.arange(len(labels)), targets=targets)
    return build_loss(config, NAMES, COUNTS, torch.device("cpu"))(logits, batch)


def mixed(smoothing: float) -> torch.Tensor:
    """Return timm's targets of a batch mixed with itself in reverse order."""
    return mixup_target(LABELS, 4, LAMBDA, smoothing)


def test_the_default_is_pytorchs_cross_entropy_with_label_smoothing():
    expected = cross_entropy(LOGITS, LABELS, label_smoothing=0.1, reduction="none")
    assert torch.equal(losses(), expected)
    assert losses().dtype == torch.float32


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_mixed_targets_are_smoothed_as_by_timm(smoothing):
    found = losses("--label-smoothing", str(smoothing), targets=mixed(0.0))
    torch.testing.assert_close(found.mean(), SoftTargetCrossEntropy()(LOGITS, mixed(smoothing)))


@pytest.mark.parametrize(("smoothing", "threshold"), [(0.0, None), (0.1, None), (0.1, 0.2), (0.3, 0.5)])
def test_binary_cross_entropy_is_timms(smoothing, threshold):
    flags = ("--loss", "bce" if threshold is None else f"bce:{threshold}", "--label-smoothing", str(smoothing))
    oracle = BinaryCrossEntropy(smoothing, threshold, reduction="none")
    torch.testing.assert_close(losses(*flags), oracle(LOGITS, LABELS).mean(1))
    torch.testing.assert_close(losses(*flags, targets=mixed(0.0)), oracle(LOGITS, mixed(smoothing)).mean(1))


def test_balanced_weights_are_scikit_learns():
    np.testing.assert_allclose(class_weights("balanced", NAMES, COUNTS), BALANCED)


@pytest.mark.parametrize(
    ("value", "weights"), [("balanced", BALANCED), ("dog=3,a=b=0.25", [1, 3, 0.25, 1]), ("cat=0", [0, 1, 1, 1])]
)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_mean_over_the_training_set_is_a_weighted_mean(value, weights, smoothing):
    flags, of_class = ("--class-weights", value, "--label-smoothing", str(smoothing)), torch.tensor(weights).float()
    plain = cross_entropy(LOGITS, LABELS, label_smoothing=smoothing, reduction="none")
    torch.testing.assert_close(losses(*flags).mean(), (of_class[LABELS] * plain).sum() / of_class[LABELS].sum())
    if not smoothing:
        torch.testing.assert_close(losses(*flags).mean(), cross_entropy(LOGITS, LABELS, of_class))
    whole, parts = losses(*flags, targets=mixed(0.0)), [losses(*flags), losses(*flags, labels=LABELS.flip(0))]
    torch.testing.assert_close(whole, LAMBDA * parts[0] + (1 - LAMBDA) * parts[1])


@pytest.mark.parametrize("loss", ["cross_entropy", "bce"])
def test_a_frequent_class_is_not_taken_for_a_rare_one(loss):
    """Whatever the weights, the best prediction for a sample is its own class, with the default smoothing."""
    config, _ = parse_args(["--class-weights", "balanced", "--loss", loss])
    batch = Batch(torch.empty(0), torch.zeros(2, dtype=torch.int64), torch.ones(2), torch.arange(2))
    right, wrong = build_loss(config, NAMES[:2], [600, 20], torch.device("cpu"))(
        torch.tensor([[2.0, -2.0], [-2.0, 2.0]]), batch
    )
    assert right < wrong


def test_class_weights_of_binary_cross_entropy_weigh_samples():
    weights = torch.tensor(BALANCED).float()
    plain, weighted = losses("--loss", "bce"), losses("--loss", "bce", "--class-weights", "balanced")
    torch.testing.assert_close(weighted, plain * weights[LABELS])
    soft = losses("--loss", "bce", "--class-weights", "balanced", targets=mixed(0.0))
    by_hand = losses("--loss", "bce", targets=mixed(0.0)) * (
        LAMBDA * weights[LABELS] + (1 - LAMBDA) * weights[LABELS.flip(0)]
    )
    torch.testing.assert_close(soft, by_hand)


@pytest.mark.parametrize("flags", [(), ("--class-weights", "dog=3"), ("--loss", "bce", "--class-weights", "dog=3")])
@pytest.mark.parametrize("targets", [None, mixed(0.0)], ids=["hard", "mixed"])
def test_each_member_of_an_ensemble_learns_by_its_own_loss(flags, targets):
    """The gradients are those of the members trained apart, divided by their number."""
    torch.manual_seed(0)
    together = Ensemble(nn.Linear(6, 4) for _ in range(3))
    apart, inputs = copy.deepcopy(together.members), 3 * torch.randn(len(LABELS), 6)
    alone = torch.stack([losses(*flags, logits=member(inputs), targets=targets) for member in apart])
    alone.sum().backward()
    found = losses(*flags, logits=together(inputs), targets=targets)
    found.sum().backward()
    torch.testing.assert_close(found, alone.mean(0))
    for parameter, oracle in zip(together.parameters(), apart.parameters(), strict=True):
        assert_same_but_rounding(3 * parameter.grad, oracle.grad)


def test_names_with_commas_and_equals_signs_have_weights_in_quotes_or_in_a_file(tmp_path):
    names, weights = ["tench, Tinca tinca", "a=b", 'say "hi"', "none"], [2.0, 3.0, 4.0, 1.0]
    file = tmp_path / "weights.csv"
    with file.open("w", newline="") as stream:
        csv.writer(stream).writerows([("class", "weight"), *zip(names, weights, strict=True)])
    mean = sum(weights) / 4
    for value in (
        '"tench, Tinca tinca"=2, a=b=3,"say ""hi"""=4',
        '"tench, Tinca tinca"=2,"a=b"=3,say "hi"=4',
        str(file),
    ):
        assert class_weights(value, names, [5, 5, 5, 5]) == pytest.approx([weight / mean for weight in weights])
    assert class_weights('"two\r\nlines"=3', ["two\r\nlines", "b"], [1, 1]) == [1.5, 0.5]
    file.write_text("a=b\n")
    for value in (str(file), "a=b=3\rnone=2", "a=b=3\nnone=2"):
        with pytest.raises(UserError, match="CLASS,WEIGHT"):
            class_weights(value, names, [5, 5, 5, 5])
    with pytest.raises(UserError, match="cannot be read"):
        class_weights(str(tmp_path / "none.csv"), names, [5, 5, 5, 5])
