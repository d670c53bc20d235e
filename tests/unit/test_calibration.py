"""Calibration: the temperature against scipy's on plain PyTorch's loss, the threshold, and what knows them."""

from __future__ import annotations

import csv
import io
import json
import shutil
from pathlib import Path

import pytest
import torch
from scipy.optimize import minimize_scalar
from test_evaluate_predict import data, digit_folder, logits, run

from tests.kit import ALONE, call
from zerovision.delivery.calibration import HIGHEST_TEMPERATURE, calibration_file, read_calibration
from zerovision.delivery.export.export_model import export_model
from zerovision.delivery.fit_calibration import _fit_temperature, threshold_of
from zerovision.delivery.report.run_facts import key_figures
from zerovision.delivery.report.run_files import read_run
from zerovision.delivery.settings import ExportSettings
from zerovision.extras.serve import make_server
from zerovision.extras.settings import ServeSettings
from zerovision.training.base.errors import UserError
from zerovision.training.tasks.scores import SampleScores

__all__ = ["data", "digit_folder", "logits", "run"]  # fixtures


@pytest.fixture
def own_run(run, tmp_path) -> Path:
    """A copy of the run, that a test may calibrate."""
    folder = tmp_path / "digits"
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes((run / name).read_bytes())
    return folder


def details(confidences: list[float], is_right: list[int]) -> SampleScores:
    labels = 1 - torch.tensor(is_right)
    zeros = torch.zeros_like(labels)
    losses, sure = zeros.double(), torch.tensor(confidences).double()
    return SampleScores(zeros, labels, zeros, losses, sure, labels == zeros)


@pytest.mark.parametrize(
    ("reject", "confidences", "is_right", "expected"),
    [
        ("0.75", [0.9, 0.8, 0.7, 0.6], [1, 1, 0, 0], (0.8 + 0.7) / 2),
        ("0.5", [0.6, 0.9, 0.7, 0.8], [0, 1, 0, 1], 0.0),  # all have it: none is rejected
        ("0.6", [0.9, 0.8, 0.8, 0.7], [1, 0, 1, 0], (0.8 + 0.7) / 2),  # a tie goes together
        ("0.9", [0.9, 0.8, 0.7, 0.6], [0, 1, 1, 1], None),  # the surest is wrong
        ("below:0.7", [0.9], [0], 0.7),
    ],
)
def test_the_threshold_is_the_lowest_with_the_accuracy(reject, confidences, is_right, expected):
    if expected is None:
        with pytest.raises(UserError, match="best: 0\\.7500"):
            threshold_of(details(confidences, is_right), reject)
    else:
        assert threshold_of(details(confidences, is_right), reject) == pytest.approx(expected)


def test_the_temperature_is_scipys_and_predictions_are_calibrated(own_run, data, logits, digit_folder):
    labels = data.val.source.labels
    code, out, err = call("evaluate", own_run, "--reject", "0.3")
    assert (code, err) == (0, "")
    scores = json.loads((own_run / "evaluation" / "scores.json").read_text())
    found = read_calibration(own_run / "model.safetensors")

    def loss(inverse: float) -> float:
        return float(torch.nn.functional.cross_entropy(logits.double() * inverse, labels))

    best = minimize_scalar(loss, bounds=(0.05, 20), method="bounded", options={"xatol": 1e-9})
    assert found.temperature == pytest.approx(1 / best.x, rel=1e-4)
    facts = scores["rejection"]
    assert facts["loss"] == pytest.approx(best.fun, rel=1e-6)
    assert facts["loss"] < scores["loss"]
    assert (facts["ece_before"], facts["ece"]) == (scores["ece"], found.facts["ece"])
    probabilities, predictions = (logits / found.temperature).softmax(1).max(1)
    kept = probabilities >= found.threshold
    assert 0 < facts["coverage"] == float(kept.double().mean()) < 1
    assert facts["accuracy"] == float((predictions == labels)[kept].double().mean()) >= 0.3
    assert f"threshold {found.threshold:.4f}" in out

    code, out, _ = call("predict", own_run, digit_folder, "--format", "csv", "--top-k", 2)
    assert code == 0
    rows = list(csv.DictReader(io.StringIO(out)))
    for row in rows:
        index = int(Path(row["image"]).stem)
        assert float(row["probability"]) == pytest.approx(float(probabilities[index]), rel=1e-4)
        assert row["nearest"] == str(int(predictions[index]))
        assert row["label"] == (row["nearest"] if kept[index] else "none of these")
    assert {row["label"] == "none of these" for row in rows} == {True, False}
    lines = [json.loads(line) for line in call("predict", own_run, digit_folder, "--format", "json")[1].splitlines()]
    assert [line["label"] for line in lines] == [row["label"] for row in rows]
    assert "none of these" in call("predict", own_run, digit_folder)[1]


def test_a_calibration_belongs_to_its_weights_and_views(own_run, digit_folder):
    assert call("evaluate", own_run, "--reject", "below:0.5")[0] == 0
    weights = own_run / "model.safetensors"
    fitted = json.loads((own_run / "evaluation" / "scores.json").read_text())
    assert call("evaluate", own_run)[0] == 0, "a plain evaluation uses it"
    used = json.loads((own_run / "evaluation" / "scores.json").read_text())["rejection"]
    assert used == fitted["rejection"]
    code, _, err = call("predict", own_run, digit_folder, "--flip")
    assert (code, err.count("\n")) == (2, 1)
    assert "calibrated for plain, not for plain and mirrored images" in err
    known = read_calibration(weights)
    export_model(ExportSettings(model=str(own_run), format="safetensors"))
    assert json.loads((own_run / "export" / "calibration.json").read_text()) == known.facts
    assert any(fact.name == "calibration error, calibrated" for fact in key_figures(read_run(own_run)))
    file = calibration_file(weights)
    file.write_text(json.dumps(known.facts | {"temperature": 0}))
    assert call("predict", own_run, digit_folder)[0] == 2
    file.write_text(json.dumps(known.facts | {"weights_sha256": "0"}))
    code, out, err = call("predict", own_run, digit_folder)
    assert code == 0
    assert "belongs to other weights" in err
    assert "none of these" not in out
    assert read_run(own_run).calibration is None


def test_the_views_of_a_calibration_are_used_without_flags(own_run, digit_folder):
    """As with the flags; serve has none."""
    assert call("evaluate", own_run, "--reject", "below:0.5", "--flip")[0] == 0
    expected = call("predict", own_run, digit_folder, "--format", "json", "--flip")
    assert (expected[0], expected[2]) == (0, "")
    assert call("predict", own_run, digit_folder, "--format", "json") == expected
    assert "not for plain and images shifted by 1" in call("predict", own_run, digit_folder, "--shift-pixels", 1)[2]
    row = next(json.loads(line) for line in expected[1].splitlines())
    with make_server(ServeSettings(model=str(own_run), port=0)) as server:
        answer = server.answer(Path(row["image"]).read_bytes())
    assert answer["label"] == row["label"]
    assert answer["top"][0]["probability"] == pytest.approx(row["top"][0]["probability"], rel=1e-5)
    file = calibration_file(own_run / "model.safetensors")
    facts = json.loads(file.read_text())
    for damage in ({"shift_pixels": "x"}, {"shift_pixels": 99, "flip": False}):
        file.write_text(json.dumps(facts | damage))
        assert call("predict", own_run, digit_folder)[0] == 2


def test_the_calibration_next_to_an_exported_model_is_its_own(own_run, tmp_path):
    export = ("export", own_run, "--format", "safetensors", "--output", tmp_path / "e", "--max-accuracy-loss", "100")
    copy, file = tmp_path / "e" / "calibration.json", calibration_file(own_run / "model.safetensors")
    for threshold in ("below:0.5", "below:0.6"):
        assert call("evaluate", own_run, "--reject", threshold)[0] == 0
        assert call(*export)[0] == 0
        assert json.loads(copy.read_text()) == json.loads(file.read_text())
    of_another = json.dumps(json.loads(copy.read_text()) | {"weights_sha256": "0"})
    shutil.copyfile(file, tmp_path / "kept")
    copy.write_text(of_another)
    (exported,) = (tmp_path / "e").glob("*.safetensors")
    exported.rename(tmp_path / "moved")
    for _ in range(2):  # the second time, this model has no calibration
        code, out, err = call(*export)
        assert (code, out, err.count("\n"), copy.read_text()) == (2, "", 1, of_another)
        assert "belongs to other weights" in err
        file.unlink(missing_ok=True)
    (tmp_path / "moved").rename(exported)  # a calibration next to an earlier export of this model is of that one
    code, out, _ = call(*export)
    assert (code, "calibration.json" in out, copy.exists()) == (0, False, False)
    shutil.copyfile(tmp_path / "kept", file)
    copy.write_text(of_another)
    assert call(*export)[0] == 0
    assert json.loads(copy.read_text()) == json.loads(file.read_text())


def test_a_table_names_its_columns(run, digit_folder, tmp_path):
    files = sorted(digit_folder.rglob("*.png"))
    table = tmp_path / "list.csv"
    table.write_text("picture,digit\n" + "".join(f"{path},{path.parent.name}\n" for path in files))
    words = ("evaluate", run, "--data", table, "--output", tmp_path / "e")
    assert "has no column" in call(*words)[2]
    assert call(*words, "--path-column", "picture", "--label-column", "digit")[0] == 0
    assert json.loads((tmp_path / "e" / "scores.json").read_text())["samples"] == len(files)


def test_near_certain_models_are_not_made_more_so():
    labels = torch.arange(4)
    batch = (10 * torch.eye(4), labels, torch.ones(4), labels)
    assert _fit_temperature([batch], ALONE) == 1.0
    assert _fit_temperature([(-batch[0], *batch[1:])], ALONE) == HIGHEST_TEMPERATURE
