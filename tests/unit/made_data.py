"""Folders of images, and loaders of them, for the tests of data."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path

from PIL import Image

from training.data.datasets import DatasetPair
from training.data.loader import Loader
from training.data.sampler import BatchPlan


def class_folders(root: Path) -> Iterator[Path]:
    """Make and yield the folders of classes a and b in train/ and in val/."""
    for part, name in product(("train", "val"), ("a", "b")):
        (root / part / name).mkdir(parents=True)
        yield root / part / name


def save_animation(path: Path, size: tuple[int, int]) -> None:
    """Write a file of two frames, of (width, height) pixels."""
    frames = [Image.new("RGB", size, colour) for colour in ("red", "lime")]
    frames[0].save(path, save_all=True, append_images=frames[1:])


def train_loader(datasets: DatasetPair, batch_size: int, **options) -> Loader:
    """Return the loader of the only rank, without accumulation."""
    return Loader(datasets.train, BatchPlan(len(datasets.train), batch_size, 1, 1, 0), 0, **options)
