"""`npz:FILE`: images in one NumPy file, with the names of Keras' data sets: x_train, y_train, x_test, y_test."""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import partial
from pathlib import Path

import numpy as np
import torch

from zerovision.models import MOST_IMAGE_CHANNELS
from zerovision.models.sides import size_of
from zerovision.training.base.errors import FileServerError, UserError
from zerovision.training.data import DataOptions
from zerovision.training.data.class_names import Label, label_of, number_classes
from zerovision.training.data.datasets import DatasetPair, make_array_datasets
from zerovision.training.data.image_sizes import MIN_IMAGE_SIZE
from zerovision.training.data.reading.retry import patiently
from zerovision.training.data.reading.sources import ArraySource
from zerovision.training.data.values import to_values

PARTS = ("train", "test")
CLASS_NAMES = "class_names"


def load(options: DataOptions) -> DatasetPair:
    """Load images [N, H, W] or [N, H, W, C] and labels [N], numbers or names; class names [classes] are optional.

    Raises:
        UserError: The file is missing, no such file, or an array has another shape or type.
    """
    path = Path(os.path.expanduser(options.data.partition(":")[2]))
    try:
        arrays = patiently(partial(_arrays, path), path)
    except FileServerError:
        raise
    except Exception as error:  # a damaged archive may end in anything, a single array (.npy) is none
        raise UserError(f"--data npz:{path}: this is no readable .npz file ({' '.join(str(error).split())}).") from None
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
    notes = [f"passed over {left_out} images without a label"] if left_out else []
    if train.images.shape[1:] != val.images.shape[1:]:
        raise UserError(f"--data npz:{path}: images of x_train and x_test have different shapes.")
    if train.values != val.values:
        raise UserError(f"--data npz:{path}: x_train is {train.values}, x_test is {val.values}: give both one type.")
    size = size_of(*train.images.shape[2:])
    return make_array_datasets(train, val, names, options, image_size=size, augmentation="shift_flip", notes=notes)


def _arrays(path: Path) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def _labels(arrays: dict[str, np.ndarray], part: str, where: str) -> list[Label | None]:
    """Return the labels of a part, None for each image without one; raise UserError if they are no labels."""
    missing = [name for name in (f"x_{part}", f"y_{part}") if name not in arrays]
    if missing:
        raise UserError(f"{where}: {missing[0]} is missing; expected x_train, y_train, x_test, y_test.")
    images, labels = arrays[f"x_{part}"], arrays[f"y_{part}"]
    labels = labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels  # as Keras' CIFAR-10
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
    is_narrow = height != width and min(height, width) < MIN_IMAGE_SIZE  # as if channels came first
    if not 1 <= channels <= MOST_IMAGE_CHANNELS or is_narrow:
        raise UserError(
            f"{where}: x_{part} is {images.dtype} {list(images.shape)}; expected images "
            f"[N, H, W] or [N, H, W, C] with up to {MOST_IMAGE_CHANNELS} channels C."
        )
    numbers = np.array(labels)
    kept = slice(None) if (numbers >= 0).all() else numbers >= 0
    values, kind = to_values(images[kept], f"{where}: x_{part}")
    return ArraySource(values.permute(0, 3, 1, 2).contiguous(), torch.from_numpy(numbers[kept]), values=kind)
