"""Tables of images: the same training as from a folder of them; weights, groups, and crafted ones."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.unit.exports import save_new_run
from tests.unit.made_data import KINDS, SPLIT, make_photos, write_csv
from zerovision.delivery.evaluate import evaluate
from zerovision.delivery.predict import Prediction, write_predictions
from zerovision.planning.data_check import check_data
from zerovision.training.base.errors import UserError
from zerovision.training.base.files import as_given, inert
from zerovision.training.data import DataOptions, find_dataset, list_images, load_data
from zerovision.training.data.division import parts_there
from zerovision.training.data.loader import Loader
from zerovision.training.data.reading.decode import decode
from zerovision.training.data.sampler import BatchPlan
from zerovision.training.tasks.labels import build_loss
from zerovision.training.tasks.settings import TaskSettings

DATA_PAGE = Path(__file__).resolve().parents[2] / "docs" / "guides" / "tables-and-labels.md"


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    return make_photos(tmp_path_factory.mktemp("data") / "photos")


@pytest.fixture(scope="module")
def divided(tmp_path_factory):
    root = tmp_path_factory.mktemp("data") / "divided"
    for part, count in (("train", 9), ("val", 5), ("test", 3)):
        make_photos(root / part, count)
    return root


def load(data: Path, **values):
    return load_data(DataOptions(data=str(data), image_size=16, **values))


def seen(dataset):
    """All that a training sees of a set: of each image path, label, size, digest, and pixels; in order."""
    source, images = dataset.source, dataset.source.images
    source.digests = {}
    pixels = [source.read(index) for index in range(len(dataset))]
    sizes, digests = images["size"].tolist(), source.digests.values()
    return list(zip(images.paths(), source.labels.tolist(), sizes, digests, strict=True)), pixels


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["photos", "divided"])
def test_a_folder_and_what_lists_its_images_are_the_same_data(request, tmp_path, layout, kind):
    root = request.getfixturevalue(layout)
    data = KINDS[kind](root, tmp_path / "data")
    folder, other = load(root, **SPLIT), load(data, **SPLIT, data_root=str(root))
    assert (other.class_names, other.fingerprint) == (folder.class_names, folder.fingerprint)
    assert folder.parts.keys() == other.parts.keys()
    for part in folder.parts:
        (facts, pixels), (others, other_pixels) = seen(folder.parts[part]), seen(other.parts[part])
        assert others == facts
        assert all(map(torch.equal, pixels, other_pixels))
    options = DataOptions(data=str(data), data_root=str(root))
    assert (len(parts_there(list_images(options))) > 1) is (layout == "divided" or kind == "tar")
    assert len(load_data(options, "all").val) == sum(map(len, folder.parts.values()))


def test_paths_are_those_of_the_table_absolute_or_of_the_data_root(photos, tmp_path):
    folder = load(photos)
    rows = [{"image": str(path), "label": path.parent.name} for path in photos.rglob("*.*")]
    absolute = tmp_path / "list.csv"
    predictions = (Prediction(row["image"], [row["label"], "other"], [0.9, 0.1]) for row in rows)
    assert write_predictions(predictions, "csv", str(absolute), 2) == 0
    assert load(absolute, data_root=str(photos)).fingerprint == folder.fingerprint
    pair = load(absolute)
    assert pair.notes[:2] == [
        "columns that are not used: 'probability', 'label_2', 'probability_2'",
        f"36 of 36 images are outside '{tmp_path}', such as '{rows[0]['image']}'",
    ]
    relative = [{"image": os.path.relpath(row["image"], photos), "label": row["label"]} for row in rows]
    beside = write_csv(photos.parent / "list.csv", [row | {"image": f"photos/./{row['image']}"} for row in relative])
    assert load(beside).val.source.name(0) == folder.val.source.name(0)


@pytest.fixture(scope="module")
def run(photos, tmp_path_factory):
    return save_new_run(tmp_path_factory.mktemp("runs") / "run", load(photos, **SPLIT), **SPLIT)


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_and_the_check_of_data_take_every_kind(run, photos, tmp_path, kind):
    data = KINDS[kind](photos, tmp_path / "data")
    values = {"split": "val", "data_root": str(photos), "verbose": False}
    evaluated = [
        evaluate(run, data=str(path), output=tmp_path / f"{path.name}-scores", **values) for path in (photos, data)
    ]
    for scores in evaluated:
        assert Path(scores.pop("data")) in (photos, data)
        for listed in (scores["worst"], scores["typical"]):
            assert [str(one.pop("name")).rpartition("/")[2] for one in listed]
        assert scores["judged"].pop("images")  # a hash of the names
    assert evaluated[0] == evaluated[1]
    report = check_data(DataOptions(data=str(data), data_root=str(photos)))
    assert (report.images, report.unreadable, len(report.sizes)) == (36, [], 2)


@pytest.mark.parametrize("cell", ["=1+1.jpg", "'quoted", "plain", "-5"])
def test_what_a_list_of_predictions_guards_is_read_as_it_was(cell):
    assert as_given(inert([cell])[0]) == cell


def test_groups_are_in_one_part_and_each_class_has_its_share(photos, tmp_path):
    paths = sorted(photos.rglob("*.*"))
    rows = [
        {"path": str(path), "label": path.parent.name, "group": f"{path.parent.name}-{number % 6}"}
        for number, path in enumerate(paths)
    ]
    group_of = {row["path"]: row["group"] for row in rows}
    pair = load(write_csv(tmp_path / "list.csv", rows), val_fraction=0.34)
    groups = [{group_of[part.source.name(index)] for index in range(len(part))} for part in (pair.train, pair.val)]
    assert not groups[0] & groups[1]
    assert groups[0] | groups[1] == {row["group"] for row in rows}
    assert all(2 <= count <= 6 for count in pair.val_counts)
    folds = [load(tmp_path / "list.csv", folds=3, fold=fold).val for fold in (1, 2, 3)]
    held_out = [{group_of[part.source.name(index)] for index in range(len(part))} for part in folds]
    assert sorted(group for part in held_out for group in part) == sorted({row["group"] for row in rows})
    halves = [row | {"split": "val" if number % 2 else "train"} for number, row in enumerate(rows)]
    halves[1]["group"] = halves[0]["group"]
    with pytest.raises(UserError, match=r"the group '\w+-\d' is in (train and in val|val and in train)"):
        load(write_csv(tmp_path / "list.csv", halves))


def test_folds_are_chosen_and_other_separators_are_read(photos, tmp_path):
    paths = sorted(photos.rglob("*.*"))
    lines = [f"{path};{path.parent.name};fold{number % 3}" for number, path in enumerate(paths)]
    table = tmp_path / "list.CSV"
    table.write_bytes("\r\n".join(["\ufeffpath;label;split", *lines]).encode())  # as Excel saves it in Europe
    values = {"data_root": str(photos)}
    pair = load(table, val_part="fold1", **values)
    names = {pair.val.source.name(index) for index in range(len(pair.val))}
    assert names == {str(path) for number, path in enumerate(paths) if number % 3 == 1}
    assert 5 <= len(load(table, val_part="none", **values).val) <= 9, "a fifth of each class"
    table.with_suffix(".tsv").write_text("\n".join(["path;label;split", *lines]).replace(";", "\t"))
    assert load(table.with_suffix(".tsv"), val_part="fold1", **values).fingerprint == pair.fingerprint


@pytest.mark.parametrize("kind", KINDS)
def test_folds_list_the_images_once(photos, tmp_path, monkeypatch, kind):
    data = KINDS[kind](photos, tmp_path / "data")
    module, listed = importlib.import_module(find_dataset(str(data)).module, "zerovision.training.data"), []
    listing = module.listing
    monkeypatch.setattr(module, "listing", lambda given: (listed.append(given), listing(given))[1])
    load(data, data_root=str(photos), val_part="none", folds=3)
    assert len(listed) == 1


def test_the_documented_script_crops_the_boxes_of_a_table(tmp_path):
    blocks = DATA_PAGE.read_text().split("```python\n")[1:]
    script = next(block for block in blocks if "boxes.csv" in block).split("```")[0]
    levels = np.random.Generator(np.random.PCG64(0)).integers(0, 256, (12, 48, 64, 3), dtype=np.uint8)
    rows = []
    for number, image in enumerate(levels):
        Image.fromarray(image).save(tmp_path / f"{number}.png")
        for box in range(3):
            edges = dict(zip(("x0", "y0", "x1", "y1"), (10 * box, 5, 10 * box + 10, 20), strict=True))
            rows.append({"path": f"{number}.png", "label": f"c{box % 2}", **edges})
    write_csv(tmp_path / "boxes.csv", rows)
    subprocess.run([sys.executable, "-c", script], cwd=tmp_path, check=True)
    pair = load(tmp_path / "crops.csv")
    sides = []
    for part in (pair.train, pair.val):
        sides.append(set())
        for index in range(len(part)):
            photo, box = divmod(int(Path(part.source.images.path(index)).stem), 3)
            np.testing.assert_array_equal(
                part.source.read(index).permute(1, 2, 0), levels[photo, 5:20, 10 * box : 10 * box + 10]
            )
            sides[-1].add(photo)
    assert not sides[0] & sides[1]
    assert len(pair.train) + len(pair.val) == 36


def test_weights_multiply_the_losses_and_are_1_on_average(photos, tmp_path):
    paths = sorted(photos.rglob("*.*"))
    rows = [
        {"path": str(path), "label": path.parent.name, "split": ("train", "val")[number % 2], "weight": number % 4}
        for number, path in enumerate(paths)
    ]
    given = {row["path"]: row["weight"] for row in rows}
    pair = load(write_csv(tmp_path / "list.csv", rows))
    loader = Loader(pair.train, BatchPlan(len(pair.train), 6, 1, 1, 0), 0)
    batches = [*loader]
    weights = torch.cat([batch.loss_weights for batch in batches])
    own = [given[pair.train.source.name(index)] for batch in batches for index in batch.indices.tolist()]
    torch.testing.assert_close(weights, torch.tensor(own) / np.mean(own), check_dtype=False)
    loss = build_loss(TaskSettings(label_smoothing=0), pair.class_names, pair.train_counts, torch.device("cpu"))
    logits = torch.randn(6, 3)
    expected = torch.nn.functional.cross_entropy(logits, batches[0].labels, reduction="none") * batches[0].loss_weights
    torch.testing.assert_close(loss(logits, batches[0]), expected)


CRAFTED = {  # others are in tests/references/errors.txt
    "path,label\na.png,x\n\0,y\n": "1 image of 2, such as",
    "path,label\na.png," + "x" * 200_000: "line 2: field larger than field limit (131072)",
    "path,label\na.png,\udcff": "the table is not encoded as UTF-8",
}


@pytest.mark.parametrize(("text", "words"), CRAFTED.items(), ids=[repr(text)[:50] for text in CRAFTED])
def test_a_crafted_table_gets_one_line(tmp_path, text, words):
    for name in ("a.png", "b.png"):
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    table = tmp_path / "list.csv"
    table.write_bytes(text.encode("utf-8", "surrogateescape"))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    with pytest.raises(UserError) as problem:
        load(table)
    assert words in str(problem.value)
    assert len(str(problem.value)) < 600
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == before


def test_quoted_cells_and_classes_of_two_unicode_forms(tmp_path):
    names = ["a,b.png", 'c"d.png', "e\nf.png", "=g.png"]
    for name in names:
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    classes = ["caf\u00e9", "cafe\u0301", "tea", "tea"]
    rows = [{"path": name, "label": label} for name, label in zip(names, classes, strict=True)]
    pair = load(write_csv(tmp_path / "list.csv", rows))
    counts = defaultdict(int)
    for part in (pair.train, pair.val):
        for label in part.source.labels.tolist():
            counts[pair.class_names[label]] += 1
    assert sorted(counts.values()) == [2, 2]
    assert not np.any(decode((tmp_path / names[0]).read_bytes()))
