"""Decodes a whole data set before it is trained on, and reports all that is wrong at once."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from training.data import DataOptions, load_data
from training.data.datasets import DatasetPair, ImageDataset
from training.data.loader import most_workers
from training.data.reading.image_notes import collected_notes
from training.data.reading.images import ImageError
from training.data.reading.sources import Source
from training.data.workers import end_with_parent, worker_context

IMAGES_PER_MESSAGE = 64
IMAGES_WORTH_A_WORKER = 1000  # fewer are decoded sooner than a worker has started
Size = tuple[int, int]  # width, height in pixels


@dataclass
class DataReport:
    """What `check_data` found.

    Attributes:
        class_names: Name of each label.
        train_counts: Training images of each class.
        val_counts: Validation images of each class.
        label_range: Lowest and highest label that occurs.
        unreadable: Path and reason of each image that cannot be used.
        smallest: Width and height in pixels of the image with the fewest pixels; None where none can be read.
        largest: The same for the most pixels.
        notes: One-line messages from loading.
        image_notes: Path and note of each image that is odd, but can be used.
        decoded: Images that were looked at: all, or a sample.
    """

    class_names: list[str]
    train_counts: list[int]
    val_counts: list[int]
    label_range: tuple[int, int]
    unreadable: list[tuple[str, str]] = field(default_factory=list)
    smallest: Size | None = None
    largest: Size | None = None
    notes: list[str] = field(default_factory=list)
    image_notes: list[tuple[str, str]] = field(default_factory=list)
    decoded: int = 0

    @property
    def images(self) -> int:
        """Images of both parts, readable or not."""
        return sum(self.train_counts) + sum(self.val_counts)


def check_data(options: DataOptions, workers: int | None = None) -> DataReport:
    """Load the data set and decode every image of it.

    Args:
        options: As for training.
        workers: Processes that decode; None uses all cores but one, and none for small sets and images in memory.

    Raises:
        UserError: What keeps the data set from being loaded at all, see `load_data`.
    """
    # every pixel, and each time anew
    return check_datasets(load_data(replace(options, decode="exact", cache="off")), workers)


def check_datasets(datasets: DatasetPair, workers: int | None = None, most: int | None = None) -> DataReport:
    """As `check_data`, of a loaded data set, and of at most `most` images of each part, evenly spread."""
    labels = torch.cat([datasets.train.source.labels, datasets.val.source.labels])
    report = DataReport(
        class_names=datasets.class_names,
        train_counts=datasets.train_counts,
        val_counts=datasets.val_counts,
        label_range=(int(labels.min()), int(labels.max())),
        notes=datasets.notes,
    )
    for dataset in (datasets.train, datasets.val):
        chosen = np.unique(np.linspace(0, len(dataset) - 1, min(len(dataset), most or len(dataset))).astype(int))
        is_worth_it = len(chosen) >= IMAGES_WORTH_A_WORKER and not dataset.source.in_memory
        automatic = most_workers() if is_worth_it else 0
        _decode(dataset, chosen, automatic if workers is None else workers, report)
        report.decoded += len(chosen)
    return report


class _Found(NamedTuple):
    """What reading an image gave: its size, or else path and reason; and the notes on it."""

    size: Size | None
    problem: tuple[str, str] | None
    notes: list[tuple[str, str]]


class _SizeReader(Dataset):
    """Reads each image and keeps what was found."""

    def __init__(self, source: Source, indices: np.ndarray) -> None:
        self._source, self._indices = source, indices

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, position: int) -> _Found:
        try:
            with collected_notes() as notes:
                _, height, width = self._source.read(int(self._indices[position])).shape
        except ImageError as error:
            return _Found(None, (error.path, error.reason), [])
        return _Found((width, height), None, list(notes.items()))


def _decode(dataset: ImageDataset, indices: np.ndarray, workers: int, report: DataReport) -> None:
    loader = DataLoader(
        _SizeReader(dataset.source, indices),
        batch_size=IMAGES_PER_MESSAGE,
        num_workers=workers,
        collate_fn=_unchanged,
        worker_init_fn=end_with_parent,
        multiprocessing_context=worker_context() if workers else None,
    )
    for size, problem, notes in (found for group in loader for found in group):
        report.image_notes += notes
        if problem:
            report.unreadable.append(problem)
        elif size:
            report.smallest = min(report.smallest or size, size, key=_pixels)
            report.largest = max(report.largest or size, size, key=_pixels)


def _pixels(size: Size) -> int:
    return size[0] * size[1]


def _unchanged(results: Any) -> Any:
    return results
