"""How sure a score is, and whether two runs differ: against closed forms and drawing of images."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from made_runs import make_run, make_scores
from sklearn.metrics import balanced_accuracy_score, confusion_matrix, f1_score

from delivery.intervals import bootstrap, interval_of, wilson
from delivery.report.comparison import compare, mcnemar
from delivery.report.page import write_report
from delivery.report.run_facts import key_figures
from delivery.report.run_files import read_run
from training.base.errors import UserError
from training.observe.evaluation import judged_images


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


def test_the_interval_of_classes_is_that_of_drawn_images():
    random = np.random.default_rng(1)
    labels = random.choice(4, 200, p=[0.6, 0.3, 0.08, 0.02])
    predictions = np.where(random.random(200) < 0.7, labels, random.integers(0, 4, 200))
    cells = confusion_matrix(labels, predictions, labels=range(4))
    scores = {
        "samples": 200,
        "classes": [{}] * 4,
        "confusion": [[*map(int, cell), int(cells[tuple(cell)])] for cell in np.argwhere(cells)],
    }
    drawn = []
    for _ in range(400):
        chosen = random.integers(0, 200, 200)
        true, said = labels[chosen], predictions[chosen]
        f1 = f1_score(true, said, labels=range(4), average="macro", zero_division=0)
        drawn.append((f1, np.mean([(said == one)[true == one].mean() for one in np.unique(true)])))
    expected = np.quantile(drawn, [0.025, 0.975], axis=0).T
    found = bootstrap(scores)
    np.testing.assert_allclose([found["macro_f1"], found["balanced_accuracy"]], expected, atol=0.03)
    assert found == bootstrap(scores), "seeded"
    low, high = found["balanced_accuracy"]
    assert low < balanced_accuracy_score(labels, predictions) < high
    assert bootstrap({"samples": 0}) == {"macro_f1": None, "balanced_accuracy": None}


def test_the_interval_of_the_loss_is_that_of_a_mean():
    found = interval_of({"samples": 100, "loss": 0.5, "loss_standard_error": 0.1}, "loss")
    assert found == pytest.approx((0.5 - 0.1959964, 0.5 + 0.1959964))
    assert interval_of({"samples": 100, "loss": 0.5}, "loss") is None, "of an older version"
    assert interval_of({"samples": 100, "auroc": 0.5}, "auroc") is None


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
        "a and c do not differ by more than chance explains: of 30 images, a alone is right on 1 and c alone on 0 "
        "(McNemar's exact test, p = 1.0).",
        "a and d are not compared: they were judged on different images.",
        "a and e are not compared: scripts/evaluate.py e writes on which images it is right.",
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
    names = ["a/x.png", "b/y.png", "b/z.png"]
    here, moved, other = (
        judged_images(details, [f"{root}/{name}" for name in files].__getitem__)
        for root, files in (("/photos", names), ("/mnt/a/more", names), ("/photos", ["a/x.png", "b/y.png", "b/w.png"]))
    )
    assert here == moved
    assert (here["right"], here["images"] == other["images"]) == ("101", False)
    assert judged_images(details, [*names[:2], "/elsewhere/z.png"].__getitem__)["images"] != here["images"]
    details.labels = torch.tensor([0, 1, 0])
    assert judged_images(details, names.__getitem__)["images"] != here["images"]
