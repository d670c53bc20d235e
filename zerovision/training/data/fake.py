"""Generated images: waves whose direction and colour depend on the class, with noise."""

from __future__ import annotations

import math

import numpy as np
import torch

from zerovision.training.data import DataOptions
from zerovision.training.data.datasets import DatasetPair, make_array_datasets
from zerovision.training.data.reading.sources import ArraySource

CLASSES = 10
TRAIN_IMAGES, VAL_IMAGES = 1000, 200
IMAGE_SIZE = 32
NOISE_LEVELS = 40


def load(options: DataOptions) -> DatasetPair:
    """Generate the images: the same for every seed, of 32 pixels; another size resizes them when they are read."""
    train, val = _make_source(TRAIN_IMAGES, stream=0), _make_source(VAL_IMAGES, stream=1)
    class_names = [f"wave-{label}" for label in range(CLASSES)]
    return make_array_datasets(train, val, class_names, options, image_size=IMAGE_SIZE)


def _make_source(num_images: int, stream: int) -> ArraySource:
    """Generate `num_images` with labels 0, 1, ... in turn; noise and phases depend on `stream`."""
    generator = np.random.Generator(np.random.PCG64(stream))
    labels = np.arange(num_images) % CLASSES
    rows, columns = np.mgrid[0:IMAGE_SIZE, 0:IMAGE_SIZE] * (2 * math.pi * 3 / IMAGE_SIZE)
    angles = labels * (math.pi / CLASSES)
    along = np.cos(angles)[:, None, None] * columns + np.sin(angles)[:, None, None] * rows
    waves = np.sin(along + generator.uniform(0, 2 * math.pi, (num_images, 1, 1)))
    hues = 2 * math.pi * (labels[:, None] / CLASSES + np.arange(3) / 3)
    pixels = 127 + 50 * waves[:, None] + 20 * np.cos(hues)[:, :, None, None]
    pixels = pixels + generator.normal(0, NOISE_LEVELS, (num_images, 3, IMAGE_SIZE, IMAGE_SIZE))
    images = torch.from_numpy(pixels.clip(0, 255).astype(np.uint8))
    return ArraySource(images, torch.from_numpy(labels).long())
