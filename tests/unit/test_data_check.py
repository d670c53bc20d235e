"""The check of a whole data set with the command that calls it, and images that are there twice."""

from __future__ import annotations

import csv
import gzip
import json
import os
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
from made_data import save_animation
from PIL import Image

from tests import kit
from tests.kit import call
from tests.training.commands import read_metrics
from zerovision.delivery.evaluate import evaluate
from zerovision.delivery.evaluation_files import leave_files
from zerovision.planning.data_check import check_data, equal_images, lines_of
from zerovision.training.base.errors import UserError
from zerovision.training.data import DataOptions, load_data
from zerovision.training.data.image_list import (
    ListedImage,
    TrainedImages,
    describe_change,
    list_images,
    read_image_list,
)
from zerovision.training.data.loader import Loader
from zerovision.training.data.sampler import BatchPlan


@pytest.fixture
def folder(tmp_path):
    generator = np.random.Generator(np.random.PCG64(0))
    for name, sizes in (("a", [(10, 20), (30, 5), (8, 8)]), ("[b]", [(50, 40), (9, 9)])):
        (tmp_path / name).mkdir()
        for number, (width, height) in enumerate(sizes):
            pixels = generator.integers(0, 256, (height, width, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / name / f"{number}.png")
    return tmp_path


@pytest.mark.parametrize("workers", [0, 1])
def test_every_image_is_decoded_and_measured(folder, workers):
    (folder / "a" / "cut.jpg").write_bytes((folder / "a" / "0.png").read_bytes()[:200])
    (folder / "[b]" / "text.jpg").write_text("text")
    save_animation(folder / "a" / "0.png", (9, 9))
    report = check_data(DataOptions(data=str(folder)), workers=workers)
    assert report.images == 7
    assert report.datasets.class_names == ["[b]", "a"]
    assert report.sizes == [(8, 8), (50, 40)]
    assert {path for path, _ in report.unreadable} == {str(folder / "a" / "cut.jpg"), str(folder / "[b]" / "text.jpg")}
    assert all(reason for _, reason in report.unreadable)
    assert report.image_notes == [(str(folder / "a" / "0.png"), "several frames or pages: the first is used")]


def test_thin_images_are_named(folder):
    for size in ((2, 40), (2, 41), (41, 2)):
        Image.new("RGB", size).save(folder / "a" / f"{size[0]}x{size[1]}.png")
    report = check_data(DataOptions(data=str(folder)))
    expected = {str(folder / "a" / f"{size}.png"): f"{size} pixels, thinner than 1:20" for size in ("2x41", "41x2")}
    assert dict(report.image_notes) == expected


def test_doctor_reports_a_good_data_set():
    code, printed, errors = call("doctor", "--check-data", "digits")
    assert (code, errors) == (0, "")
    assert "digits: 10 classes" in printed
    assert "smallest image 32x32, largest 32x32 pixels" in printed
    assert "0 of 1797 images cannot be used" in printed


def test_doctor_names_what_is_unreadable(folder):
    (folder / "a" / "text.jpg").write_text("text")
    os.mkfifo(folder / "a" / "pipe.jpg")
    save_animation(folder / "a" / "0.png", (9, 9))
    code, printed, errors = call("doctor", "--check-data", folder)
    assert (code, errors) == (1, "")
    assert f"unreadable: '{folder}/a/text.jpg': not an image" in printed
    assert f"note on '{folder}/a/0.png': several frames" in printed
    assert "skipped 1 file with an unsupported type or extension: 1 not a regular file" in printed
    assert "[b]" in printed


def test_doctor_escapes_names_that_no_terminal_may_get(folder):
    """In every line, also in those on identical images; Python cannot encode a name that is not UTF-8."""
    content = (folder / "a" / "0.png").read_bytes()
    for name in (b"caf\xe9.png", b"two\nlines.png"):
        Path(os.fsdecode(os.fsencode(folder / "a") + b"/" + name)).write_bytes(content)
    code, printed, errors = call("doctor", "--check-data", folder, "--val-fraction", "0.1")
    assert (code, errors) == (0, "")
    (line,) = [line for line in printed.splitlines() if "caf" in line]
    assert {r"caf\udce9.png", r"two\nlines.png"} <= {*re.findall(r"/a/([^/]*\.png)", line)}


CLASSES = ("a", "b")


def make_images(root: Path, count: int, seed: int = 0) -> Path:
    generator = np.random.Generator(np.random.PCG64(seed))
    for label, name in enumerate(CLASSES):
        (root / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            pixels = generator.integers(0, 128, (12, 12, 3), dtype=np.uint8) + 127 * label
            Image.fromarray(pixels.astype(np.uint8)).save(root / name / f"{number}.png")
    return root


def train(data: Path, logs: Path, name: str = "r", **changes) -> Path:
    settings = {"data": str(data), "image_size": 8, "batch_size": 4, "cache": "off", "report": True}
    return kit.train(logs, name, None, leave_files, **settings | changes)


@pytest.fixture
def copies(tmp_path) -> Path:
    """Three parts, with one validation and two test images that are training images, and one of the other label."""
    for seed, part in enumerate(("train", "val", "test")):
        make_images(tmp_path / "d" / part, 6, seed)
    for source, copy in (
        ("train/a/0.png", "val/a/copy.png"),
        ("train/a/1.png", "test/a/1.png"),
        ("train/b/2.png", "test/a/of b.png"),
        ("train/a/3.png", "train/a/3 (1).png"),
    ):
        shutil.copyfile(tmp_path / "d" / source, tmp_path / "d" / copy)
    return tmp_path / "d"


@pytest.mark.parametrize("workers", [0, 1])
def test_the_doctor_counts_and_names_equal_images(copies, workers):
    report = check_data(DataOptions(data=str(copies)), workers)
    found = equal_images(report.datasets, report.digests)
    assert {kind: equal.images for kind, equal in found.items()} == {"leaked": 3, "mislabelled": 1, "repeated": 1}
    pairs = {
        kind: [tuple(os.path.relpath(path, copies) for path in pair) for pair in equal.examples]
        for kind, equal in found.items()
    }
    assert ("val/a/copy.png", "train/a/0.png") in pairs["leaked"]
    assert pairs["mislabelled"] == [("test/a/of b.png", "train/b/2.png")]
    assert {"3 validation", "1 images", "1 training"} == {" ".join(line.split()[:2]) for line in lines_of(found)}


def test_every_digest_is_that_of_the_file_whatever_reads_it(tmp_path):
    make_images(tmp_path / "train", 5)
    make_images(tmp_path / "val", 2, seed=1)
    shutil.copyfile(tmp_path / "train/a/0.png", tmp_path / "train/b/twin.png")
    options = {"data": str(tmp_path), "image_size": 8, "data_root": str(tmp_path / "root")}
    seen = []
    for cache in ("off", "disk", "disk"):  # the second time from the cache, which reads no file
        pair = load_data(DataOptions(**options, cache=cache))
        loader = Loader(pair.train, BatchPlan(len(pair.train), 4, 1, 1, 0), 0)
        loader.watch()
        list(loader.epoch(0))
        seen.append(loader.digests)
        loader.watch(is_on=False)
        list(loader.epoch(1))
        assert loader.digests is None
    assert all((one == seen[0]).all() for one in seen)
    assert (seen[0] > 0).all()
    assert len(set(seen[0].tolist())) == 10


def test_training_judges_the_test_part_once(copies, tmp_path, capsys):
    folder, log = train(copies, tmp_path / "logs", resume="auto"), capsys.readouterr().out
    assert "run r has no checkpoint: starting from the beginning" in log
    assert "training on train/; val/ is the validation part; test/ is evaluated once, after training" in log
    (test,) = read_metrics(folder, "test")
    scores = json.loads((folder / "evaluation-test/scores.json").read_text())
    again = evaluate(folder, split="test", output=None)
    for key in ("samples", "top1", "loss"):
        assert test[key] == scores[key] == again[key]
    assert scores["samples"] == 13
    assert json.loads((folder / "evaluation/scores.json").read_text())["samples"] == 13
    assert (folder / "evaluation-test/per_class.csv").is_file()
    card, page = ((folder / name).read_text() for name in ("README.md", "report.html"))
    assert "On the 13 images of the test part" in card
    assert card.count("split: test") == card.count("split: val") == 1
    assert "test top-1 accuracy" in page
    train(copies, tmp_path / "logs", resume="auto")
    again = capsys.readouterr().out.split("resuming from")[1]
    assert ": all epochs are trained\n" in again
    assert "of the test part" not in again  # it was judged already


def test_a_score_that_the_test_part_does_not_have_is_left_out(copies, tmp_path, capsys):
    shutil.rmtree(copies / "test" / "b")
    folder = train(copies, tmp_path / "logs", best_by="auroc")
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "of the test part" in line)
    assert re.search(r"top-1 [0-9.]+ % on the [0-9]+ images of the test part", line)
    assert "auroc" not in read_metrics(folder, "test")[0]
    assert "NaN" not in (folder / "evaluation-test/scores.json").read_text()


def test_the_test_scores_of_earlier_weights_of_the_same_epoch_do_not_stay(copies, tmp_path):
    """As of a run that has gone back, and whose best epoch is the same one again."""
    folder = train(copies, tmp_path / "logs", best_by="loss", resume="auto")
    file = folder / "evaluation-test/scores.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"epoch": 2, "top1": 0.125, "loss": 9.0}))
    train(copies, tmp_path / "logs", best_by="loss", resume="auto", epochs=2)
    scores, expected = json.loads(file.read_text()), evaluate(folder, split="test", output=None)
    for key in ("epoch", "samples", "top1", "loss", "confusion"):
        assert scores[key] == expected[key]
    assert scores["epoch"] == 2
    assert "12.50 %" not in (folder / "README.md").read_text()
    assert not [*folder.glob(".evaluation*")]


def test_the_list_of_images_has_every_file_and_its_content(copies, tmp_path):
    (copies / "train/a/4.png").rename(copies / "train/a/new\r\nline, é.png")
    train(copies, tmp_path / "logs")
    file = tmp_path / "logs/runs/r/images.csv.gz"
    pair = load_data(DataOptions(data=str(copies), image_size=8))
    listed = read_image_list(file)
    assert [(one.part, one.path, one.size) for one in listed] == [
        (part, path, (copies / path).stat().st_size)
        for part, set_ in pair.parts.items()
        for path in (set_.source.images.path(index) for index in range(len(set_)))
    ]
    assert all((one.digest > 0) == (one.part != "test") for one in listed)
    with gzip.open(file, "rt", newline="") as stream:
        assert len(list(csv.reader(stream))) == 1 + 13 + 13 + 13


def test_images_that_were_trained_on_are_scored_apart(tmp_path):
    """A run without a test part tells none."""
    data = make_images(tmp_path / "d", 20)
    train(data, tmp_path / "logs", epochs=2)
    folder = tmp_path / "logs/runs/r"
    assert not (folder / "evaluation-test").exists()
    assert "test part" not in (folder / "README.md").read_text()
    assert "test top-1" not in (folder / "report.html").read_text()
    own = evaluate(folder)
    pair = load_data(DataOptions(data=str(data), image_size=8))
    assert own["samples"] == len(pair.val)
    assert "trained_on" not in own
    trained = pair.train.source.images.path(0)
    shutil.copyfile(data / trained, data / "a" / "renamed copy.png")
    make_images(tmp_path / "more", 2, seed=7)
    (tmp_path / "more/b/0.png").rename(data / "b" / "fresh.png")
    moved = shutil.copytree(data, tmp_path / "moved")
    for place in ("", moved):  # in its own place, and elsewhere
        scores = evaluate(folder, place)
        now = load_data(DataOptions(data=str(data), image_size=8))
        judged = {now.val.source.images.path(index) for index in range(len(now.val))} if not place else None
        known = {pair.train.source.images.path(index) for index in range(len(pair.train))} | {"a/renamed copy.png"}
        total = len(judged) if judged else 42
        among = len(known & judged) if judged else 31
        assert scores.get("trained_on", {"samples": 0})["samples"] == among
        assert scores["samples"] == total - among
    everything = evaluate(folder, moved, split="train", output=None)
    assert everything["trained_on"]["samples"] == everything["samples"] == len(now.train)  # all of them


def test_images_that_were_all_trained_on_are_scored_like_others(tmp_path):
    """Their views and rejected images, too; a file of weights alone does not tell which images were trained on."""
    data = make_images(tmp_path / "d", 20)
    train(data, tmp_path / "logs", epochs=2)
    folder, flipped = tmp_path / "logs/runs/r", {"flip": True, "output": None}
    with pytest.raises(UserError, match="--reject: the model was trained on all of these images: use --data to choose"):
        evaluate(folder, split="train", reject="below:0.5", **flipped)
    evaluate(folder, split="val", reject="below:0.5", **flipped)
    alone = tmp_path / "alone"
    alone.mkdir()
    for file in ("model.safetensors", "model.calibration.json"):
        shutil.copyfile(folder / file, alone / file)
    known = evaluate(folder, split="train", **flipped)
    unknown = evaluate(alone / "model.safetensors", data, split="train", **flipped)
    assert known["trained_on"]["samples"] == unknown["samples"] == 30
    assert "trained_on" not in unknown
    for key in ("samples", "top1", "loss", "views", "rejection"):
        assert known[key] == unknown[key], key
    assert known["rejection"]["coverage"] > 0


def test_a_folder_that_changed_says_how(tmp_path):
    data = make_images(tmp_path / "d", 8)
    before = list_images(load_data(DataOptions(data=str(data))))
    (data / "a/0.png").unlink()
    (data / "b/new.png").write_bytes((data / "b/1.png").read_bytes())
    (data / "b/1.png").write_bytes((data / "b/1.png").read_bytes() + b"more")
    text = describe_change(before, load_data(DataOptions(data=str(data))))
    assert text.startswith("16 images then, 16 now; 1 new: b/new.png; 1 gone: a/0.png; 1 changed: b/1.png")


def test_a_resume_with_other_data_names_the_difference_and_the_cure(tmp_path, capsys):
    data = make_images(tmp_path / "d", 8)
    train(data, tmp_path / "logs")
    shutil.copyfile(data / "a/0.png", data / "a/more.png")
    train(data, tmp_path / "logs", epochs=2, resume="auto", code=2)
    error = capsys.readouterr().err
    assert "another data set: 16 images then, 17 now; 1 new: a/more.png" in error
    assert "--weights" in error
    assert error.count("\n") == 1


def test_what_was_trained_on_is_known_by_content_or_else_by_path():
    images = [
        ListedImage("train", "a", 1, 5, "a/0.png"),
        ListedImage("train", "a", 1, 0, "a/1.png"),
        ListedImage("val", "a", 1, 6, "a/2.png"),
    ]
    paths = ["x", "a/0.png", "a/1.png", "a/2.png"]
    found = TrainedImages(images).contain(np.array([5, 7, 8, 6]), paths)
    assert found.tolist() == [True, False, True, False]
    assert not TrainedImages(images[2:])
