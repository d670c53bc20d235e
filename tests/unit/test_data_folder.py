"""Folders of classes: what is read, how it is split, and what is refused."""

from __future__ import annotations

import os
import shutil
import sys
import unicodedata
from hashlib import blake2b
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import create_transform
from torchvision.datasets import ImageFolder
from torchvision.transforms import InterpolationMode, v2

from tests.kit import ELEMENTWISE, assert_same_but_rounding
from zerovision.training.base.errors import UserError
from zerovision.training.data import DataOptions, load_data
from zerovision.training.data.division import share_held_out, unit_hashes
from zerovision.training.data.images import ImagesBuilder
from zerovision.training.data.parts import part_kind
from zerovision.training.data.reading.decode import decode
from zerovision.training.data.reading.sources import FileSource


def make_images(root: Path, counts: dict[str, int], suffix: str = "png", size: tuple[int, int] = (40, 30)) -> Path:
    """Write `counts[name]` random images to each class folder `root/name`; file sizes differ from one to the next."""
    generator = np.random.Generator(np.random.PCG64(len(root.parts)))
    for name, count in counts.items():
        (root / name).mkdir(parents=True, exist_ok=True)
        for number in range(count):
            values = generator.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
            Image.fromarray(values).save(root / name / f"{number:03}.{suffix}")
    return root


def load(root: Path, **values):
    return load_data(DataOptions(data=str(root), image_size=16, **values))


def files_of(dataset) -> list[str]:
    return [dataset.source.name(index) for index in range(len(dataset))]


def test_train_and_val_folders_are_read_as_torchvision_reads_them(tmp_path):
    for part, count in (("train", 4), ("val", 2)):
        make_images(tmp_path / part, {"cat": count, "ant": count + 1, "dog": 1})
    pair = load(tmp_path)
    for part, dataset, counts in (("train", pair.train, pair.train_counts), ("val", pair.val, pair.val_counts)):
        oracle = ImageFolder(str(tmp_path / part))
        assert pair.class_names == oracle.classes == ["ant", "cat", "dog"]
        assert list(zip(files_of(dataset), dataset.source.labels.tolist(), strict=True)) == oracle.samples
        assert counts == np.bincount(oracle.targets).tolist()
        np.testing.assert_array_equal(dataset.source.read(0).permute(1, 2, 0), np.asarray(oracle[0][0]))


MEAN, STD = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
BARS = [round(255 * value) for value in MEAN]


@pytest.mark.parametrize(
    ("changes", "size", "geometry"),
    [
        ({}, 224, [v2.Resize(256, antialias=True), v2.CenterCrop(224)]),
        (
            {"eval_crop": 0.95, "interpolation": "bicubic"},
            224,
            [v2.Resize(235, InterpolationMode.BICUBIC, antialias=True), v2.CenterCrop(224)],
        ),
        (
            {"image_size": 160, "eval_image_size": 192, "eval_crop": 1.0},
            192,
            [v2.Resize(192, antialias=True), v2.CenterCrop(192)],
        ),
        ({"image_size": 160, "fit": "pad"}, 160, [v2.Resize((120, 160), antialias=True), v2.Pad((0, 20), fill=BARS)]),
        ({"image_size": 160, "fit": "squash"}, 160, [v2.Resize((160, 160), antialias=True)]),
    ],
)
def test_an_evaluation_image_is_cropped_or_fitted_as_by_torchvision(tmp_path, changes, size, geometry):
    make_images(tmp_path / "train", {"a": 1, "b": 1}, size=(100, 300))
    make_images(tmp_path / "val", {"a": 1, "b": 1}, size=(400, 300))
    pair = load_data(DataOptions(data=str(tmp_path), **changes))
    normalized = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    oracle = v2.Compose([v2.PILToTensor(), *geometry, *normalized])
    image, label = pair.val[0, 1]
    assert_same_but_rounding(image, oracle(Image.open(tmp_path / "val" / "b" / "000.png")), ELEMENTWISE)
    assert (pair.preprocessing.image_size, label) == (size, 1)
    if "fit" in changes:
        assert pair.augmentation == "shift_flip"  # training sees whole images too
    else:
        timms = create_transform(size, crop_pct=changes.get("eval_crop", 0.875), interpolation="bicubic")
        assert [pair.preprocessing.resize_size] == geometry[0].size == [timms.transforms[0].size]
    if changes.get("fit") == "pad":
        columns = pair.train.read(0, 0, [])[:, :, [0, 52, 107, 159]].float()
        torch.testing.assert_close(columns, torch.tensor(BARS)[:, None, None].float().expand_as(columns))


def test_names_of_any_case_nested_folders_and_hidden_files(tmp_path):
    make_images(tmp_path, {"a": 3, "b": 3})
    make_images(tmp_path / "a", {"deeper": 1}, suffix="JPEG")
    (tmp_path / "b" / "000.png").rename(tmp_path / "b" / "ÄÖ 1.PNG")
    (tmp_path / "b" / "._001.png").write_text("what macOS leaves behind")
    (tmp_path / "b" / "readme.txt").write_text("about b")
    (tmp_path / ".cache").mkdir()
    pair = load(tmp_path)
    names = {os.path.relpath(name, tmp_path) for name in files_of(pair.train) + files_of(pair.val)}
    expected = {"a/000.png", "a/001.png", "a/002.png", "a/deeper/000.JPEG", "b/ÄÖ 1.PNG", "b/001.png", "b/002.png"}
    assert names == expected
    assert pair.class_names == ["a", "b"]
    assert pair.notes == [
        "skipped 1 file with an unsupported type or extension: 1 .txt",
        "skipped 2 hidden files and folders of the system: ._001.png, .cache",
    ]


def held_out(paths: list[str], fraction: float) -> set[str]:
    chosen = share_held_out(unit_hashes(paths, 0), np.zeros(len(paths), dtype=np.int64), fraction)
    return {path for path, is_chosen in zip(paths, chosen, strict=True) if is_chosen}


def test_each_class_has_about_its_share_held_out_and_growing_moves_few_images():
    generator = np.random.Generator(np.random.PCG64(0))
    moved = kept = 0
    for _ in range(300):
        paths = [f"c{generator.integers(1e9)}/{number}.png" for number in range(generator.integers(2, 400))]
        fraction, half = float(generator.uniform(0.1, 0.4)), len(paths) // 2
        before, after = (held_out(part, fraction) for part in (paths[:half], paths))
        expected = fraction * len(paths)
        assert 1 <= len(after) < len(paths)
        assert abs(len(after) - expected) <= 1.5 + 0.1 * expected
        moved += len(before - after) + len((after - before) & set(paths[:half]))
        kept += half
    assert moved < 0.03 * kept


def test_eleven_images_are_split_as_the_fraction_says_whatever_their_names():
    """By the hash alone 7 of 11 were held out."""
    assert {len(held_out([f"{k}/{n}.png" for n in range(11)], 0.2)) for k in range(500)} == {1, 2, 3}


def test_each_image_is_held_out_in_one_fold_and_each_class_in_all_alike(tmp_path):
    make_images(tmp_path, {"a": 23, "b": 11}, size=(1, 1))
    everything = set(files_of(load(tmp_path).train)) | set(files_of(load(tmp_path).val))
    pairs = [load(tmp_path, folds=4, fold=fold) for fold in (1, 2, 3, 4)]
    assert sorted(file for pair in pairs for file in files_of(pair.val)) == sorted(everything)
    for pair in pairs:
        assert {*files_of(pair.train)} == everything - {*files_of(pair.val)}
        assert pair.val_counts[0] in (5, 6)
        assert pair.val_counts[1] in (2, 3)
    others = [set(files_of(load(tmp_path, folds=4, fold=1, split_seed=seed).val)) for seed in (0, 1)]
    assert set(files_of(pairs[0].val)) == others[0] != others[1]


def test_split_seed_holds_out_other_images_and_zero_is_the_hash_of_the_path(tmp_path):
    """The parts are disjoint and complete, and of the wanted size."""
    make_images(tmp_path, {"a": 60, "b": 60}, size=(1, 1))
    images = set(map(str, tmp_path.glob("*/*.png")))
    splits = []
    for seed in (0, 0, 1):
        pair = load(tmp_path, val_fraction=0.3, split_seed=seed)
        splits.append(set(files_of(pair.val)))
        assert set(files_of(pair.train)) == images - splits[-1]
        assert all(abs(count - 18) <= 3 for count in pair.val_counts)
    assert splits[0] == splits[1] != splits[2]
    assert len(splits[0] & splits[2]) < len(splits[0]) / 2
    by_hash = {
        name
        for name in images
        if int.from_bytes(blake2b(os.path.relpath(name, tmp_path).encode(), digest_size=8).digest(), "little")
        < 0.3 * 2**64
    }
    assert len(splits[0] ^ by_hash) <= 4


PARTS = [
    ("Training", "Testing"),
    ("Train", "Val"),
    ("TRAIN", "TEST"),
    ("training_set", "test_set"),
    ("Training Set", "Validation Set"),
    ("train_images", "val-images"),
    ("trainset", "testset"),
    ("train", "holdout"),
    ("train", "Hold-Out"),
    ("train", "dev"),
    ("train", "eval"),
    ("seg_train", "seg_test"),
    ("asl_alphabet_train", "asl_alphabet_test"),
]


@pytest.mark.parametrize(("train", "other"), PARTS)
@pytest.mark.parametrize("nested", [False, True])
def test_parts_of_any_usual_name_are_no_classes(tmp_path, train, other, nested):
    for number, name in enumerate((train, other)):
        make_images(tmp_path / name / name if nested else tmp_path / name, {"ant": 10 - number, "bee": 10 - number})
    pair = load(tmp_path)
    assert pair.class_names == ["ant", "bee"]
    is_test = part_kind(other)[0] == "test"
    assert (pair.test is not None) == is_test
    assert len(pair.train) + (len(pair.val) if is_test else 0) == 20
    assert len(pair.test if is_test else pair.val) == 18
    assert len(pair.notes) == 1
    assert f"training on {train}/" in pair.notes[0]
    assert f"{other}/ is {'evaluated once' if is_test else 'the validation part'}" in pair.notes[0]


@pytest.mark.parametrize(
    "name", ["trains", "contest", "evaluate me", "bullet train", "unset", "valley", "attest", "dev-board"]
)
def test_names_that_only_contain_the_word_are_classes(tmp_path, name):
    make_images(tmp_path, {name: 3, "cat": 3})
    assert sorted(load(tmp_path).class_names) == sorted([name, "cat"])


@pytest.mark.parametrize("name", ["train", "test", "dev", "Val"])
def test_a_class_may_have_the_name_of_a_part(tmp_path, name):
    """CIFAR-100 has the class train."""
    make_images(tmp_path, {name: 3, "bus": 3, "car": 3})
    assert sorted(load(tmp_path).class_names) == sorted([name, "bus", "car"])
    make_images(tmp_path / name, {"deep": 1, "deeper": 1})
    assert sorted(load(tmp_path, val_part="none").class_names) == sorted([name, "bus", "car"])


def test_train_valid_and_test(tmp_path):
    for part, count in (("train", 4), ("valid", 3), ("test", 2)):
        make_images(tmp_path / part, {"a": count, "b": count})
    plain = load(tmp_path)
    shutil.copyfile(tmp_path / "train" / "a" / "000.png", tmp_path / "train" / "loose.png")
    shutil.copyfile(tmp_path / "train" / "a" / "000.png", tmp_path / "loose.JPG")
    shutil.rmtree(tmp_path / "test" / "b")
    pair = load(tmp_path)
    for part, dataset, count in (("train", pair.train, 8), ("valid", pair.val, 6), ("test", pair.test, 2)):
        assert {os.path.relpath(name, tmp_path).split("/")[0] for name in files_of(dataset)} == {part}
        assert len(dataset) == count
    assert pair.fingerprint == plain.fingerprint  # a test part changes nothing that is trained
    assert pair.notes[1] == "2 images next to the class folders belong to no class and are not used: loose.JPG"
    make_images(tmp_path / "test", {"c": 1})
    with pytest.raises(UserError, match="only in the test part: 'c'"):
        load(tmp_path)


def test_val_part_names_the_folder_to_validate_on(tmp_path):
    for fold in ("fold0", "fold1", "fold2"):
        make_images(tmp_path / fold, {"a": 2, "b": 3})
    pair = load(tmp_path, val_part="fold1")
    assert (len(pair.train), len(pair.val)) == (10, 5)
    assert all("/fold1/" in name for name in files_of(pair.val))
    assert load(tmp_path, val_part="none").class_names == ["fold0", "fold1", "fold2"]
    (tmp_path / "fold0").rename(tmp_path / "Train")
    (tmp_path / "fold1").rename(tmp_path / "Test")
    assert len(load(tmp_path).test) == 5
    pair = load(tmp_path, val_part="Test")
    assert (len(pair.train), len(pair.val), pair.test) == (5, 5, None)


SYSTEM = ["@eaDir", "__MACOSX", "#recycle", "$RECYCLE.BIN", "@Recycle", "lost+found", "System Volume Information"]
SYSTEM += [".ipynb_checkpoints", ".Trash-1000", "__pycache__"]


@pytest.mark.parametrize("name", SYSTEM)
def test_folders_of_systems_are_passed_over_and_counted(tmp_path, name):
    make_images(tmp_path, {"a": 3, "b": 3})
    plain = load(tmp_path)
    make_images(tmp_path / name, {"a": 1, "b": 1})
    make_images(tmp_path / "a" / name, {"000.png": 1})
    (tmp_path / "b" / "Thumbs.db").write_text("")
    pair = load(tmp_path)
    assert (pair.class_names, pair.fingerprint) == (plain.class_names, plain.fingerprint)
    first = sorted([name, "Thumbs.db"])
    assert pair.notes == [f"skipped 3 hidden files and folders of the system: {', '.join(first)}"]


def test_one_name_in_two_unicode_forms_is_one_class(tmp_path):
    composed, decomposed = (unicodedata.normalize(form, "café") for form in ("NFC", "NFD"))
    make_images(tmp_path / "train", {composed: 2, "thé": 2})
    make_images(tmp_path / "val", {decomposed: 1, "thé": 1})
    pair = load(tmp_path)
    assert (pair.class_names, pair.train_counts, pair.val_counts) == ([composed, "thé"], [2, 2], [1, 1])
    assert any("two Unicode forms" in note for note in pair.notes)
    make_images(tmp_path / "both", {composed: 4, decomposed: 3, "thé": 4})
    pair = load(tmp_path / "both")
    assert len(pair.class_names) == 2
    assert pair.train_counts[0] + pair.val_counts[0] == 7


def test_links_are_followed_and_counted_but_not_to_a_device(tmp_path):
    pool = make_images(tmp_path / "pool", {"x": 4, "y": 4})
    snapshot = tmp_path / "snapshot"
    for label, name in (("a", "x"), ("b", "y")):  # as in a hub's cache, where the content has another name
        (snapshot / label).mkdir(parents=True)
        for file in sorted((pool / name).iterdir()):
            (tmp_path / f"blob-{name}-{file.stem}").write_bytes(file.read_bytes())
            (snapshot / label / file.name).symlink_to(f"../../blob-{name}-{file.stem}")
    folders = tmp_path / "folders"
    folders.mkdir()
    (folders / "a").symlink_to(pool / "x")
    (folders / "b").symlink_to("../pool/y")
    whole = tmp_path / "whole"
    whole.symlink_to(pool)
    for root, links in ((snapshot, 8), (folders, 2)):
        pair = load(root)
        assert (pair.class_names, len(pair.train) + len(pair.val)) == (["a", "b"], 8)
        assert len(pair.notes) == 1
        assert f"followed {links} symbolic links" in pair.notes[0]
    assert load(whole).notes == []
    (pool / "y" / "inside.png").symlink_to("../x/000.png")
    (pool / "x" / "zero.png").symlink_to("/dev/zero")
    pair = load(pool)
    assert len(pair.train) + len(pair.val) == 9
    assert pair.notes[0].endswith("1 not a regular file")
    (pool / "x" / "one").symlink_to(pool / "y")
    (pool / "y" / "two").symlink_to(pool / "x")
    with pytest.raises(UserError, match="leads to a folder that contains it"):
        load(pool)


def test_classes_of_other_sizes_are_noted_with_the_flag_that_answers(tmp_path):
    make_images(tmp_path / "train", {"rare": 2, "usual": 30}, size=(1, 1))
    make_images(tmp_path / "val", {"rare": 1, "usual": 1}, size=(1, 1))
    (note,) = [note for note in load(tmp_path).notes if "balanced" in note]
    assert "'usual' has 30 training images, 'rare' has 2" in note
    assert "--class-weights balanced" in note
    for answer in ({"sampling": "balanced"}, {"class_weights": "balanced"}):
        assert not any("balanced" in note for note in load(tmp_path, **answer).notes)


def test_split_and_fingerprint_follow_the_files_and_neither_the_seed_nor_the_place(tmp_path):
    here, there = make_images(tmp_path / "here", {"a": 40, "b": 40}, size=(1, 1)), tmp_path / "there"
    shutil.copytree(here, there)
    pairs = [(root, load(root, seed=seed)) for root, seed in ((here, 0), (there, 0), (here, 1))]
    first, *others = [[os.path.relpath(name, root) for name in files_of(pair.val)] for root, pair in pairs]
    assert others == [first, first]
    fingerprints = {pair.fingerprint for _, pair in pairs}
    assert [len(fingerprint) for fingerprint in fingerprints] == [64]
    (there / "a" / "000.png").rename(there / "a" / "new.png")
    make_images(here, {"a": 1}, size=(41, 31))
    assert len({*fingerprints, load(there).fingerprint, load(here).fingerprint}) == 3


@pytest.mark.parametrize("val_fraction", [1e-9, 1 - 1e-9])
def test_both_parts_of_a_class_have_an_image(tmp_path, val_fraction):
    make_images(tmp_path, {"a": 2, "b": 5, "single": 1}, size=(1, 1))
    pair = load(tmp_path, val_fraction=val_fraction)
    assert (pair.train_counts[2], pair.val_counts[2]) == (1, 0)
    assert min(pair.train_counts[:2] + pair.val_counts[:2]) == 1
    assert pair.notes == ["no validation image for 'single'"]


def test_the_table_of_images_takes_less_than_100_bytes_an_image():
    """With names as long as ImageNet's, for 1,000 and for 100,000 images alike; a worker process gets as much."""
    for count in (1000, 100_000):
        builder = ImagesBuilder()
        paths = [f"train/n{number % 50:08}/n{number % 50:08}_{number}.JPEG" for number in range(count)]
        for number, path in enumerate(paths):
            builder.add(path, number % 50, state=(100_000, 0))
        source = FileSource(builder.build(Path("/data")), decode)
        tensors = [source.labels, source.images.text, *source.images.columns.values()]
        folders = sum(map(sys.getsizeof, source.images.words["folder"]))
        assert (sum(tensor.nbytes for tensor in tensors) + folders) / count < 110
        for index in (0, 1, count - 1):
            assert source.name(index) == f"/data/{paths[index]}"
            assert source.labels[index] == index % 50


def test_images_are_in_the_order_of_their_paths_as_text():
    """Also where one folder is in another, names that are no UTF-8, and folders whose names go on before the slash."""
    random = np.random.default_rng(0)
    segments = ["a", "a-b", "a b", "a.b", "b", "\udcff", "\u00e9", "z\U0001f600"]
    paths = ["/".join([*random.choice(segments, random.integers(0, 4)), f"{n}"]) for n in random.permutation(500)]
    builder = ImagesBuilder()
    for path in paths:
        builder.add(path, "x")
    images = builder.build(Path("/data"))
    assert [*images.paths(images.in_order())] == sorted(paths)
    assert [*images.paths()] == paths
