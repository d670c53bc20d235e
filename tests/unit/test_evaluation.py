"""Scores of an evaluation against scikit-learn's, and the files that are written of them."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.stats import sem
from sklearn.calibration import calibration_curve
from sklearn.metrics import accuracy_score, classification_report, confusion_matrix, log_loss, top_k_accuracy_score

from tests.kit import ALONE
from zerovision.delivery.evaluation_files import write_evaluation
from zerovision.delivery.intervals import interval_of
from zerovision.training.base.errors import UserError
from zerovision.training.data.reading.sources import Source
from zerovision.training.observe.evaluation import (
    calibration_bins,
    check_replaceable,
    dense_confusion,
    describe_scores,
    read_scores,
    write_scores,
)
from zerovision.training.tasks.labels import OneLabel
from zerovision.training.tasks.scores import SampleScores

NAMES = ["null", "<b>eins</b>", "zw\rei", "drei\n", "vier", "fünf", "六"]
SAMPLES = 500


class Named(Source):
    """Images whose names have a carriage return."""

    def name(self, index: int) -> str:
        return f"image\r{index}"


def described(labels: torch.Tensor, logits: torch.Tensor) -> dict:
    recorder = OneLabel(len(NAMES)).recorder()
    for part in torch.arange(len(labels)).split(64):
        recorder.add(logits[part], labels[part], torch.ones(len(part)), part)
    return describe_scores(recorder.gather(ALONE), NAMES, Named())


@pytest.fixture(scope="module")
def judged():
    """(labels [500], logits [500, 7], what is told of them); class 5 has no sample, class 6 is never predicted."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(5, (SAMPLES,), generator=generator)
    labels[labels == 4] = torch.where(torch.rand(int((labels == 4).sum()), generator=generator) < 0.5, 4, 6)
    logits = 2 * torch.randn(SAMPLES, len(NAMES), generator=generator)
    logits[torch.arange(SAMPLES), labels] += 2
    logits[:, 6] = -20
    return labels.numpy(), logits.double(), described(labels, logits)


def test_scores_are_scikit_learns_to_the_last_digit(judged):
    labels, logits, facts = judged
    predictions = logits.argmax(1).numpy()
    numbers = list(range(len(NAMES)))
    report = classification_report(
        labels, predictions, labels=numbers, target_names=NAMES, output_dict=True, zero_division=0
    )
    assert facts["top1"] == accuracy_score(labels, predictions)
    assert facts["top5"] == top_k_accuracy_score(labels, logits.numpy(), k=5, labels=numbers)
    assert facts["loss"] == pytest.approx(log_loss(labels, logits.softmax(1).numpy(), labels=numbers), rel=1e-6)
    assert facts["samples"] == SAMPLES
    for one in facts["classes"]:
        expected = report[one["name"]]
        assert (one["precision"], one["recall"]) == (expected["precision"], expected["recall"]), one
        assert (one["f1"], one["support"]) == (expected["f1-score"], expected["support"]), one
    for average in ("macro", "weighted"):
        expected = report[f"{average} avg"]
        assert facts[average] == {
            "precision": expected["precision"],
            "recall": expected["recall"],
            "f1": expected["f1-score"],
        }
    confusion = confusion_matrix(labels, predictions, labels=numbers)
    np.testing.assert_array_equal(dense_confusion(facts["confusion"], len(NAMES)), confusion)
    assert all(count for _, _, count in facts["confusion"])


def test_the_standard_error_of_the_loss_is_scipys_and_of_one_image_unknown(judged):
    labels, logits, facts = judged
    losses = -logits.log_softmax(1)[torch.arange(SAMPLES), torch.from_numpy(labels)].numpy()
    assert facts["loss_standard_error"] == pytest.approx(sem(losses), rel=1e-6)
    one = described(torch.from_numpy(labels[:1]), logits[:1].float())
    assert "loss_standard_error" not in one
    assert interval_of(one, "loss") is None


def test_calibration_is_scikit_learns(judged):
    labels, logits, facts = judged
    confidences, predictions = (found.numpy() for found in logits.float().softmax(1).max(1))
    is_right = predictions == labels
    accuracy, confidence = calibration_curve(is_right, confidences, n_bins=15)
    filled = [one for one in facts["calibration"] if one["samples"]]
    np.testing.assert_allclose([one["accuracy"] for one in filled], accuracy, rtol=1e-12)
    np.testing.assert_allclose([one["confidence"] for one in filled], confidence, rtol=1e-6)
    counts = np.array([one["samples"] for one in filled])
    assert facts["ece"] == pytest.approx((np.abs(accuracy - confidence) * counts).sum() / SAMPLES, rel=1e-6)
    assert 0.01 < facts["ece"] < 0.5
    assert len(filled) < len(facts["calibration"]) == 15, "a bin without samples is told as such"


def test_a_confidence_between_two_bins_belongs_to_the_lower_one():
    confidences = np.linspace(0, 1, 16)[1:]
    ones = torch.ones(15, dtype=torch.int64)
    details = SampleScores(ones, ones, ones, ones.double(), torch.from_numpy(confidences), ones.bool())
    assert [one["samples"] for one in calibration_bins(details)] == [1] * 15
    assert [one["confidence"] for one in calibration_bins(details)] == confidences.tolist()


def test_the_worst_samples_are_the_wrong_ones_with_the_highest_loss(judged):
    labels, logits, facts = judged
    predictions = logits.argmax(1).numpy()
    losses = -logits.log_softmax(1)[torch.arange(SAMPLES), torch.from_numpy(labels)].numpy()
    wrong = np.flatnonzero(predictions != labels)
    expected = wrong[np.argsort(-losses[wrong])][:24]
    assert [one["index"] for one in facts["worst"]] == expected.tolist()
    first = facts["worst"][0]
    assert first["loss"] == pytest.approx(losses[expected[0]], rel=1e-5)
    assert (first["label"], first["prediction"]) == (labels[expected[0]], predictions[expected[0]])
    assert first["name"] == f"image\r{expected[0]}"


def test_the_typical_sample_of_a_class_is_the_right_one_with_the_smallest_loss(judged):
    labels, logits, facts = judged
    losses = -logits.log_softmax(1)[torch.arange(SAMPLES), torch.from_numpy(labels)].numpy()
    is_right, expected = logits.argmax(1).numpy() == labels, []
    for label in range(len(NAMES)):
        places = np.flatnonzero(is_right & (labels == label))
        expected += [int(places[losses[places].argmin()])] if len(places) else []
    assert [one["index"] for one in facts["typical"]] == expected[:24]


def image(index: int) -> torch.Tensor:
    """A picture of its own for each index: uint8 [3, 20, 10]."""
    return torch.full((3, 20, 10), index % 251, dtype=torch.uint8)


def test_files_hold_what_was_found(judged, tmp_path: Path):
    labels, logits, facts = judged
    asked = []

    def explain(images: list[torch.Tensor], classes: list[int]) -> list[Image.Image]:
        asked.extend(zip((int(one[0, 0, 0]) for one in images), classes, strict=True))
        return [Image.new("RGB", (6, 6), (int(one[0, 0, 0]), 0, 0)) for one in images]

    write_evaluation(tmp_path / "e", facts, image, explain)
    shown = {"worst": facts["worst"], "typical": facts["typical"]}
    assert asked == [(one["index"] % 251, one["prediction"]) for samples in shown.values() for one in samples]
    for kind, samples in shown.items():
        for number, one in enumerate(samples):
            with Image.open(tmp_path / "e" / kind / f"{number:03d}-why.png") as picture:
                assert (picture.size, picture.getpixel((0, 0))) == ((126, 126), (one["index"] % 251, 0, 0))
    assert read_scores(tmp_path / "e") == json.loads(json.dumps(facts))
    with (tmp_path / "e" / "confusion.csv").open(encoding="utf-8", newline="") as stream:
        header, *rows = csv.reader(stream)
    assert header[1:] == [row[0] for row in rows] == NAMES
    expected = confusion_matrix(labels, logits.argmax(1), labels=range(len(NAMES)))
    np.testing.assert_array_equal([[int(cell) for cell in row[1:]] for row in rows], expected)
    with (tmp_path / "e" / "per_class.csv").open(encoding="utf-8", newline="") as stream:
        classes = list(csv.DictReader(stream))
    assert [float(one["f1"]) for one in classes] == [one["f1"] for one in facts["classes"]]
    with (tmp_path / "e" / "worst.csv").open(encoding="utf-8", newline="") as stream:
        worst = list(csv.DictReader(stream))
    for row, one in zip(worst, facts["worst"], strict=True):
        assert (row["image"], row["true"]) == (one["name"], NAMES[one["label"]])
        with Image.open(tmp_path / "e" / row["picture"]) as picture:
            assert picture.size == (60, 120), "enlarged by whole pixels"
            assert picture.getpixel((0, 0)) == (one["index"] % 251,) * 3
    for name in ("confusion.png", "worst.png"):
        with Image.open(tmp_path / "e" / name) as picture:
            assert min(picture.size) > 100
    assert [path.name for path in tmp_path.iterdir()] == ["e"], "nothing else is left"


def test_a_failure_leaves_the_earlier_evaluation(judged, tmp_path: Path):
    facts = judged[2]
    write_scores(tmp_path / "e", {"epoch": 1})

    def unreadable(index: int) -> torch.Tensor:
        raise OSError("gone")

    with pytest.raises(OSError, match="gone"):
        write_evaluation(tmp_path / "e", facts, unreadable)
    assert read_scores(tmp_path / "e") == {"epoch": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["e"]
    write_evaluation(tmp_path / "e", facts, image)
    write_scores(tmp_path / "e", {"epoch": 2})
    assert [path.name for path in (tmp_path / "e").iterdir()] == ["scores.json"], "pictures of another epoch are gone"


def test_a_full_disk_leaves_the_earlier_evaluation(judged, small_disk: Path):
    write_scores(small_disk / "e", {"epoch": 1})
    with pytest.raises(OSError, match="No space left"):
        write_evaluation(small_disk / "e", judged[2], lambda index: torch.randint(256, (3, 128, 128)).byte())
    assert read_scores(small_disk / "e") == {"epoch": 1}
    assert [path.name for path in small_disk.iterdir()] == ["e"]


def test_no_other_folder_is_replaced(tmp_path: Path):
    (tmp_path / "home").mkdir()
    check_replaceable(tmp_path / "home")
    (tmp_path / "home" / "thesis.tex").touch()
    for path in (tmp_path / "home", tmp_path / "home" / "thesis.tex"):
        with pytest.raises(UserError, match=re.escape(f"'{path}' exists and contains no evaluation")):
            write_scores(path, {})


def test_many_classes_get_a_table_of_pairs(tmp_path: Path):
    names = [f"class {number}" for number in range(1001)]
    recorder = OneLabel(len(names)).recorder()
    labels = torch.tensor([1000, 3])
    logits = torch.zeros(2, len(names))
    logits[:, 7] = 1.0
    recorder.add(logits, labels, torch.ones(2), torch.arange(2))
    facts = describe_scores(recorder.gather(ALONE), names, Source())
    write_evaluation(tmp_path / "e", facts, image)
    text = (tmp_path / "e" / "confusion.csv").read_text(encoding="utf-8")
    assert text.splitlines() == ["true,predicted,samples", "class 3,class 7,1", "class 1000,class 7,1"]
    assert not (tmp_path / "e" / "confusion.png").exists()
