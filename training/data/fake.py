"""Images that are made up: waves whose direction and colour tell the class, under noise."""

from __future__ import annotations

import math

import numpy as np
import torch

from training.data import DataOptions
from training.data.datasets import DatasetDefaults, DatasetPair, make_dataset_pair
from training.data.reading.sources import ArraySource, fingerprint_arrays, pixel_statistics

CLASSES = 10
TRAIN_IMAGES, VAL_IMAGES = 1000, 200
IMAGE_SIZE = 32
NOISE_LEVELS = 40


def load(options: DataOptions) -> DatasetPair:
    """Make the images: the same for every seed, kept at 32 pixels and resized when another size is asked for."""
    train, val = make_source(TRAIN_IMAGES, stream=0), make_source(VAL_IMAGES, stream=1)
    class_names = [f"wave-{label}" for label in range(CLASSES)]
    mean, std = pixel_statistics(train.images)
    defaults = DatasetDefaults(IMAGE_SIZE, "shift", centre_crop=False, mean=mean, std=std)
    return make_dataset_pair(train, val, class_names, defaults, options, fingerprint_arrays(class_names, train, val))


def make_source(num_images: int, stream: int) -> ArraySource:
    """Make `num_images` with labels 0, 1, ... in turn; another `stream` gives other noise and phases."""
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
