"""scikit-learn's handwritten digits: real images that need no download (Alpaydin & Kaynak, UCI, 1998)."""

from __future__ import annotations

from importlib.metadata import distribution

import numpy as np
import torch
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional

from zerovision.models.sides import sides
from zerovision.training.data import DataOptions
from zerovision.training.data.datasets import DatasetPair, make_array_datasets
from zerovision.training.data.reading.sources import ArraySource

IMAGE_SIZE = 32
VAL_IMAGES = 360
MAX_VALUE = 16  # the 8x8 cells count ink from 0 to 16


def load(options: DataOptions) -> DatasetPair:
    """Load 1,437 training and 360 validation digits; the split is stratified and the same for every seed."""
    ink, targets = read_digits()
    parts = split(targets)
    size = options.image_size or IMAGE_SIZE
    sizes = (size, options.eval_image_size or size)
    raw = torch.from_numpy(np.rint(ink * (255 / MAX_VALUE)).astype(np.uint8)).unsqueeze(1)
    # resized once here: 1,797 grey images take 2 MB at 32 pixels
    labels, filter_mode = torch.from_numpy(targets), InterpolationMode(options.interpolation)
    train, val = (
        ArraySource(functional.resize(raw[indices], sides(size), filter_mode, antialias=True), labels[indices])
        for indices, size in zip(parts, sizes, strict=True)
    )
    return make_array_datasets(train, val, [str(digit) for digit in range(10)], options, image_size=IMAGE_SIZE)


def read_digits() -> tuple[np.ndarray, np.ndarray]:
    """Return float64 [1797, 8, 8] and int64 [1797] from scikit-learn's file; its own reader takes seconds to import."""
    file = distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")
    rows = np.loadtxt(str(file), delimiter=",")
    return rows[:, :-1].reshape(-1, 8, 8), rows[:, -1].astype(np.int64)


def split(targets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices that `sklearn.model_selection.train_test_split` gives with `random_state=0`, stratified."""
    random = np.random.RandomState(0)
    counts = np.bincount(targets)
    train_counts = _shares(counts, len(targets) - VAL_IMAGES, random)
    val_counts = _shares(counts - train_counts, VAL_IMAGES, random)
    train, val = [], []
    for digit, (for_train, for_val) in enumerate(zip(train_counts, val_counts, strict=True)):
        shuffled = np.flatnonzero(targets == digit)[random.permutation(counts[digit])]
        train.append(shuffled[:for_train])
        val.append(shuffled[for_train : for_train + for_val])
    return random.permutation(np.concatenate(train)), random.permutation(np.concatenate(val))


def _shares(counts: np.ndarray, total: int, random: np.random.RandomState) -> np.ndarray:
    """Divide `total` in proportion to the counts: rounded down, then one more where the rest is largest."""
    exact = counts / counts.sum() * total
    shares = np.floor(exact).astype(np.int64)
    for rest in np.unique(exact - shares)[::-1]:
        equal = np.flatnonzero(exact - np.floor(exact) == rest)
        missing = total - shares.sum()
        if not missing:
            break
        shares[random.choice(equal, size=min(len(equal), missing), replace=False)] += 1
    return shares
