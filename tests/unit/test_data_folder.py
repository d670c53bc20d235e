"""Folders of classes: what is read, how it is split, and what is refused."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from timm.data import create_transform
from torchvision.datasets import ImageFolder
from torchvision.transforms import InterpolationMode, v2

from training.data import DataOptions, load_data
from training.data.reading.decode import decode_exact
from training.data.reading.sources import FileSource, ImageFile
from training.errors import UserError


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


@pytest.mark.parametrize(
    ("changes", "size", "resized", "filter_mode"),
    [
        ({}, 224, 256, InterpolationMode.BILINEAR),
        ({"eval_crop": 0.95, "interpolation": "bicubic"}, 224, 235, InterpolationMode.BICUBIC),
        ({"image_size": 160, "eval_image_size": 192, "eval_crop": 1.0}, 192, 192, InterpolationMode.BILINEAR),
    ],
)
def test_evaluation_image_is_resize_centre_crop_normalise(tmp_path, changes, size, resized, filter_mode):
    make_images(tmp_path / "train", {"a": 1, "b": 1})
    make_images(tmp_path / "val", {"a": 1, "b": 1}, size=(400, 300))
    pair = load_data(DataOptions(data=str(tmp_path), **changes))
    assert (pair.preprocessing["image_size"], pair.preprocessing["resize_size"]) == (size, resized)
    image, label = pair.val[0, 1]
    oracle = v2.Compose(
        [
            v2.PILToTensor(),
            v2.Resize(resized, filter_mode, antialias=True),
            v2.CenterCrop(size),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
        ]
    )
    torch.testing.assert_close(image, oracle(Image.open(tmp_path / "val" / "b" / "000.png")), rtol=0, atol=1e-6)
    assert label == 1
    timms = create_transform(size, crop_pct=changes.get("eval_crop", 0.875), interpolation="bicubic")
    assert timms.transforms[0].size == resized


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
    assert len(pair.notes) == 1
    assert "1 .txt" in pair.notes[0]


def test_split_is_disjoint_complete_and_of_about_the_wanted_size(tmp_path):
    make_images(tmp_path, {"a": 300, "b": 100}, size=(1, 1))
    pair = load(tmp_path, val_fraction=0.25)
    train, val = set(files_of(pair.train)), set(files_of(pair.val))
    assert not train & val
    assert len(train | val) == 400
    for total, held_out in zip((300, 100), pair.val_counts, strict=True):
        assert abs(held_out - total / 4) < 4 * (total * 0.25 * 0.75) ** 0.5  # four standard deviations


def test_split_of_a_file_depends_on_no_other_file(tmp_path):
    make_images(tmp_path, {"a": 30, "b": 20}, size=(1, 1))
    before = set(files_of(load(tmp_path).val))
    make_images(tmp_path, {"a": 90, "c": 10}, size=(1, 1))
    after = set(files_of(load(tmp_path).val))
    assert before < after
    assert before == {name for name in after if "/c/" not in name and (("/b/" in name) or int(Path(name).stem) < 30)}


def test_split_changes_with_neither_the_seed_nor_the_place(tmp_path):
    make_images(tmp_path / "here", {"a": 40, "b": 40}, size=(1, 1))
    shutil.copytree(tmp_path / "here", tmp_path / "there")
    relative = [
        [os.path.relpath(name, tmp_path / place) for name in files_of(load(tmp_path / place, seed=seed).val)]
        for place, seed in (("here", 0), ("there", 0), ("here", 1))
    ]
    assert relative[0] == relative[1] == relative[2]


@pytest.mark.parametrize("val_fraction", [1e-9, 1 - 1e-9])
def test_both_parts_of_a_class_have_an_image(tmp_path, val_fraction):
    make_images(tmp_path, {"a": 2, "b": 5, "single": 1}, size=(1, 1))
    pair = load(tmp_path, val_fraction=val_fraction)
    assert (pair.train_counts[2], pair.val_counts[2]) == (1, 0)
    assert min(pair.train_counts[:2] + pair.val_counts[:2]) == 1
    assert pair.notes == ["no validation image for 'single'"]


def test_fingerprint_follows_the_files_and_not_the_place(tmp_path):
    make_images(tmp_path / "one", {"a": 3, "b": 3})
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    first = load(tmp_path / "one").fingerprint
    assert len(first) == 64
    assert load(tmp_path / "two").fingerprint == first
    (tmp_path / "two" / "a" / "000.png").rename(tmp_path / "two" / "a" / "new.png")
    second = load(tmp_path / "two").fingerprint
    make_images(tmp_path / "one", {"a": 1}, size=(41, 31))
    assert len({first, second, load(tmp_path / "one").fingerprint}) == 3


def test_a_link_inside_the_folder_is_followed(tmp_path):
    make_images(tmp_path, {"a": 2, "b": 2})
    (tmp_path / "b" / "linked.png").symlink_to(tmp_path / "a" / "000.png")
    assert sum(load(tmp_path).train_counts + load(tmp_path).val_counts) == 5


def _file(root):
    shutil.rmtree(root)
    root.write_text("")


def _empty(root):
    shutil.rmtree(root)
    root.mkdir()


def _no_images(root):
    _empty(root)
    (root / "a").mkdir()
    (root / "a" / "notes.txt").write_text("")


def _loose_images(root):
    make_images(root.parent, {root.name: 2})
    shutil.rmtree(root / "a")
    shutil.rmtree(root / "b")


def _single_images(root):
    shutil.rmtree(root)
    make_images(root, {"a": 1, "b": 1})


def _different_classes(root):
    shutil.rmtree(root)
    make_images(root / "train", {"a": 1, "b": 1, "cow": 1})
    make_images(root / "val", {"a": 1, "b": 1, "hen": 1})


def _train_only(root):
    shutil.rmtree(root)
    make_images(root / "train", {"a": 1, "b": 1})


def _link_out(root):
    make_images(root.parent / "secret", {"x": 1})
    (root / "a" / "escape.png").symlink_to(root.parent / "secret" / "x" / "000.png")


def _folder_link_out(root):
    make_images(root.parent / "secret", {"x": 1})
    (root / "escape").symlink_to(root.parent / "secret" / "x")


def _train_link_out(root):
    make_images(root.parent / "secret", {"a": 1, "b": 1})
    make_images(root / "val", {"a": 1, "b": 1})
    (root / "train").symlink_to(root.parent / "secret")


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (shutil.rmtree, "no folder of that name exists"),
        (_file, "is not a folder"),
        (_empty, "is empty"),
        (_no_images, "no image in a class folder"),
        (_loose_images, "no image in a class folder"),
        (lambda root: shutil.rmtree(root / "b"), "one class only, 'a'"),
        (lambda root: (root / "hollow").mkdir(), "no image in class 'hollow'"),
        (_single_images, "one image per class"),
        (_different_classes, r"only in train/: 'cow'; only in val/: 'hen'"),
        (_train_only, r"has no folder val/"),
        (_link_out, r"escape.png' leads out of the data folder"),
        (_folder_link_out, r"escape' leads out of the data folder"),
        (_train_link_out, r"train' leads out of the data folder"),
        (lambda root: (root / "a" / "broken.png").symlink_to("nowhere.png"), r"broken.png' is broken"),
        (lambda root: (root / "a" / "loop").symlink_to(root), r"loop' leads to a folder that contains it"),
    ],
)
def test_a_wrong_folder_is_one_clear_line(tmp_path, break_it, message):
    root = make_images(tmp_path / "data", {"a": 2, "b": 2})
    load(root)
    break_it(root)
    with pytest.raises(UserError, match=message) as caught:
        load(root)
    assert "\n" not in str(caught.value)


def test_an_unreadable_image_is_named(tmp_path):
    make_images(tmp_path, {"a": 2, "b": 2})
    for path in tmp_path.glob("*/*.png"):
        path.write_text("text")
    pair = load(tmp_path)
    with pytest.raises(UserError, match=r"/a/00.\.png': not an image"):
        pair.train[0, 0]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"data": "digit"}, "Did you mean 'digits'"),
        ({"data": ""}, "not a data set"),
        ({"data": "digits:8"}, "not a data set"),
        ({"augmentation": "shfit"}, "Did you mean 'shift'"),
        ({"bad_images": "ignore"}, "expected error, skip, skip:SHARE"),
        ({"interpolation": "cubic"}, "Did you mean 'bicubic'"),
        ({"val_fraction": 0.0}, "above 0 and below 1"),
        ({"val_fraction": 1.0}, "above 0 and below 1"),
        ({"val_fraction": float("nan")}, "above 0 and below 1"),
        ({"image_size": -1}, "image size is -1"),
        ({"image_size": 10**6}, "image size is 1000000"),
    ],
)
def test_a_wrong_option_is_one_clear_line(values, message):
    with pytest.raises(UserError, match=message):
        load_data(DataOptions(**values))


def test_the_list_of_files_takes_less_than_100_bytes_an_image():
    """With names as long as ImageNet's, for 1,000 and for 100,000 images alike; a worker process gets as much."""
    for count in (1000, 100_000):
        files = [
            ImageFile(f"train/n{number % 50:08}/n{number % 50:08}_{number}.JPEG", 100_000, number % 50)
            for number in range(count)
        ]
        source = FileSource(Path("/data"), files, decode_exact)
        tensors = [value for value in vars(source).values() if isinstance(value, torch.Tensor)]
        folders = sum(map(sys.getsizeof, source._folders))
        assert (sum(tensor.nbytes for tensor in tensors) + folders) / count < 100
        for index in (0, 1, count - 1):
            assert source.name(index) == f"/data/{files[index].path}"
            assert source.labels[index] == files[index].label
