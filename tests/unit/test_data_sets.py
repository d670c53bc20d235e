"""The data sets that come as arrays: digits, fake, and torchvision's own formats on disk."""

from __future__ import annotations

import hashlib
import inspect
import pickle
import random
import urllib.error
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import train_test_split
from torchvision import datasets
from torchvision.transforms import v2

from tests.kit import ELEMENTWISE, assert_same_but_rounding
from zerovision.models.weights_metadata import Preprocessing
from zerovision.training.base.errors import UserError
from zerovision.training.data import DataOptions, load_data
from zerovision.training.data.augment import evaluation_transform
from zerovision.training.data.augmentations import AUGMENTATIONS
from zerovision.training.data.datasets import ImageDataset
from zerovision.training.data.reading.sources import ArraySource
from zerovision.training.data.torchvision_sets import TORCHVISION_SETS

GENERATOR = np.random.Generator(np.random.PCG64(0))


def test_digits_are_the_stratified_split_of_seed_0():
    pair = load_data(DataOptions(seed=9))
    digits = load_digits()
    parts = train_test_split(np.arange(1797), test_size=360, stratify=digits.target, random_state=0)
    (train, val), (train_labels, val_labels) = ([of[part] for part in parts] for of in (digits.images, digits.target))
    assert (len(pair.train), len(pair.val)) == (len(train), len(val)) == (1437, 360)
    assert pair.train_counts == np.bincount(train_labels).tolist()
    np.testing.assert_array_equal(pair.train.source.labels, train_labels)
    np.testing.assert_array_equal(pair.val.source.labels, val_labels)
    sizes = DataOptions(image_size=8, eval_image_size=8)
    for part, images in zip(load_data(sizes).parts.values(), (train, val), strict=True):
        np.testing.assert_array_equal(part.source.images[:, 0], np.rint(images * 255 / 16))
    for index in (0, 17, 359):
        raw = Image.fromarray(np.rint(val[index] * 255 / 16).astype(np.uint8)).convert("RGB")
        from_file = evaluation_transform(pair.preprocessing)(v2.functional.pil_to_tensor(raw))
        image, label = pair.val[0, index]
        assert_same_but_rounding(image, from_file, ELEMENTWISE)
        assert label == val_labels[index]


def test_digits_normalisation_and_sizes():
    pair = load_data(DataOptions(augmentation="none"))
    images = torch.stack([pair.train[0, index][0] for index in range(len(pair.train))])
    assert images.shape == (1437, 3, 32, 32)
    assert images.dtype == torch.float32
    assert images.mean().abs() < 1e-3
    assert abs(images.std() - 1) < 1e-3
    assert load_data(DataOptions(image_size=64)).val[0, 0][0].shape == (3, 64, 64)
    assert load_data(DataOptions(mean=(0, 0, 0), std=(1, 1, 1))).val[0, 0][0].min() == 0


def test_fake_can_be_learnt_and_resized():
    pair = load_data(DataOptions(data="fake"))
    colours = [part.source.images.float().mean((2, 3)).numpy() for part in (pair.train, pair.val)]
    model = LogisticRegression(max_iter=1000).fit(colours[0], pair.train.source.labels)
    assert model.score(colours[1], pair.val.source.labels) > 0.9
    again = load_data(DataOptions(data="fake", seed=1, image_size=48))
    assert again.fingerprint == pair.fingerprint != load_data(DataOptions()).fingerprint
    assert again.train[0, 0][0].shape == (3, 48, 48)


def test_every_augmentation_gives_the_evaluation_shape():
    preprocessing = Preprocessing(24, 27, mean=(0.5,) * 3, std=(0.2,) * 3)
    images = torch.from_numpy(GENERATOR.integers(0, 256, (1, 3, 50, 40), dtype=np.uint8))
    for augmentation in AUGMENTATIONS.values():
        result, _ = ImageDataset(ArraySource(images, torch.zeros(1)), preprocessing, augmentation, seed=0)[0, 0]
        assert (result.shape, result.dtype) == ((3, 24, 24), torch.float32)


def random_states():
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


@pytest.mark.parametrize("augmentation", sorted({*AUGMENTATIONS} - {"none"}))
def test_augmentation_is_a_function_of_seed_epoch_and_index(augmentation):
    """It neither depends on the global generators nor changes them."""
    pair, other = (load_data(DataOptions(augmentation=augmentation, seed=seed)) for seed in (0, 1))
    keys = [(epoch, index) for epoch in range(2) for index in range(4)]
    first = {key: pair.train[key][0] for key in keys}
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    before = random_states()
    for key in reversed(keys):
        assert torch.equal(pair.train[key][0], first[key])
        assert random_states() == before
    for changed in (pair.train[9, 0][0], other.train[0, 0][0]):
        assert not torch.equal(changed, first[0, 0])


# --- torchvision -----------------------------------------------------------------------------------------------------


def write_mnist(root, images, labels, prefix):
    """Write MNIST's idx files: a magic number, the sizes as big-endian int32, the bytes."""
    folder = root / "MNIST" / "raw"
    folder.mkdir(parents=True, exist_ok=True)
    header = np.array([0x803, *images.shape], dtype=">i4").tobytes()
    (folder / f"{prefix}-images-idx3-ubyte").write_bytes(header + images.tobytes())
    header = np.array([0x801, len(labels)], dtype=">i4").tobytes()
    (folder / f"{prefix}-labels-idx1-ubyte").write_bytes(header + labels.tobytes())


def test_torchvision_mnist(tmp_path):
    images = GENERATOR.integers(0, 256, (30, 28, 28), dtype=np.uint8)
    labels = np.arange(30, dtype=np.uint8) % 10
    write_mnist(tmp_path, images[:20], labels[:20], "train")
    write_mnist(tmp_path, images[20:], labels[20:], "t10k")
    pair = load_data(DataOptions(data="torchvision:MNIST", data_root=str(tmp_path), mean=(0,) * 3, std=(1,) * 3))
    assert (len(pair.train), len(pair.val), pair.augmentation) == (20, 10, "shift")
    assert pair.preprocessing.image_size == 28
    assert pair.class_names == datasets.MNIST.classes
    for index in range(10):
        image, label = pair.val[0, index]
        np.testing.assert_allclose(image, np.repeat(images[20 + index][None] / 255, 3, axis=0), rtol=1e-6)
        assert label == labels[20 + index]


def test_torchvision_cifar10(tmp_path, monkeypatch):
    folder = tmp_path / datasets.CIFAR10.base_folder
    folder.mkdir()
    images = GENERATOR.integers(0, 256, (20, 3, 32, 32), dtype=np.uint8)

    def write(name, content):
        data = pickle.dumps(content)
        (folder / name).write_bytes(data)
        return [name, hashlib.md5(data).hexdigest()]

    parts = [
        write(name, {"data": images[part].reshape(10, -1), "labels": list(range(10))})
        for name, part in (("data_batch_1", slice(0, 10)), ("test_batch", slice(10, 20)))
    ]
    names = [f"kind {number}" for number in range(10)]
    meta = write("batches.meta", {"label_names": names})
    monkeypatch.setattr(datasets.CIFAR10, "train_list", parts[:1])
    monkeypatch.setattr(datasets.CIFAR10, "test_list", parts[1:])
    monkeypatch.setattr(datasets.CIFAR10, "meta", {"filename": meta[0], "key": "label_names", "md5": meta[1]})
    options = DataOptions(data="torchvision:CIFAR10", data_root=str(tmp_path))
    pair = load_data(options)
    assert (pair.class_names, pair.augmentation) == (names, "shift_flip")
    assert pair.preprocessing.image_size == 32
    values = images[:10] / 255
    np.testing.assert_allclose(pair.preprocessing.mean, values.mean((0, 2, 3)), atol=6e-5)
    np.testing.assert_allclose(pair.preprocessing.std, values.std((0, 2, 3)), atol=6e-5)
    np.testing.assert_array_equal(pair.val.source.read(4), images[14])
    assert load_data(replace(options, image_size=64)).val[0, 0][0].shape[1] == 64


def test_torchvision_set_of_files(tmp_path):
    base = tmp_path / "dtd" / "dtd"
    (base / "labels").mkdir(parents=True)
    for part in ("train", "val"):
        lines = []
        for name in ("banded", "dotted"):
            (base / "images" / name).mkdir(parents=True, exist_ok=True)
            image = Image.fromarray(GENERATOR.integers(0, 256, (30, 40, 3), dtype=np.uint8))
            image.save(base / "images" / name / f"{part}.png")
            lines.append(f"{name}/{part}.png\n")
        (base / "labels" / f"{part}1.txt").write_text("".join(lines))
    pair = load_data(DataOptions(data="torchvision:DTD", data_root=str(tmp_path), image_size=16))
    assert (pair.class_names, pair.train_counts, pair.val_counts) == (["banded", "dotted"], [1, 1], [1, 1])
    assert (pair.augmentation, pair.preprocessing.resize_size) == ("crop_flip", 18)
    oracle = datasets.DTD(str(tmp_path), split="val")
    np.testing.assert_array_equal(pair.val.source.read(1).permute(1, 2, 0), np.asarray(oracle[1][0]))


@pytest.mark.parametrize("name", TORCHVISION_SETS)
def test_table_fits_the_signatures_of_torchvision(name):
    entry, maker = TORCHVISION_SETS[name], getattr(datasets, name)
    parts = [entry.arguments(is_train=is_train) for is_train in (True, False)]
    for arguments in parts:
        bound = inspect.signature(maker).bind("root", download=True, **arguments)
        splits = getattr(maker, "_SPLITS", None) or getattr(maker, "splits", None)
        if "split" in bound.arguments and splits:
            assert arguments["split"] in splits
    assert parts[0] != parts[1]


def test_a_set_that_was_cut_off_says_how_to_get_it(tmp_path):
    folder = tmp_path / "MNIST" / "raw"
    folder.mkdir(parents=True)
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        (folder / f"{name}-ubyte").write_bytes(b"")
    with pytest.raises(UserError, match=r"missing or incomplete in .*: add --download"):
        load_data(DataOptions(data="torchvision:MNIST", data_root=str(tmp_path)))


@pytest.mark.parametrize("name", TORCHVISION_SETS)
def test_a_set_that_is_not_there_says_how_to_get_it(tmp_path, name):
    with pytest.raises(UserError, match="add --download"):
        load_data(DataOptions(data=f"torchvision:{name}", data_root=str(tmp_path)))


@pytest.mark.parametrize(
    "failure", [urllib.error.URLError("no network"), RuntimeError("Error downloading\nx"), TimeoutError("timed out")]
)
def test_a_failing_download_is_one_line(tmp_path, monkeypatch, failure):
    def fail(*args, **kwargs):
        raise failure

    monkeypatch.setattr("urllib.request.urlopen", fail)
    with pytest.raises(UserError, match="could not be downloaded") as caught:
        load_data(DataOptions(data="torchvision:MNIST", data_root=str(tmp_path), download=True))
    assert "\n" not in str(caught.value)


def test_labels_out_of_range_are_refused(tmp_path):
    images = np.zeros((4, 28, 28), dtype=np.uint8)
    write_mnist(tmp_path, images, np.uint8([0, 1, 2, 3]), "train")
    write_mnist(tmp_path, images, np.uint8([0, 1, 2, 10]), "t10k")
    with pytest.raises(UserError, match="validation labels range from 0 to 10"):
        load_data(DataOptions(data="torchvision:MNIST", data_root=str(tmp_path)))
