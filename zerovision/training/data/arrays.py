"""Data sets of arrays in memory: `digits`, `fake` and `npz:FILE`.

`digits` contains scikit-learn's handwritten digits, real images that need no download (Alpaydin and Kaynak, "Optical
Recognition of Handwritten Digits", UCI, 1998, CC BY 4.0), in the order of scikit-learn's stratified split with seed 0.
The arrays in a NumPy file are named as in Keras' data sets: x_train, y_train, x_test, y_test.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Iterable
from functools import cache, partial
from pathlib import Path

import numpy as np
import torch
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional

from zerovision.models import MOST_IMAGE_CHANNELS, sides, size_of
from zerovision.training.base.errors import FileServerError, UserError
from zerovision.training.base.units import plural
from zerovision.training.data import DataOptions
from zerovision.training.data.augmentations import MIN_IMAGE_SIZE
from zerovision.training.data.class_names import Label, label_of, number_classes
from zerovision.training.data.datasets import DatasetPair, make_array_datasets
from zerovision.training.data.reading.image_numbers import to_values
from zerovision.training.data.reading.retry import patiently
from zerovision.training.data.reading.sources import ArraySource

IMAGE_SIZE = 32  # of `digits` and `fake`
DIGITS_TO_TRAIN, MOST_INK = 1437, 16
FAKE_CLASSES, FAKE_TRAIN_IMAGES, FAKE_VAL_IMAGES, NOISE_LEVELS = 10, 1000, 200, 40
PARTS = ("train", "test")
CLASS_NAMES = "class_names"


def load(options: DataOptions) -> DatasetPair:
    """Load the data set that `options` names; for errors, see `_load_npz`."""
    return {"digits": _load_digits, "fake": _load_fake}.get(options.data, _load_npz)(options)


def _load_digits(options: DataOptions) -> DatasetPair:
    """Load 1,437 training and 360 validation digits, the same for every seed."""
    with np.load(Path(__file__).with_name("digits.npz")) as file:
        ink, labels = file["ink"], torch.from_numpy(file["labels"]).long()
    raw = torch.from_numpy(np.rint(ink * (255 / MOST_INK)).astype(np.uint8)).unsqueeze(1)
    size, filter_mode = options.image_size or IMAGE_SIZE, InterpolationMode(options.interpolation)
    # resized once here: 1,797 gray images take 2 MB at 32 pixels
    sources = []
    for part, side in (slice(DIGITS_TO_TRAIN), size), (slice(DIGITS_TO_TRAIN, None), options.eval_image_size or size):
        images = functional.resize(raw[part], sides(side), filter_mode, antialias=True)
        sources.append(ArraySource(images, labels[part]))
    train, val = sources
    return make_array_datasets(train, val, [str(digit) for digit in range(10)], options, IMAGE_SIZE)


def _load_fake(options: DataOptions) -> DatasetPair:
    """Generate 32 x 32 images, the same for every seed; they are resized when read if another size is requested."""
    train, val = _waves(FAKE_TRAIN_IMAGES, stream=0), _waves(FAKE_VAL_IMAGES, stream=1)
    return make_array_datasets(train, val, [f"wave-{label}" for label in range(FAKE_CLASSES)], options, IMAGE_SIZE)


@cache  # for programs that train several times
def _waves(num_images: int, stream: int) -> ArraySource:
    """Generate noisy waves whose direction and color depend on the class; the labels cycle through 0, 1, ..."""
    generator = np.random.Generator(np.random.PCG64(stream))
    labels = np.arange(num_images) % FAKE_CLASSES
    rows, columns = np.mgrid[0:IMAGE_SIZE, 0:IMAGE_SIZE] * (2 * math.pi * 3 / IMAGE_SIZE)
    angles = labels * (math.pi / FAKE_CLASSES)
    along = np.cos(angles)[:, None, None] * columns + np.sin(angles)[:, None, None] * rows
    waves = np.sin(along + generator.uniform(0, 2 * math.pi, (num_images, 1, 1)))
    hues = 2 * math.pi * (labels[:, None] / FAKE_CLASSES + np.arange(3) / 3)
    pixels = 127 + 50 * waves[:, None] + 20 * np.cos(hues)[:, :, None, None]
    pixels = pixels + generator.normal(0, NOISE_LEVELS, (num_images, 3, IMAGE_SIZE, IMAGE_SIZE))
    return ArraySource(torch.from_numpy(pixels.clip(0, 255).astype(np.uint8)), torch.from_numpy(labels).long())


def _load_npz(options: DataOptions) -> DatasetPair:
    """Load images [N, H, W] or [N, H, W, C], labels [N] (numbers or names), and any class names, or raise UserError."""
    path = Path(os.path.expanduser(options.data.partition(":")[2]))
    try:
        arrays = patiently(partial(_arrays, path), path)
    except FileServerError:
        raise
    except Exception as error:  # a damaged file, or a .npy file of one array, may raise any exception
        raise UserError(f"--data npz:{path} is not a readable .npz file ({' '.join(str(error).split())}).") from None
    where = f"--data npz:{path}"
    given = [str(name) for name in _labels_in(np.ravel(arrays.get(CLASS_NAMES, [])), f"{where}: {CLASS_NAMES}")]
    every = {part: _labels(arrays, part, where) for part in PARTS}
    known = {label for labels in every.values() for label in labels if label is not None}
    names, numbers = number_classes(known, given, where)
    train, val = (
        _source(arrays, part, where, [-1 if label is None else numbers[label] for label in every[part]])
        for part in PARTS
    )
    left_out = sum(label is None for labels in every.values() for label in labels)
    notes = [f"skipped {plural(left_out, 'image')} without a label"] if left_out else []
    if train.images.shape[1:] != val.images.shape[1:]:
        raise UserError(f"--data npz:{path}: the images of x_train and x_test have different shapes.")
    if train.values != val.values:
        raise UserError(f"--data npz:{path}: x_train is {train.values}, but x_test {val.values}: use the same type.")
    pair = make_array_datasets(train, val, names, options, size_of(*train.images.shape[2:]), "shift_flip").noted(notes)
    pair.val.source.digest = hashlib.sha256(val.images.numpy().data).hexdigest()
    return pair


def _arrays(path: Path) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def _labels(arrays: dict[str, np.ndarray], part: str, where: str) -> list[Label | None]:
    """Return the labels of a part, None for unlabeled images; raise UserError if the array is missing or invalid."""
    missing = [name for name in (f"x_{part}", f"y_{part}") if name not in arrays]
    if missing:
        raise UserError(f"{where}: {missing[0]} is missing; expected x_train, y_train, x_test and y_test.")
    images, labels = arrays[f"x_{part}"], arrays[f"y_{part}"]
    labels = labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels  # as in Keras' CIFAR-10
    if labels.dtype.kind not in "iubUS" or labels.shape != images.shape[:1] or not len(labels):
        raise UserError(
            f"{where}: y_{part} is {labels.dtype} {list(labels.shape)}; expected {len(images)} whole numbers or names, "
            "one per image."
        )
    values, places = np.unique(labels, return_inverse=True)
    found = _labels_in(values, f"{where}: y_{part}")
    return [found[place] for place in places.tolist()]


def _labels_in(values: Iterable[object], where: str) -> list[Label | None]:
    try:
        return [label_of(value) for value in values]
    except ValueError as error:
        raise UserError(f"{where}: {error}.") from None


def _source(arrays: dict[str, np.ndarray], part: str, where: str, labels: list[int]) -> ArraySource:
    images = arrays[f"x_{part}"]
    images = images[..., None] if images.ndim == 3 else images
    height, width, channels = images.shape[1:] if images.ndim == 4 else (0, 0, 0)
    is_narrow = height != width and min(height, width) < MIN_IMAGE_SIZE  # the channels are probably first
    if not 1 <= channels <= MOST_IMAGE_CHANNELS or is_narrow:
        raise UserError(
            f"{where}: x_{part} is {images.dtype} {list(images.shape)}; expected images "
            f"[N, H, W] or [N, H, W, C] with at most {MOST_IMAGE_CHANNELS} channels C."
        )
    numbers = np.array(labels)
    kept = slice(None) if (numbers >= 0).all() else numbers >= 0
    values, kind = to_values(images[kept], f"{where}: x_{part}")
    return ArraySource(values.permute(0, 3, 1, 2).contiguous(), torch.from_numpy(numbers[kept]), values=kind)
