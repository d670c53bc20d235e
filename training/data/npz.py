"""`npz:FILE`: images in one NumPy file, with the names of Keras' data sets: x_train, y_train, x_test, y_test."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import numpy as np
import torch

from models import MOST_IMAGE_CHANNELS
from models.sides import size_of
from training.base.errors import FileServerError, UserError
from training.data import DataOptions
from training.data.datasets import DatasetPair, make_array_datasets
from training.data.image_sizes import MIN_IMAGE_SIZE
from training.data.reading.retry import patiently
from training.data.reading.sources import ArraySource
from training.data.values import to_values

PARTS = ("train", "test")
CLASS_NAMES = "class_names"
MOST_CLASSES = 1_000_000


def load(options: DataOptions) -> DatasetPair:
    """Load images [N, H, W] or [N, H, W, C] and whole labels [N]; class names are optional, str [classes].

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
    train, val = (_source(arrays, part, path) for part in PARTS)
    if train.images.shape[1:] != val.images.shape[1:]:
        raise UserError(f"--data npz:{path}: images of x_train and x_test have different shapes.")
    if train.values != val.values:
        raise UserError(f"--data npz:{path}: x_train is {train.values}, x_test is {val.values}: give both one type.")
    count = int(max(train.labels.max(), val.labels.max())) + 1
    if count > MOST_CLASSES:
        raise UserError(f"--data npz:{path}: there is a label of {count - 1}; expected at most {MOST_CLASSES} classes.")
    names = [str(name) for name in np.ravel(arrays.get(CLASS_NAMES, range(count)))]
    if len(names) < count:
        raise UserError(f"--data npz:{path}: {CLASS_NAMES} has {len(names)} names, the labels are up to {count - 1}.")
    size = size_of(*train.images.shape[2:])
    return make_array_datasets(train, val, names, options, image_size=size, augmentation="shift_flip")


def _arrays(path: Path) -> dict[str, np.ndarray]:
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def _source(arrays: dict[str, np.ndarray], part: str, path: Path) -> ArraySource:
    missing = [name for name in (f"x_{part}", f"y_{part}") if name not in arrays]
    if missing:
        raise UserError(f"--data npz:{path}: {missing[0]} is missing; expected x_train, y_train, x_test, y_test.")
    images, labels = arrays[f"x_{part}"], arrays[f"y_{part}"]
    images = images[..., None] if images.ndim == 3 else images
    height, width, channels = images.shape[1:] if images.ndim == 4 else (0, 0, 0)
    is_narrow = height != width and min(height, width) < MIN_IMAGE_SIZE  # as if channels came first
    if not 1 <= channels <= MOST_IMAGE_CHANNELS or is_narrow:
        raise UserError(
            f"--data npz:{path}: x_{part} is {images.dtype} {list(images.shape)}; expected images "
            f"[N, H, W] or [N, H, W, C] with up to {MOST_IMAGE_CHANNELS} channels C."
        )
    labels = labels[:, 0] if labels.ndim == 2 and labels.shape[1] == 1 else labels  # as Keras' CIFAR-10
    if labels.dtype.kind not in "iu" or labels.shape != images.shape[:1] or not len(labels) or labels.min() < 0:
        raise UserError(
            f"--data npz:{path}: y_{part} is {labels.dtype} {list(labels.shape)}; expected {len(images)} whole numbers "
            "from 0, one per image."
        )
    values, kind = to_values(images, f"--data npz:{path}: x_{part}")
    numbers = torch.from_numpy(labels.astype(np.int64))
    return ArraySource(values.permute(0, 3, 1, 2).contiguous(), numbers, values=kind)
