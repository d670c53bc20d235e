"""Audits of data against mistakes that were put in."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from exports import save_run
from PIL import Image, ImageDraw, ImageEnhance, ImageOps
from sklearn.datasets import load_digits
from sklearn.neighbors import KNeighborsClassifier

from tests.kit import ALONE
from zerovision.extras.audit.audit import audit, neighbours_score
from zerovision.extras.audit.catalogue import embeddings
from zerovision.extras.audit.copies import REPORTED, SIDE, Copy, find_copies
from zerovision.extras.audit.findings import Fix, copy_findings, copy_fixes, groups_of, scene_groups
from zerovision.extras.audit.labels import doubt_labels, outliers, wrong_label_probabilities
from zerovision.extras.audit.labels import out_of_sample_probabilities as classify
from zerovision.extras.settings import AuditSettings
from zerovision.models.build import build_model
from zerovision.training.base.errors import UserError
from zerovision.training.data import DataOptions, load_data
from zerovision.training.data.reader import Batch
from zerovision.training.observe.observer import Seen
from zerovision.training.observe.sample_history import SampleHistory

CHANGES = {
    "encoded again": lambda image: image,  # as JPEG of low quality
    "mirrored": ImageOps.mirror,
    "half": lambda image: image.resize((image.width // 2, image.height // 2)),
    "brighter": lambda image: ImageEnhance.Brightness(image).enhance(1.3),
    "cropped": lambda image: image.crop((3, 9, 3 + round(0.85 * image.width), 9 + round(0.8 * image.height))),
    "lit from one side": lambda image: Image.blend(  # the details stay
        image, Image.linear_gradient("L").resize(image.size).convert("RGB"), 0.4
    ),
    "mirrored and cropped": lambda image: ImageOps.mirror(image).crop((0, 0, 70, 72)),
}


def scenes(count: int, seed: int = 0, side: int = 80) -> list[Image.Image]:
    """Return images whose waves fall off with their frequency as those of photographs do, no two alike."""
    generator = np.random.Generator(np.random.PCG64(seed))
    rows, columns = np.meshgrid(np.fft.fftfreq(side), np.fft.fftfreq(side), indexing="ij")
    radius = np.hypot(rows, columns)
    radius[0, 0] = np.inf
    images = []
    for _ in range(count):
        waves = np.exp(2j * np.pi * generator.random((side, side))) / radius ** generator.uniform(1, 1.6)
        levels = np.fft.ifft2(waves).real
        levels = 45 * levels / levels.std() + generator.uniform(90, 160)
        images.append(Image.fromarray(levels.clip(0, 255).astype(np.uint8)).convert("RGB"))
    return images


def shirts(count: int, seed: int = 0, side: int = 96) -> list[Image.Image]:
    """Return shirts on tables, each of other colours and with another print."""
    generator = np.random.Generator(np.random.PCG64(seed))
    cut = [(12, 24), (34, 14), (62, 14), (84, 24), (78, 42), (68, 38), (68, 84), (28, 84), (28, 38), (18, 42)]
    images = []
    for _ in range(count):
        table, cloth, print_ = (tuple(generator.integers(*of, 3).tolist()) for of in ((150, 250), (20, 120), (0, 256)))
        image = Image.new("RGB", (side, side), table)
        draw, outline = ImageDraw.Draw(image), np.array(cut) + generator.normal(0, 1.5, (len(cut), 2))
        draw.polygon([tuple(point) for point in outline.tolist()], fill=cloth)
        left, top, width, height = generator.integers((38, 38, 4, 4), (50, 50, 16, 16)).tolist()
        draw.rectangle((left, top, left + width, top + height), fill=print_)
        levels = np.asarray(image) + generator.normal(0, 3, (side, side, 3))
        images.append(Image.fromarray(levels.clip(0, 255).astype(np.uint8)))
    return images


def grey(image: Image.Image) -> np.ndarray:
    return np.asarray(image.convert("L").resize((SIDE, SIDE), Image.Resampling.BILINEAR))


AGAIN = "=again a photograph of the summer holidays of 2026 7.png"


@pytest.fixture
def photos(tmp_path):
    """Two classes in train/ and val/, with one mistake of each kind."""
    images = scenes(28)
    root = tmp_path / "photos"
    for number, image in enumerate(images):
        part = "val" if number % 4 == 3 else "train"
        folder = root / part / ("ant", "bee")[number % 2 if part == "train" else number // 4 % 2]
        folder.mkdir(parents=True, exist_ok=True)
        image.save(folder / f"{number:02}.png")
    CHANGES["cropped"](images[0]).save(root / "val" / "ant" / "leak.jpg", quality=60)  # 00 is train/ant
    images[1].save(root / "train" / "ant" / "conflict.png")  # 01 is train/bee
    shutil.copy(root / "train" / "ant" / "02.png", root / "train" / "ant" / AGAIN)
    (root / "train" / "bee" / "torn.jpg").write_bytes(b"\xff\xd8 no image")
    return root


def rows_of(file):
    return list(csv.DictReader(file.open(newline="")))


def test_copies_are_found_whatever_was_done_to_them_and_nothing_else(tmp_path):
    images = scenes(40)
    changed = []
    for number, change in enumerate(CHANGES.values()):
        path = tmp_path / "copy.jpg"
        change(images[number]).save(path, quality=40)
        changed.append(Image.open(path).convert("RGB"))
    found = find_copies(np.stack([grey(image) for image in [*images, *changed]]))
    assert {copy[:2] for copy in found} == {(number, 40 + number) for number in range(len(changed))}
    assert [copy.is_mirrored for copy in found] == [name.startswith("mirrored") for name in CHANGES]
    assert all(REPORTED <= copy.confidence <= 1 for copy in found)
    assert find_copies(np.zeros((5, SIDE, SIDE), np.uint8)) == []  # flat: nothing is to be seen


def test_two_things_of_one_kind_are_never_taken_for_one_image():
    """A few products among other photographs: what is reported of them is left to a person."""
    images = [*shirts(7), *scenes(60)]
    images.append(images[0].resize((64, 64)))  # of these alone one may go
    copies = find_copies(np.stack([grey(image) for image in images]))
    assert len(copies) > 1
    catalogue = Numbered(*[("train", 0)] * (len(images) - 1), ("val", 0))
    assert {number for number, _ in copy_fixes(catalogue, copies, {})} == {0}


def test_windows_leave_the_whole_for_what_a_copy_shows():
    images = scenes(40)
    copies = [CHANGES["mirrored and cropped"](image) for image in images]
    found = find_copies(np.stack([grey(image) for image in [*images, *copies]]))
    assert {copy[:3] for copy in found} == {(number, 40 + number, True) for number in range(40)}


def test_a_folder_with_one_mistake_of_each_kind(photos, tmp_path, capsys, monkeypatch):
    output, terminal = tmp_path / "audit", io.StringIO()
    terminal.isatty = lambda: True
    monkeypatch.setenv("TERM", "xterm-color")
    monkeypatch.setattr("sys.stderr", terminal)
    audit(AuditSettings(data=str(photos), output=str(output)))
    assert all(f"reading {part}" in terminal.getvalue() for part in ("train", "val"))
    facts = json.loads((output / "audit.json").read_text())
    found = {(one["kind"], one["image"].rpartition("/")[2]) for one in facts["findings"]}
    assert {kind for kind, _ in found} == {"leak", "conflict", "repeat", "unreadable"}
    assert {("leak", "leak.jpg"), ("unreadable", "torn.jpg")} < found
    assert facts["small_classes"] == [["bee", 8]]
    page = (output / "audit.html").read_text()
    assert "data:image/jpeg" in page
    assert AGAIN[-12:] in page, "the end of a long name tells it from others"
    assert "http" not in page.replace("http-equiv", "")
    assert "--data" in capsys.readouterr().out
    rows = rows_of(output / "fixed.csv")
    again = load_data(DataOptions(data=str(output / "fixed.csv")))  # --data takes it
    assert [len(part) for part in again.parts.values()] == [20, 8]  # 24 less 4
    kept = {row["path"].rpartition("/")[2]: (row["label"], row["split"]) for row in rows}
    assert kept["leak.jpg"] == ("ant", "val")
    assert not {"00.png", "01.png", "conflict.png", "torn.jpg"} & kept.keys()  # in training, contradictions, broken


@pytest.mark.parametrize(
    ("files", "fixes", "fixed"),
    [
        ("train/ant/a train/ant/b val/bee/c", "c relabel ant, c move train", "a ant train, b ant train, c ant train"),
        ("train/bee/a val/ant/b val/ant/c", "a drop", "b ant val, c ant val"),  # not relabeled, too
    ],
)
def test_a_copy_gets_every_fix_that_it_needs(files, fixes, fixed, tmp_path, capsys):
    *others, picture = scenes(9)
    root, output = tmp_path / "data", tmp_path / "audit"
    images = dict.fromkeys(files.split(), picture)
    images |= {f"{('train', 'val')[n // 4]}/{('ant', 'bee')[n % 2]}/{n}": image for n, image in enumerate(others)}
    for name, image in images.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        image.save(root / f"{name}.png")

    def read(table):
        rows = [list(row.values())[:3] for row in rows_of(output / table) if "group" not in row.values()]
        rows = [[Path(path).stem, *cells] for path, *cells in rows]
        return ", ".join(" ".join(row).strip() for row in sorted(rows, key=lambda row: row[0]) if row[0].isalpha())

    audit(AuditSettings(data=str(root), output=str(output)))
    assert read("fixes.csv") == fixes
    assert read("fixed.csv") == fixed
    assert f"fixes  {', '.join(f'1 {fix.split()[1]}' for fix in fixes.split(', '))}\n" in capsys.readouterr().out
    page = (output / "audit.html").read_text()
    assert f"{len(fixes.split(', '))} proposed fixes" in page
    assert ("fix: <b>relabel ant, move train</b>" in page) == ("move" in fixes)
    shutil.copy(output / "fixes.csv", tmp_path)
    shutil.rmtree(output)
    audit(AuditSettings(data=str(root), fixes=str(tmp_path / "fixes.csv"), output=str(output)))
    assert read("fixed.csv") == fixed


def test_fixes_that_were_changed_by_hand_are_made(photos, tmp_path):
    output = tmp_path / "audit"
    fixes = tmp_path / "fixes.csv"
    fixes.write_text(f"path,action,new\n{photos}/train/bee/05.png,relabel,ant\n{photos}/val/ant/03.png,move,train\n")
    audit(AuditSettings(data=str(photos), fixes=str(fixes), output=str(output)))
    rows = {row["path"]: row for row in rows_of(output / "fixed.csv")}
    assert rows[f"{photos}/train/bee/05.png"]["label"] == "ant"
    assert rows[f"{photos}/val/ant/03.png"]["split"] == "train"
    for line, said in (
        (f"{photos}/train/bee/05.png,relabel,dog", "'relabel' 'dog'; expected"),
        ("/etc/passwd,drop,", "'/etc/passwd' is not an image of the data"),
    ):
        fixes.write_text(f"path,action,new\n{line}\n")
        with pytest.raises(UserError, match=said):
            audit(AuditSettings(data=str(photos), fixes=str(fixes), output=str(output)))


def test_fixes_do_not_replace_a_table_among_other_files(tmp_path):
    for name in ("fixed.csv", "own.csv"):
        (tmp_path / name).write_text("path,label\n")
    with pytest.raises(UserError, match="exists and contains no audit: move it away, or use another --output folder"):
        audit(AuditSettings(data="none", fixes="fixes.csv", output=str(tmp_path)))
    assert (tmp_path / "fixed.csv").read_text() == "path,label\n"


def test_weights_of_a_table_stay(photos, tmp_path):
    table = tmp_path / "list.csv"
    rows = [
        f"{photos}/train/ant/00.png,ant,train,2",
        f"{photos}/train/ant/00.png,ant,train,1",
        f"{photos}/train/bee/01.png,bee,train,1",
        *(f"{photos}/train/bee/{number:02}.png,bee,val,1" for number in (5, 9, 13)),
    ]
    table.write_text("\n".join(["path,label,split,weight", *rows]))
    audit(AuditSettings(data=str(table), output=str(tmp_path / "audit")))
    before, after = (load_data(DataOptions(data=str(file))) for file in (table, tmp_path / "audit" / "fixed.csv"))
    for one, other in zip(before.parts.values(), after.parts.values(), strict=True):
        assert one.source.name(0) == other.source.name(0)
    assert before.train.source.loss_weights.tolist() == pytest.approx(after.train.source.loss_weights.tolist())
    (tmp_path / "fixes.csv").write_text("path,action,new\n")
    with pytest.raises(UserError, match="several lines of the data name the same file"):
        audit(AuditSettings(data=str(table), fixes=str(tmp_path / "fixes.csv"), output=str(tmp_path / "audit")))


def test_groups_stay_and_scenes_get_one_if_wanted(photos, tmp_path, capsys):
    """As `--data` takes them: no group is in two parts."""
    (photos / "train" / "bee" / "torn.jpg").unlink()
    shot = photos / "train" / "ant" / "shot.png"  # like another shot of 02
    Image.blend(*(Image.open(photos / "train" / "ant" / name) for name in ("02.png", "10.png")), 0.25).save(shot)
    table, output = tmp_path / "list.csv", tmp_path / "audit"
    files = sorted(path for path in photos.rglob("*.*") if path.name not in ("conflict.png", AGAIN))
    groups = {"00.png": "nest", "04.png": "nest", "03.png": "hill", "07.png": "hill"}
    rows = [f"{path},{path.parts[-2]},{path.parts[-3]},{groups.get(path.name, '')}" for path in files]
    table.write_text("\n".join(["path,label,split,group", *rows]))

    def fixed() -> dict[str, tuple[str, str]]:
        load_data(DataOptions(data=str(output / "fixed.csv")))
        return {row["path"].rpartition("/")[2]: (row["split"], row["group"]) for row in rows_of(output / "fixed.csv")}

    audit(AuditSettings(data=str(table), output=str(output)))
    before = fixed()
    assert {name: before[name][1] for name in groups if name in before} == {
        name: group for name, group in groups.items() if name in before
    }
    assert before["shot.png"] == ("train", "")  # offered, not made
    assert "2 images share their scene with others" in capsys.readouterr().out
    fixes = output / "fixes.csv"
    fixes.write_text(fixes.read_text() + f"{photos}/val/ant/03.png,move,train,,\n")
    audit(AuditSettings(data=str(table), fixes=str(fixes), output=str(output)))
    after = fixed()
    assert after["shot.png"] == after["02.png"] == ("train", f"scene of {photos}/train/ant/02.png")
    assert after["03.png"] == after["07.png"] == ("train", "hill")  # the whole group moves


class Numbered:
    """The part of a catalogue that fixes need."""

    class_names = ("ant", "bee")

    def __init__(self, *images, groups=()):
        self.parts, self.labels = np.array([part for part, _ in images]), np.array([label for _, label in images])
        self.groups = list(groups) or [""] * len(images)

    def name(self, number):
        return f"{number}.png"


@pytest.mark.parametrize(
    ("images", "labels", "expected"),
    [
        ([("train", 0), ("val", 0)], {}, {0: ("drop", "")}),
        ([("train", 0), ("train", 0), ("val", 0)], {}, {2: ("move", "train")}),
        ([("train", 0), ("val", 0), ("test", 0)], {}, {0: ("drop", ""), 1: ("drop", "")}),
        ([("train", 0), ("train", 0)], {}, {}),
        ([("train", 0), ("train", 1)], {}, {0: ("drop", ""), 1: ("drop", "")}),
        ([("train", 0), ("train", 1), ("train", 1)], {}, {0: ("relabel", "bee")}),
        ([("train", 0), ("train", 1)], {0: Fix("relabel", "bee", 0.9, "")}, {}),
        ([("train", 0), ("test", 1)], {}, {0: ("drop", "")}),
    ],
)
def test_a_group_of_copies_ends_with_one_label_in_one_part(images, labels, expected):
    copies = [Copy(number, number + 1, is_mirrored=False, difference=0) for number in range(len(images) - 1)]
    assert groups_of(copies) == [list(range(len(images)))]
    fixes = copy_fixes(Numbered(*images), copies, labels)
    assert {number: fix[:2] for number, fix in fixes} == expected


def test_less_sure_pairs_are_one_scene_and_get_no_fix_but_a_group():
    sure, less = 2 * (1 - 0.9), 2 * (1 - 0.89)
    data = Numbered(("train", 0), ("val", 0), ("train", 1), ("train", 0))
    pairs = [Copy(0, 1, is_mirrored=False, difference=less), Copy(2, 3, is_mirrored=True, difference=less)]
    said = [(one.kind, one.reason) for one in copy_findings(data, pairs)]
    assert said[0] == ("leak", "in val, and the scene in train")
    assert said[1] == ("conflict", "the scene, mirrored, labeled 'ant' here and 'bee' there")
    assert copy_fixes(data, pairs, {}) == []
    assert copy_fixes(data, [pairs[0]._replace(difference=sure)], {})
    offered = {number: fix[:2] for number, fix in scene_groups(data, pairs, gone={2})}
    assert offered == dict.fromkeys((0, 1), ("group", "scene of 0.png"))


@pytest.mark.parametrize(
    ("parts", "groups", "expected"),
    [
        (["train", "val", "train"], ["", "a", ""], {0: "a", 2: "a"}),  # that of the table
        (["train", "val", "train"], ["b", "a", ""], {}),  # neither may lose an image
        (["train", "test", "train"], ["", "", ""], {0: "scene of 0.png", 2: "scene of 0.png"}),
        (["train", "test", "test"], ["", "", ""], {}),
    ],
)
def test_the_group_of_a_scene_is_its_own_unless_a_table_has_one(parts, groups, expected):
    pairs = [Copy(0, 1, is_mirrored=False, difference=0.5), Copy(1, 2, is_mirrored=False, difference=0.5)]
    data = Numbered(*((part, 0) for part in parts), groups=groups)
    assert {number: fix.new for number, fix in scene_groups(data, pairs, gone=())} == expected


def test_clean_generated_images_raise_no_alarm_and_have_no_table(tmp_path, monkeypatch):
    monkeypatch.setattr("zerovision.training.data.arrays.FAKE_TRAIN_IMAGES", 160)
    output = tmp_path / "audit"
    facts = audit(AuditSettings(data="fake", output=str(output)))
    assert json.loads((output / "audit.json").read_text())["findings"] == []
    assert "predicts" in facts["notes"][-2]
    assert not (output / "fixed.csv").exists()


def test_the_model_of_a_run_judges_labels_by_what_its_classifier_reads(tmp_path, trained, monkeypatch):
    built, data = trained
    run = save_run(tmp_path / "run", built, data)
    monkeypatch.setattr("zerovision.extras.audit.audit.find_copies", lambda pictures: [])  # slow, and not asked here
    classified: list[np.ndarray] = []  # slow, and the same in both audits
    monkeypatch.setattr(
        "zerovision.extras.audit.labels.out_of_sample_probabilities",
        lambda *given: classified[0] if classified else classified.append(classify(*given)) or classified[0],
    )
    facts = audit(AuditSettings(data="digits", run=str(run), output=str(tmp_path / "audit")))
    accuracy = float(re.search(r"the model's features predicts ([\d.]+) %", facts["notes"][-2])[1])
    score = float(re.search(r"nearest training images predict ([\d.]+) % of the other labels", facts["notes"][-1])[1])
    assert min(accuracy, score) > 95

    def suspected() -> set[str]:
        found = json.loads((tmp_path / "audit/audit.json").read_text())["findings"]
        return {one["image"] for one in found if one["kind"] == "label"}

    # What it said of the images while it learned from them counts, too: of ten of them, always another class.
    before, labels = suspected(), data.train.source.labels
    history = SampleHistory(run, ALONE, 1, 1)
    said = labels.clone()
    chosen = torch.nonzero(labels == 3)[:10, 0]
    said[chosen] = 5
    batch = Batch(torch.empty(0), labels, torch.ones(len(labels)), torch.arange(len(labels)))
    logits = 30.0 * torch.nn.functional.one_hot(said, 10)
    history.seen(Seen(batch, logits[:, 0], logits, logits[:, 0]))
    history.after_steps()
    audit(AuditSettings(data="digits", run=str(run), output=str(tmp_path / "audit")))
    wrong = {f"train {data.train.source.name(index)}" for index in chosen.tolist()}
    assert set() < suspected() - before <= wrong  # not all, as classifiers that did not see them are sure
    with pytest.raises(UserError, match="is neither a file"):
        audit(AuditSettings(data="digits", run=str(tmp_path / "none"), output=str(tmp_path / "audit")))


@pytest.mark.parametrize(("rate", "least"), [(0.0, 0.0), (0.05, 0.8)])
def test_flipped_labels_are_found(rate, least):
    digits = load_digits()
    features, truth = digits.images.reshape(len(digits.target), -1)[:700], digits.target[:700]
    generator = np.random.Generator(np.random.PCG64(0))
    labels = np.where(generator.random(len(truth)) < rate, (truth + generator.integers(1, 10, len(truth))) % 10, truth)
    doubts = doubt_labels(features, labels, 10, np.full((len(labels), 10), np.nan))
    suspected, is_wrong = doubts.probability >= 0.5, labels != truth
    assert suspected[is_wrong].sum() >= least * is_wrong.sum()
    assert (suspected & ~is_wrong).sum() <= 4
    found = suspected & is_wrong
    assert (doubts.suggested[found] == truth[found]).mean() >= 0.9 if found.any() else rate == 0
    assert doubt_labels(features[:3], labels[:3], 10, np.full((3, 10), np.nan)) is None  # too few of each class


def test_doubts_follow_bayes_when_classes_are_confused_one_way(monkeypatch):
    """With many images the estimated rates are those of the labels, and the doubt is the closed form."""
    # These probabilities are right as they are.
    monkeypatch.setattr("zerovision.extras.audit.labels.TEMPERATURES", (1.0,))
    generator = np.random.Generator(np.random.PCG64(0))
    first = np.where(generator.random(20_000) < 0.5, 0.9, 0.1)  # P(class 0 | image)
    truth = (generator.random(len(first)) > first).astype(int)
    labels = np.where((truth == 0) & (generator.random(len(truth)) < 0.2), 1, truth)  # a fifth of 0 is called 1
    wrong, other, _ = wrong_label_probabilities(np.stack([first, 1 - first], 1), labels)
    assert wrong[(first == 0.9) & (labels == 1)] == pytest.approx(0.9 * 0.2 / (0.9 * 0.2 + 0.1), abs=0.05)
    assert wrong[labels == 0].max() < 0.1  # nothing is called 0 by mistake
    assert (other == 1 - labels).all()


def test_an_image_unlike_all_others_is_found():
    features = np.random.Generator(np.random.PCG64(0)).normal(size=(300, 8))
    features[7] = 40
    far, times = outliers(features)
    assert far.tolist() == [7]
    assert times[0] > 1


def test_the_nearest_neighbours_are_those_of_scikit_learn():
    """20 by cosine, with the weights of Wu et al. 2018, exp(cosine / 0.07)."""
    generator = np.random.default_rng(0)
    centres, labels = generator.normal(size=(4, 8)), generator.integers(0, 4, 400)
    features = (centres[labels] + 1.2 * generator.normal(size=(400, 8))).astype(np.float32)
    is_trained = generator.random(400) < 0.6
    oracle = KNeighborsClassifier(20, metric="cosine", weights=lambda distances: np.exp((1 - distances) / 0.07))
    expected = oracle.fit(features[is_trained], labels[is_trained]).score(features[~is_trained], labels[~is_trained])
    assert 0.5 < expected < 1
    assert neighbours_score(features, labels, is_trained) == pytest.approx(expected)
    assert neighbours_score(features, labels, np.ones(400, dtype=bool)) is None


def test_a_published_network_judges_before_anything_is_trained(photos, tmp_path, monkeypatch):
    """Of random weights here, where no hub is: with its own size, crop, mean and deviation."""
    seen = []

    def unpublished(config, *shape):
        assert config.pretrained
        return build_model(config, *shape, loads_weights=False)

    def look(network, metadata, catalogue):
        seen.append(metadata["preprocessing"])
        return embeddings(network, metadata, catalogue)

    monkeypatch.setattr("zerovision.extras.audit.audit.find_copies", lambda pictures: [])  # slow, and not asked here
    monkeypatch.setattr("zerovision.extras.audit.audit.build_model", unpublished)
    monkeypatch.setattr("zerovision.extras.audit.audit.embeddings", look)
    facts = audit(AuditSettings(data=str(photos), run="timm:test_resnet", output=str(tmp_path / "audit")))
    assert "a classifier trained on the model's features predicts" in facts["notes"][-2]
    published = timm.get_pretrained_cfg("test_resnet")
    (preprocessing,) = seen
    assert (preprocessing.image_size, preprocessing.resize_size) == (160, round(160 / published.crop_pct))
    assert (preprocessing.mean, preprocessing.std) == (tuple(published.mean), tuple(published.std))
    with pytest.raises(UserError, match="unknown model 'timm:resnet19'"):
        audit(AuditSettings(data=str(photos), run="timm:resnet19", output=str(tmp_path / "audit")))
