"""scikit-learn's handwritten digits: real images that need no download (Alpaydin & Kaynak, UCI, 1998)."""

from __future__ import annotations

import numpy as np
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional

from training.data import DataOptions
from training.data.datasets import DatasetPair, make_array_datasets
from training.data.reading.sources import ArraySource

IMAGE_SIZE = 32
VAL_IMAGES = 360
MAX_VALUE = 16  # the 8x8 cells count ink from 0 to 16


def load(options: DataOptions) -> DatasetPair:
    """Load 1,437 training and 360 validation digits; the split is stratified and the same for every seed."""
    digits = load_digits()
    parts = train_test_split(
        np.arange(len(digits.target)), test_size=VAL_IMAGES, stratify=digits.target, random_state=0
    )
    size = options.image_size or IMAGE_SIZE
    sides = (size, options.eval_image_size or size)
    raw = torch.from_numpy(np.rint(digits.images * (255 / MAX_VALUE)).astype(np.uint8)).unsqueeze(1)
    # resized once here: 1,797 grey images take 2 MB at 32 pixels
    labels, filter_mode = torch.from_numpy(digits.target).long(), InterpolationMode(options.interpolation)
    train, val = (
        ArraySource(functional.resize(raw[indices], [side, side], filter_mode, antialias=True), labels[indices])
        for indices, side in zip(parts, sides, strict=True)
    )
    return make_array_datasets(train, val, [str(name) for name in digits.target_names], options, image_size=IMAGE_SIZE)
