"""How sure a score is, and whether two runs differ: against closed forms and drawing of images."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from made_runs import make_run, make_scores
from scipy.optimize import minimize_scalar
from scipy.special import xlogy
from sklearn.metrics import balanced_accuracy_score, confusion_matrix, f1_score

from tests.kit import ALONE
from zerovision.delivery.intervals import interval_of, of_classes, of_difference, wilson
from zerovision.delivery.report.page import compare, mcnemar, write_report
from zerovision.delivery.report.run_facts import key_figures
from zerovision.delivery.report.run_files import read_run
from zerovision.training.base.errors import UserError
from zerovision.training.data import DataOptions, load_data
from zerovision.training.observe.evaluation import describe_scores, judged_images
from zerovision.training.tasks.class_counts import ClassCounts
from zerovision.training.tasks.labels import OneLabel


class Classifier(NamedTuple):
    """A classifier whose mistakes are spread evenly over the other classes.

    Attributes:
        shares: of the images, by class.
        recalls: of the classes.
        images: of an evaluation.
    """

    name: str
    shares: list[int]
    recalls: list[float]
    images: int

    def chances(self) -> np.ndarray:
        """Return how likely an image is of each class (row) and predicted as each (column)."""
        shares, recalls = np.array(self.shares) / sum(self.shares), np.array(self.recalls)
        cells = np.outer(shares * (1 - recalls) / (len(shares) - 1), np.ones(len(shares)))
        cells[np.diag_indices_from(cells)] = shares * recalls
        return cells


def counts_of(cells: np.ndarray) -> ClassCounts:
    """Return the counts of one matrix of images by class (row) and prediction (column), or chances."""
    return ClassCounts(np.diagonal(cells), cells.sum(1), cells.sum(0))


@pytest.mark.parametrize(("hits", "samples"), [(972, 1000), (0, 7), (7, 7), (1, 2)])
def test_the_interval_of_a_share_is_wilsons(hits, samples):
    """Solutions p of |p - share| = z sqrt(p (1 - p) / samples), which is how Wilson 1927 defines it."""
    low, high = wilson(hits, samples)
    for end in (low, high):
        reach = 1.959963984540054 * math.sqrt(end * (1 - end) / samples)
        assert abs(end - hits / samples) == pytest.approx(reach, abs=1e-9)
    assert 0 <= low < high <= 1
    assert interval_of({"samples": samples, "top1": hits / samples}, "top1") == (low, high)
    assert wilson(0, 0) is None


def scores_of(cells: np.ndarray) -> dict:
    """The part of scores.json about images by class (row) and prediction (column)."""
    confusion = [[*map(int, cell), int(cells[tuple(cell)])] for cell in np.argwhere(cells)]
    return {"samples": int(cells.sum()), "classes": [{}] * len(cells), "confusion": confusion}


def test_of_many_images_the_interval_of_classes_is_that_of_drawn_images():
    random = np.random.default_rng(1)
    labels = random.choice(4, 4000, p=[0.6, 0.25, 0.1, 0.05])
    predictions = np.where(random.random(4000) < 0.7, labels, random.integers(0, 4, 4000))
    cells = confusion_matrix(labels, predictions)
    drawn = random.multinomial(4000, cells.ravel() / 4000, 2000).reshape(-1, 4, 4)
    right, support, said = drawn.diagonal(axis1=1, axis2=2), drawn.sum(2), drawn.sum(1)
    means = np.stack([(2 * right / (support + said)).mean(1), (right / support).mean(1)])
    expected = np.quantile(means, [0.025, 0.975], axis=1).T
    scores = scores_of(cells)
    found = [interval_of(scores, name) for name in ("macro_f1", "balanced_accuracy")]
    np.testing.assert_allclose(found, expected, atol=0.1 * np.diff(expected).min())
    assert found[0][0] < f1_score(labels, predictions, average="macro") < found[0][1]
    assert found[1][0] < balanced_accuracy_score(labels, predictions) < found[1][1]
    assert interval_of({"samples": 0}, "macro_f1") is None
    assert interval_of(scores | {"task": "multilabel"}, "macro_f1") is None


@pytest.mark.parametrize(
    "classifier",
    [
        Classifier("no mistakes in many evaluations", [1] * 2, [0.98] * 2, 50),
        Classifier("few classes", [1] * 3, [0.85] * 3, 30),
        Classifier("a small class", [9, 1], [0.9, 0.8], 100),
        Classifier("many small classes", [1] * 30, [0.8] * 30, 150),
    ],
    ids=lambda one: one.name,
)
def test_the_interval_of_classes_holds_95_percent(classifier):
    """Of 400 evaluations 94.3 % or more with a chance of 0.2 if it is 97, 92 with one of 0.004 if it is 95."""
    chances, held = classifier.chances(), np.zeros(2)
    names = ("macro_f1", "balanced_accuracy")
    truth = [getattr(counts_of(chances), name) for name in names]
    for drawn in np.random.default_rng(2).multinomial(classifier.images, chances.ravel(), 400):
        found = of_classes(scores_of(drawn.reshape(chances.shape)))
        held += [found[name][0] <= true <= found[name][1] for name, true in zip(names, truth, strict=True)]
    assert min(held / 400) >= 0.92


def test_without_a_mistake_the_interval_of_classes_is_that_of_a_share():
    """With equal classes: each image counts the same. Two classes share each mistake, so F1 is the share, too.

    It is a little longer: how much single images differ has to be told from them.
    """
    for cells in (np.diag([20, 20]), np.diag([30, 30, 30])):
        low, high = interval_of(scores_of(cells), "balanced_accuracy")
        expected, _ = wilson(len(cells) * cells[0, 0], len(cells) * cells[0, 0])
        assert (low, high) == (pytest.approx(expected, abs=0.01), 1.0)
    assert interval_of(scores_of(np.diag([20, 20])), "macro_f1")[0] == pytest.approx(wilson(40, 40)[0], abs=0.01)


@pytest.mark.parametrize(
    "cells", [[[9, 0], [0, 0]], [[0, 9], [0, 0]], [[1, 0], [0, 1]], [[5, 2, 0], [0, 0, 0], [1, 0, 3]]]
)
def test_the_interval_of_classes_has_the_score_in_it_whatever_is_missing(cells):
    scores = scores_of(np.array(cells))
    for name in ("macro_f1", "balanced_accuracy"):
        low, high = interval_of(scores, name)
        assert 0 <= low <= getattr(counts_of(np.array(cells)), name) <= high <= 1
        assert low < high


def test_the_interval_of_the_loss_is_that_of_a_mean():
    found = interval_of({"samples": 100, "loss": 0.5, "loss_standard_error": 0.1}, "loss")
    assert found == pytest.approx((0.5 - 0.1959964, 0.5 + 0.1959964))
    assert interval_of({"samples": 100, "loss": 0.5}, "loss") is None, "of an older version"
    assert interval_of({"samples": 100, "auroc": 0.5}, "auroc") is None


@pytest.mark.parametrize(
    ("alone", "other_alone", "images"), [(12, 2, 50), (2, 12, 50), (1, 0, 24), (0, 0, 360), (7, 7, 20)]
)
def test_the_interval_of_a_difference_is_tangos(alone, other_alone, images):
    """At its ends the score is 1.96 standard errors, with the chances that are likeliest for such a difference."""
    for end, sign in zip(of_difference(alone, other_alone, images), (1, -1), strict=True):

        def unlikely(other_chance, end=end):
            """Minus the likelihood, if that is how often the second share alone has an image."""
            chances = np.array([other_chance + end, other_chance, 1 - 2 * other_chance - end])
            return -xlogy([alone, other_alone, images - alone - other_alone], np.clip(chances, 0, 1)).sum()

        bounds = (max(0, -end), (1 - end) / 2)
        chance = minimize_scalar(unlikely, bounds=bounds, method="bounded", options={"xatol": 1e-12}).x
        spread = math.sqrt(images * (2 * chance + end * (1 - end)))
        assert (alone - other_alone - images * end) / spread == pytest.approx(sign * 1.96, abs=0.01)
    low, high = of_difference(alone, other_alone, images)
    assert of_difference(other_alone, alone, images) == (pytest.approx(-high), pytest.approx(-low))


@pytest.mark.parametrize(
    ("alone", "other_alone", "chance"),
    [(1, 9, 2 * (1 + 10) / 2**10), (9, 1, 2 * (1 + 10) / 2**10), (3, 3, 1.0), (0, 0, 1.0), (0, 6, 2 / 2**6)],
)
def test_mcnemars_test_is_exact(alone, other_alone, chance):
    right = np.array([True] * alone + [False] * other_alone + [True] * 20 + [False] * 5)
    other = np.array([False] * alone + [True] * other_alone + [True] * 20 + [False] * 5)
    assert mcnemar(right, other) == (alone, other_alone, pytest.approx(chance))


def judged_run(folder, right: str, images="0a"):
    run = make_run(folder)
    scores = make_scores(["cat", "dog", "cow"]) | ({"judged": {"images": images, "right": right}} if right else {})
    (run / "evaluation" / "scores.json").write_text(json.dumps(scores))
    return run


def test_a_report_of_several_runs_says_whether_they_differ(tmp_path):
    runs = [
        judged_run(tmp_path / "a", "1" * 30),
        judged_run(tmp_path / "b", "1" * 20 + "0" * 10),
        judged_run(tmp_path / "c", "1" * 29 + "0"),
        judged_run(tmp_path / "d", "1" * 30, images="0b"),
        judged_run(tmp_path / "e", ""),
    ]
    found = compare(runs)
    assert found == [
        "a and b differ: of 30 images, a alone is right on 10 and b alone on 0 (McNemar's exact test, p = 0.0020).",
        "a and c do not differ significantly: of 30 images, a alone is right on 1 and c alone on 0 "
        "(McNemar's exact test, p = 1.0).",
        "a and d are not compared: they were evaluated on different images.",
        "a and e are not compared: scripts/evaluate.py e writes which images it classifies correctly.",
    ]
    write_report(runs[:2], tmp_path / "both.html")
    assert "a and b differ: of 30 images" in (tmp_path / "both.html").read_text(encoding="utf-8")
    assert compare(runs[:1]) == []
    path = runs[1] / "evaluation" / "scores.json"
    path.write_text('{"judged": {"right": 7}}')
    with pytest.raises(UserError, match="is damaged"):
        compare(runs)


def test_key_figures_have_the_chosen_score_and_the_lowest_class(tmp_path):
    run = read_run(make_run(tmp_path / "run", best_by="macro_f1"))
    for line in run.history.epochs.values():
        line.update(best_by="macro_f1", score=0.625)
    figures = {figure.name: figure for figure in key_figures(run)}
    assert figures["macro F1"].value == "62.50\u202f%"
    assert figures["macro F1"].remark.startswith("95\u202f% interval [")
    assert figures["lowest recall"].value == "66.67\u202f%"
    assert figures["lowest recall"].remark.endswith("class cat, 3 images")


def test_images_are_known_by_their_names_below_the_folder_of_all():
    labels, right = torch.tensor([0, 1, 1]), torch.tensor([True, False, True])
    details = SimpleNamespace(indices=torch.arange(3), labels=labels, is_right=right)
    names, classes = ["a/x.png", "b/y.png", "b/z.png"], ["cat", "dog"]
    here, moved, other = (
        judged_images(details, [f"{root}/{name}" for name in files].__getitem__, classes)
        for root, files in (("/photos", names), ("/mnt/a/more", names), ("/photos", ["a/x.png", "b/y.png", "b/w.png"]))
    )
    assert here == moved
    assert (here["right"], here["images"] == other["images"]) == ("101", False)
    assert judged_images(details, [*names[:2], "/elsewhere/z.png"].__getitem__, classes)["images"] != here["images"]
    assert judged_images(details, names.__getitem__, ["apple", "pear"])["images"] != here["images"]
    details.labels = torch.tensor([0, 1, 0])
    assert judged_images(details, names.__getitem__, classes)["images"] != here["images"]


def test_images_in_memory_are_known_by_their_pixels_and_classes(tmp_path):
    draws, labels = np.random.default_rng(0), [0, 1] * 5
    images, others = (draws.integers(256, size=(10, 8, 8, 3), dtype=np.uint8) for _ in range(2))
    recorder = OneLabel(2).recorder()
    recorder.add(torch.eye(2)[labels], torch.tensor(labels), torch.ones(10), torch.arange(10))
    scores = recorder.gather(ALONE)

    def known(held_out, names=("cat", "dog"), train=images, class_names=(), **options):
        arrays = {"x_train": train, "y_train": labels, "x_test": held_out, "y_test": labels, "class_names": names}
        np.savez(tmp_path / "a.npz", **arrays)
        pair = load_data(DataOptions(data=f"npz:{tmp_path / 'a.npz'}", **options))
        return describe_scores(scores, class_names or pair.class_names, pair.val.source)["judged"]["images"]

    assert known(images) not in {known(images, ["apple", "pear"]), known(others)}
    assert known(images) == known(images, train=others) == known(images, image_channels=1), "the same held-out images"
    assert known(images) == known(images, class_names=["cat", "dog", "zebra"]), "a model that knows one more class"
