"""`--data npz:FILE`: the arrays as they are, and one line for each that does not fit."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from zerovision.models import size_of
from zerovision.training.base.errors import UserError
from zerovision.training.data import DataOptions, load_data


def arrays(shape=(28, 28)):
    images = np.random.default_rng(0).integers(0, 256, (30, *shape), dtype=np.uint8)
    labels = (np.arange(30) % 10).astype(np.uint8)
    return {"x_train": images[:20], "y_train": labels[:20], "x_test": images[20:], "y_test": labels[20:]}


def load(path, **options):
    return load_data(DataOptions(data=f"npz:{path}", mean=(0,), std=(1,), **options))


@pytest.mark.parametrize(
    ("shape", "asked", "channels"),
    [
        ((28, 28), 0, 3),
        ((28, 28), 1, 1),
        ((12, 12, 1), 0, 3),
        ((12, 12, 2), 0, 2),
        ((32, 32, 3), 0, 3),
        ((12, 12, 4), 4, 4),
        ((12, 20, 9), 0, 9),
    ],
)
def test_images_and_labels_are_those_of_the_file(tmp_path, shape, asked, channels):
    given = arrays(shape)
    np.savez(tmp_path / "a.npz", **given)
    pair = load(tmp_path / "a.npz", image_channels=asked)
    assert (len(pair.train), len(pair.val), pair.augmentation) == (20, 10, "shift_flip")
    assert pair.preprocessing.image_size == size_of(*shape[:2])
    assert pair.class_names == [str(label) for label in range(10)]
    for index in range(10):
        image, label = pair.val[0, index]
        expected = given["x_test"][index].reshape(*shape[:2], -1).transpose(2, 0, 1) / 255
        np.testing.assert_allclose(image, np.broadcast_to(expected, (channels, *shape[:2])), rtol=1e-6)
        assert label == given["y_test"][index]


def test_names_and_labels_in_a_column(tmp_path):
    given = arrays()
    names = [f"class {label}" for label in range(10)]
    np.savez(tmp_path / "plain.npz", **given, class_names=names)
    columns = {name: array[:, None] if name.startswith("y") else array for name, array in given.items()}
    np.savez_compressed(tmp_path / "column.npz", **columns, class_names=names)
    plain, column = (load(tmp_path / f"{name}.npz") for name in ("plain", "column"))
    assert plain.class_names == names
    assert torch.equal(plain.train.source.labels, column.train.source.labels)


def test_classes_without_images_are_named(tmp_path):
    given = arrays()
    given["y_train"] = given["y_train"] % 3
    np.savez(tmp_path / "few.npz", **given)
    notes = load(tmp_path / "few.npz").notes
    assert notes == ["no training image for '3', '4', '5', '6', '7' and 2 more"]


def test_images_of_label_minus_one_are_passed_over(tmp_path):
    given = arrays()
    given["y_train"] = given["y_train"].astype(int)
    given["y_train"][3] = -1
    np.savez(tmp_path / "a.npz", **given)
    pair = load(tmp_path / "a.npz")
    assert (len(pair.train), pair.notes) == (19, ["skipped 1 image without a label"])
    kept = [*range(3), *range(4, 20)]
    assert pair.train.source.labels.tolist() == given["y_train"][kept].tolist()
    assert torch.equal(pair.train.source.images[:, 0], torch.from_numpy(given["x_train"][kept]))


WRONG = {
    "no such file": (None, "not a readable .npz file"),
    "text": ("text", "not a readable .npz file"),
    "missing": (lambda a: a.pop("y_test"), "y_test is missing"),
    "floats": (lambda a: a.update(x_train=a["x_train"] / 255), "x_train is float32, but x_test uint8: use the same"),
    "narrow": (lambda a: a.update(x_test=a["x_test"][:, :3]), r"uint8 \[10, 3, 28, 1\]"),
    "two sizes": (lambda a: a.update(x_test=a["x_test"][:, :20]), "different shapes"),
    "labels of another length": (lambda a: a.update(y_train=a["y_train"][:5]), "expected 20 whole numbers"),
    "floats of another range": (
        lambda a: a.update(x_train=a["x_train"] / 170, x_test=a["x_test"] / 255),
        r"x_train has floats from .* \(x - LOW\)",
    ),
    "not a number": (
        lambda a: a.update(x_train=a["x_train"] / 255, x_test=a["x_test"] * np.nan),
        "x_test has floats from nan to nan",
    ),
    "below 0": (lambda a: a.update(x_train=a["x_train"] / 255, x_test=a["x_test"] / -255), "x_test has floats from -"),
    "int64": (lambda a: a.update(x_train=a["x_train"].astype(int)), "x_train has int64 numbers: use uint8, uint16"),
    "negative": (lambda a: a.update(y_train=a["y_train"].astype(int) - 2), "y_train: the label is -2; expected a name"),
    "no text": (lambda a: a.update(class_names=[b"\xff"] * 10), "class_names: the label .* is not encoded as UTF-8"),
    "empty": (lambda a: a.update(x_test=a["x_test"][:0], y_test=a["y_test"][:0]), "y_test is uint8"),
    "no training labels": (
        lambda a: a.update(y_train=np.full(20, -1)),
        "the training set is empty: at least one image is needed.",
    ),
    "no validation labels": (lambda a: a.update(y_test=np.full(10, -1)), "the validation set is empty: at least one"),
    "a name alone": (lambda a: a.update(class_names=np.array("a")), "has 1 class names"),
    "cut off": ("cut off", "not a readable .npz file"),
    "one array": ("one array", "not a readable .npz file"),
    "a policy of Pillow's": (
        lambda a: a.update(x_train=a["x_train"] / 255, x_test=a["x_test"] / 255),
        "randaugment needs 8-bit RGB images, but .* 3 .* of float32",
    ),
    "objects": (lambda a: a.update(x_train=np.array([{}] * 20)), "not a readable .npz file"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_file_is_one_line(tmp_path, wrong):
    change, message = WRONG[wrong]
    file = tmp_path / "a.npz"
    if change == "text":
        file.write_text("not an archive")
    elif change == "cut off":
        np.savez(file, **arrays())
        file.write_bytes(file.read_bytes()[:3000])
    elif change == "one array":
        with file.open("wb") as stream:
            np.save(stream, arrays()["x_test"])
    elif change:
        given = arrays()
        change(given)
        np.savez(file, **given)
    with pytest.raises(UserError, match=message) as caught:
        load(file, augmentation="randaugment" if "policy" in wrong else "auto")
    assert "\n" not in str(caught.value)
