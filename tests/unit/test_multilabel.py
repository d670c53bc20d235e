"""Several labels of an image: the data, the loss, scores against scikit-learn's, a training, and what is made of it."""

from __future__ import annotations

import csv
import io
import json
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from exports import held_out
from PIL import Image
from sklearn.metrics import average_precision_score, f1_score, precision_recall_curve, roc_auc_score
from test_evaluate_predict import ROOT

from tests.kit import ALONE, call, train
from zerovision.delivery.export.export_model import export_model
from zerovision.delivery.pack import pack
from zerovision.delivery.publish import write_model_card
from zerovision.delivery.report.page import write_report
from zerovision.delivery.settings import ExportSettings
from zerovision.extras.audit.audit import audit
from zerovision.extras.settings import AuditSettings
from zerovision.launch.node_launcher import local_ranks_command
from zerovision.planning.data_check import check_data, print_report
from zerovision.training.base.errors import UserError
from zerovision.training.checkpoint.weights import load_model, read_metadata
from zerovision.training.config import FLAG_OF, TrainConfig
from zerovision.training.config.check import check_config
from zerovision.training.data import DataOptions, load_data
from zerovision.training.data.loader import Loader
from zerovision.training.data.reader import Batch
from zerovision.training.data.sampler import EvaluationPlan
from zerovision.training.tasks.labels import build_loss
from zerovision.training.tasks.multilabel.labels import SeveralLabels, best_thresholds, several_loss
from zerovision.training.tasks.scores import ScoreSums
from zerovision.training.world.machine import free_port

COLOURS = ["red", "green", "blue"]
IMAGES = 90


@pytest.fixture(scope="module")
def tables(tmp_path_factory) -> dict[str, Path]:
    """The same images twice: a table with a column for each colour that is in the image, and one with lists."""
    folder = tmp_path_factory.mktemp("tables")
    random = np.random.default_rng(0)
    columns, lists = ["path,red,green,blue\n"], ["path,colours\n"]
    for number in range(IMAGES):
        has = random.random(3) < (0.5, 0.3, 0.6)
        pixels = random.integers(0, 60, (32, 32, 3)) + 150 * has
        Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{number:02}.png")
        columns.append(f"{number:02}.png,{','.join(str(int(one)) for one in has)}\n")
        lists.append(f"{number:02}.png,{' ; '.join(np.array(COLOURS)[has][::-1])}\n")
    (folder / "columns.csv").write_text("".join(columns))
    (folder / "lists.csv").write_text("".join(lists))
    return {"red,green,blue": folder / "columns.csv", "colours": folder / "lists.csv"}


def options(table: Path, column: str, **others) -> DataOptions:
    return DataOptions(data=str(table), label_column=column, task="multilabel", image_size=32, **others)


def test_columns_and_lists_give_the_same_targets(tables):
    truth = {row["path"]: row for row in csv.DictReader(tables["red,green,blue"].open())}
    held_out = []
    for column, table in tables.items():
        data = load_data(options(table, column))
        held_out.append({data.val.source.images.path(index) for index in range(len(data.val))})
        counts = np.zeros(3, dtype=int)
        for part in (data.train, data.val):
            for batch in Loader(part, EvaluationPlan(len(part), 16, 1), 0):
                for index, weight, target in zip(batch.indices.tolist(), batch.weights, batch.targets, strict=True):
                    expected = [float(truth[part.source.images.path(index)][name]) for name in data.class_names]
                    assert target.tolist() == expected
                    counts += int(weight) * np.array(expected, dtype=int)
        assert [a + b for a, b in zip(data.train_counts, data.val_counts, strict=True)] == counts.tolist()
        assert min(data.val_counts) > 0
        assert data.class_names == (COLOURS if "," in column else sorted(COLOURS))
    assert held_out[0] == held_out[1]


def test_the_usual_loss_and_score_are_replaced():
    config = check_config(TrainConfig(task="multilabel"), FLAG_OF)
    assert (config.loss, config.best_by) == ("bce", "map")


def test_the_loss_is_pytorchs():
    generator = torch.Generator().manual_seed(0)
    logits, targets = torch.randn(5, 4, generator=generator), (torch.rand(5, 4, generator=generator) < 0.4).float()
    config = check_config(TrainConfig(task="multilabel", label_smoothing=0.2), FLAG_OF)
    loss = build_loss(config, ["a", "b", "c", "d"], [1] * 4, logits.device, build=several_loss)
    batch = Batch(torch.empty(5), torch.zeros(5).long(), torch.ones(5), torch.arange(5), targets=targets)
    expected = torch.nn.BCEWithLogitsLoss(reduction="none")(logits, targets * 0.8 + 0.1).mean(1)
    torch.testing.assert_close(loss(logits, batch), expected)


@pytest.fixture(scope="module")
def judged():
    """(targets [200, 5], logits, scores); class 3 has no sample, all have class 4; ties, an image without a class."""
    generator = torch.Generator().manual_seed(1)
    sets = (torch.rand(16, 5, generator=generator) < 0.4).float()
    sets[:, 3], sets[:, 4], sets[0, :3] = 0, 1, 0
    labels = torch.randint(16, (200,), generator=generator)
    logits = (torch.randn(200, 5, generator=generator) + sets[labels]).mul(4).round().div(4) + torch.arange(5) / 100
    task, sums = SeveralLabels(5, sets=sets), ScoreSums(5, labels.device, sets)
    recorder = task.recorder()
    for part in torch.arange(200).flip(0).split(64):
        weights = torch.where(part == 7, 0.0, 1.0)
        batch = (logits[part], labels[part], weights)
        recorder.add(*batch, part)
        sums.add(task.sample_losses(*batch[:2]), *batch)
    kept = torch.arange(200) != 7
    return sets[labels][kept].numpy(), logits[kept], recorder.gather(ALONE), sums.reduce(ALONE)


def test_scores_are_scikit_learns(judged):
    targets, logits, scores, sums = judged
    probabilities = logits.sigmoid().numpy()
    own, both = [0, 1, 2, 4], [0, 1, 2]  # the classes that occur, and those that not all samples have, too
    expected = average_precision_score(targets[:, own], probabilities[:, own])
    assert scores.areas.map == pytest.approx(expected, rel=1e-14)
    assert scores.areas.auroc == pytest.approx(roc_auc_score(targets[:, both], probabilities[:, both]), rel=1e-14)
    predicted = probabilities >= scores.thresholds
    np.testing.assert_array_equal(scores.counts.f1, f1_score(targets, predicted, average=None, zero_division=0))
    expected = torch.nn.functional.binary_cross_entropy_with_logits(logits, torch.from_numpy(targets))
    assert scores.loss == pytest.approx(float(expected), rel=1e-6)
    first = logits.argmax(1)
    assert scores.top1 == sums.top1 == float(targets[np.arange(len(targets)), first].astype(np.float64).mean())
    assert (sums.samples, scores.samples, sums.top5) == (199, 199, scores.top5)


def test_thresholds_have_the_highest_f1(judged):
    targets, logits, scores, _ = judged
    probabilities = logits.sigmoid().numpy()
    for number in (0, 1, 2, 4):
        precision, recall, _ = precision_recall_curve(targets[:, number], probabilities[:, number])
        best = np.nanmax(2 * precision * recall / np.maximum(precision + recall, 1e-9))
        assert scores.counts.f1[number] == pytest.approx(best)
    assert scores.thresholds[3] == 0.5
    found = best_thresholds(np.array([[True], [True], [False]]), np.array([[0.9], [0.5], [0.25]], dtype=np.float32))
    assert found.tolist() == [0.375]


def test_images_are_held_out_by_their_rarest_class_even_if_no_two_have_the_same_labels(tables):
    names = "abcde"
    rows = [
        f"{number:02}.png,{';'.join(name for place, name in enumerate(names) if number >> place & 1)}\n"
        for number in range(2 ** len(names))
    ]
    table = tables["colours"].with_name("distinct.csv")
    table.write_text("".join(["path,labels\n", *rows]))
    data = load_data(options(table, "labels"))
    assert (data.class_names, len(data.label_names)) == ([*names], len(rows))
    assert min(*data.train_counts, *data.val_counts) > 0


def test_a_check_of_the_data_counts_the_images_of_each_class(tables, capsys):
    given = options(tables["colours"], "colours")
    data = load_data(given)
    print_report("photos", check_data(given, workers=0))
    printed = [line.replace("│", " ").split() for line in capsys.readouterr().out.splitlines()]
    counts = zip(data.class_names, data.train_counts, data.val_counts, strict=True)
    for name, *numbers in [*counts, ("all", len(data.train), len(data.val))]:
        assert [name, *(str(int(number)) for number in numbers)] in printed


def test_lists_cannot_be_packed(tables, tmp_path):
    said = "^--task multilabel: tar files have one label for each image: train on the table itself.$"
    with pytest.raises(UserError, match=said):
        pack(options(tables["colours"], "colours"), tmp_path / "tars", 10**6)
    assert not (tmp_path / "tars").exists()


@pytest.fixture(scope="module")
def run(tables, tmp_path_factory) -> Path:
    """A run with mixup."""
    data = {"data": str(tables["red,green,blue"]), "label_column": "red,green,blue", "task": "multilabel"}
    settings = {"image_size": 32, "epochs": 3, "batch_size": 16, "mixup": 0.2, "cache": "off"}
    return train(tmp_path_factory.mktemp("logs"), **data, **settings)


def test_a_run_is_judged_and_used(run, tables, tmp_path):
    weights = run / "model.safetensors"
    module, metadata = load_model(weights)
    thresholds = metadata["extra"]["thresholds"]
    scores = json.loads((run / "evaluation" / "scores.json").read_text())
    assert [one["threshold"] for one in scores["classes"]] == thresholds
    assert scores["map"] > 0.5
    data = load_data(options(tables["red,green,blue"], "red,green,blue"))
    images, labels = held_out(data)
    with torch.no_grad():
        probabilities = module(images).sigmoid().numpy()
    targets = data.sets.targets[labels].numpy()
    assert scores["map"] == pytest.approx(average_precision_score(targets, probabilities), abs=1e-6)
    f1 = f1_score(targets, probabilities >= thresholds, average=None)
    assert [one["f1"] for one in scores["classes"]] == pytest.approx(f1.tolist())

    code, out, err = call("evaluate", run)
    assert (code, err) == (0, "")
    assert "mAP" in out
    again = json.loads((run / "evaluation" / "scores.json").read_text())
    assert again["classes"] == scores["classes"]
    words = ["--data", str(tables["colours"]), "--label-column", "colours", "--split", "val", "--output"]
    assert call("evaluate", weights, *words, tmp_path / "one")[0] == 0
    one = json.loads((tmp_path / "one" / "scores.json").read_text())
    assert one["map"] == pytest.approx(scores["map"])
    command = local_ranks_command("auto", has_gpus=False)
    command += ["--nproc_per_node=3", f"--master_port={free_port()}", "scripts/evaluate.py", str(weights), *words]
    three = subprocess.run([*command, str(tmp_path / "three")], cwd=ROOT, capture_output=True, text=True)
    assert three.returncode == 0, three.stderr
    for name in ("scores.json", "per_class.csv"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "three" / name).read_bytes()
    for flag in (["--reject", "0.9"], ["--flip"]):
        code, _, err = call("evaluate", run, *flag)
        assert (code, err.count("\n")) == (2, 1)

    paths = [data.val.source.images.root / path for path in data.val.source.images.paths()]
    code, out, _ = call("predict", run, *paths, "--format", "csv", "--top-k", 1)
    rows = list(csv.DictReader(io.StringIO(out)))
    for row, own in zip(rows, probabilities, strict=True):
        expected = [name for name, share, least in zip(COLOURS, own, thresholds, strict=True) if share >= least]
        assert row["label"] == ";".join(expected)
        assert row["nearest"] == COLOURS[int(own.argmax())]
        highest = max([share for name, share in zip(COLOURS, own, strict=True) if name in expected] or own)
        assert float(row["probability"]) == pytest.approx(highest)
    lines = [json.loads(line) for line in call("predict", run, *paths, "--format", "json")[1].splitlines()]
    assert [";".join(line["labels"]) for line in lines] == [row["label"] for row in rows]
    for line in map(str.split, call("predict", run, *paths, "--top-k", 3)[1].splitlines()[1:]):
        labels, then = line[1].split(";"), {word for word in line[3:] if word in COLOURS}
        assert then == {*COLOURS} - {*labels}, "each class once"
    call("predict", run, *paths, "--format", "csv", "--output", tmp_path / "given_back.csv")
    back = load_data(options(tmp_path / "given_back.csv", "label"))
    assert sorted(back.class_names) == sorted({name for line in lines for name in line["labels"]})

    card = write_model_card(run).read_text()
    assert f"`red` {thresholds[0]:.4f}" in card
    write_report([run], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "mAP" in page
    assert 'id="confusion"' not in page
    exported = export_model(ExportSettings(model=str(run), format="torch-export", output=str(tmp_path / "export")))
    assert exported.agreement.model_top1 == pytest.approx(scores["top1"])
    about = json.loads((tmp_path / "export" / "preprocessing.json").read_text())
    assert about["output"]["thresholds"] == read_metadata(weights)["extra"]["thresholds"]


def test_an_audit_of_a_run_has_all_labels_of_each_image(run, tables, tmp_path, capsys):
    rows = list(csv.reader(tables["red,green,blue"].open()))
    first, other = rows[1], ["copy.png", *("01"[value == "0"] for value in rows[1][1:])]
    same = ["same.png", *first[1:]]
    for row in rows[1:]:
        shutil.copy(tables["colours"].with_name(row[0]), tmp_path)
    for name in (other[0], same[0]):
        shutil.copy(tmp_path / first[0], tmp_path / name)
    table = tmp_path / "list.csv"
    table.write_text("".join(f"{','.join(row)}\n" for row in [*rows, other, same]))
    audit(AuditSettings(data=str(table), run=str(run), output=str(tmp_path / "audit")))
    findings = json.loads((tmp_path / "audit" / "audit.json").read_text())["findings"]
    conflicts = [{Path(one[key]).name for key in ("image", "copy_of")} for one in findings if one["kind"] == "conflict"]
    assert {other[0], first[0]} in conflicts or {other[0], same[0]} in conflicts
    assert {first[0], same[0]} not in conflicts
    assert "fixed.csv --task multilabel" in capsys.readouterr().out
    fixed = load_data(DataOptions(data=str(tmp_path / "audit" / "fixed.csv"), task="multilabel"))
    assert {name for label in fixed.label_names for name in label.split(";") if name} == set(COLOURS)
