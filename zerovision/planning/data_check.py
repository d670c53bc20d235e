"""Decodes a whole data set before training, finds identical images, and reports all problems together."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch.utils.data import DataLoader, Dataset

from zerovision.training.base.errors import FileServerError, printable
from zerovision.training.data import DataOptions, load_data
from zerovision.training.data.augment import THINNEST_SIDES
from zerovision.training.data.datasets import DatasetPair, count_labels
from zerovision.training.data.loader import most_workers
from zerovision.training.data.reader import end_with_parent, worker_context
from zerovision.training.data.reading.files import ImageError
from zerovision.training.data.reading.sources import UNKNOWN, Source
from zerovision.training.data.settings import READ_LISTS

NAMED = 3
CURES = {
    "leaked": "validation or test images are identical to training images, so scores are too high: "
    "remove them from one part",
    "mislabelled": "images are identical to one with another label: remove the wrong ones, or give each image "
    f"all its labels with {READ_LISTS}",
    "repeated": "training images are identical to others, and so count more than once",
}


class Equal(NamedTuple):
    """The number of images that are identical to another one in a way listed in `CURES`, and a few pairs of paths."""

    images: int
    examples: list[tuple[str, str]]


def first_of_equal(digests: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the files that have a digest, int64 [K], and, for each, of the first identical file.

    Args:
        digests: digests of the files, int64 [N], `UNKNOWN` for a file without one; see `reading.sources.digest_of`.
    """
    order = np.flatnonzero(digests != UNKNOWN)
    _, first_of, content = np.unique(digests[order], return_index=True, return_inverse=True)
    return order, order[first_of][content]


def equal_images(datasets: DatasetPair, digests: Mapping[str, np.ndarray]) -> dict[str, Equal]:
    """Find identical images by the digests of their files, int64 [N] per part; see `first_of_equal`."""
    sources = {name: set_.source for name, set_ in datasets.parts.items()}
    labels = np.concatenate([source.labels.numpy() for source in sources.values()])
    parts = np.repeat(list(sources), [len(source.labels) for source in sources.values()])
    positions = np.concatenate([np.arange(len(source.labels)) for source in sources.values()])
    # the training images come first, so the first of several identical images is a training image if there is one
    order, firsts = first_of_equal(np.concatenate([digests[name] for name in sources]))
    found = {
        "leaked": (parts[order] != "train") & (parts[firsts] == "train"),
        "mislabelled": labels[order] != labels[firsts],
        "repeated": (order != firsts) & (parts[order] == "train"),
    }

    def path(image: int) -> str:
        return sources[parts[image]].name(int(positions[image]))

    return {
        kind: Equal(int(is_so.sum()), [(path(order[one]), path(firsts[one])) for one in np.flatnonzero(is_so)[:NAMED]])
        for kind, is_so in found.items()
    }


def lines_of(found: Mapping[str, Equal]) -> Iterator[str]:
    """Yield one line for each kind of finding, with advice on what to do about it."""
    for kind, (images, examples) in found.items():
        if images:
            pairs = "; ".join(f"{one} = {other}" for one, other in examples)
            yield f"{images} {CURES[kind]} ({pairs}{'; ...' if images > len(examples) else ''})"


IMAGES_PER_MESSAGE = 64
IMAGES_WORTH_A_WORKER = 1000  # fewer images are decoded before a worker has started
TITLES = {"train": "train", "val": "validation", "test": "test"}
Size = tuple[int, int]  # width, height in pixels


@dataclass
class DataReport:
    """The result of `check_data`."""

    datasets: DatasetPair
    sizes: list[Size] = field(default_factory=list)  # of the smallest and the largest readable image, if any
    unreadable: list[tuple[str, str]] = field(default_factory=list)  # path of each, and the reason
    image_notes: list[tuple[str, str]] = field(default_factory=list)  # path of an unusual but usable image, a note
    digests: dict[str, np.ndarray] = field(default_factory=dict)  # of the files read, int64 [N] for each part

    @property
    def images(self) -> int:
        """The number of images in all parts, readable or not."""
        return sum(map(len, self.datasets.parts.values()))


def check_data(options: DataOptions, workers: int | None = None) -> DataReport:
    """Load the data set and decode every image.

    Args:
        options: The options that training uses.
        workers: Number of decoding processes; None means all cores but one, or none for small sets and images in
            memory.

    Raises:
        UserError: If the data set cannot be loaded at all; see `load_data`.
    """
    decode = "exact" if options.decode == "cpu" else options.decode
    report = DataReport(load_data(replace(options, decode=decode, cache="off")))  # decode every pixel, and use no cache
    for name, part in report.datasets.parts.items():
        is_worth_it = len(part) >= IMAGES_WORTH_A_WORKER and not part.source.in_memory
        automatic = most_workers() if is_worth_it else 0
        decode_part(name, automatic if workers is None else workers, report)
    return report


def print_report(data: str, report: DataReport) -> None:
    """Print the report on `data`: counts by class, sizes, and each unusable image."""
    console, datasets = Console(highlight=False, soft_wrap=True), report.datasets
    parts, names, sets = datasets.parts, datasets.class_names, datasets.sets
    table = Table("class", *(TITLES[name] for name in parts), title=escape(printable(f"{data}: {len(names)} classes")))
    columns = [count_labels(part.source.labels, names, name, sets) for name, part in parts.items()]
    for name, *counts in sorted(zip(names, *columns, strict=True), key=lambda row: sum(row[1:])):
        table.add_row(escape(printable(name)), *map(str, counts))
    table.add_row("all", *(str(len(part)) for part in parts.values()))
    console.print(table)
    lines = [f"note: {note}" for note in datasets.notes]
    lines += lines_of(equal_images(datasets, report.digests))
    if report.sizes:
        smallest, largest = (f"{width}x{height}" for width, height in report.sizes)
        lines.append(f"smallest image {smallest}, largest {largest} pixels")
    lines += [f"note on {path!r}: {note}" for path, note in report.image_notes]
    lines += [f"unreadable: {path!r}: {reason}" for path, reason in report.unreadable]
    lines.append(f"{len(report.unreadable)} of {report.images} images cannot be used")
    for line in lines:
        console.print(printable(line), markup=False)


# For an image: its size, or path and reason if it is unreadable; the notes on it; its file's digest.
Found = tuple[Size | None, tuple[str, str] | None, list[tuple[str, str]], int]


class _SizeReader(Dataset):
    """Decodes each image and returns its size and notes."""

    def __init__(self, source: Source) -> None:
        self._source = source

    def __len__(self) -> int:
        return len(self._source.labels)

    def __getitem__(self, index: int) -> Found | FileServerError:
        try:
            self._source.digests = digests = dict[int, int]()
            self._source.notes = notes = dict[str, str]()
            _, height, width = self._source.read(index).shape
        except ImageError as error:
            return None, (error.path, error.reason), [], UNKNOWN
        except FileServerError as error:  # if it were raised, DataLoader would add its own traceback
            return error
        name, found = self._source.name(index), list(notes.items())
        if THINNEST_SIDES * min(width, height) < max(width, height):
            found.append((name, f"{width}x{height} pixels, thinner than 1:{THINNEST_SIDES}"))
        return (width, height), None, found, digests.get(index, UNKNOWN)


def decode_part(name: str, workers: int, report: DataReport) -> None:
    """Decode all images of a part ("train", ...) and add the findings to the report, or raise a FileServerError."""
    images = _SizeReader(report.datasets.parts[name].source)
    report.digests[name] = np.full(len(images), UNKNOWN, dtype=np.int64)
    loader = DataLoader(
        images,
        batch_size=IMAGES_PER_MESSAGE,
        num_workers=workers,
        collate_fn=list,
        worker_init_fn=end_with_parent,
        multiprocessing_context=worker_context() if workers else None,
    )
    for index, found in enumerate(found for group in loader for found in group):
        if isinstance(found, FileServerError):
            raise found
        size, problem, notes, digest = found
        report.image_notes += notes
        report.digests[name][index] = digest
        if problem:
            report.unreadable.append(problem)
        if size:
            sizes = [*report.sizes, size]
            report.sizes = [min(sizes, key=math.prod), max(sizes, key=math.prod)]
