"""Finds byte-identical images in a data set: in training and evaluation, or under two labels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from zerovision.training.data.datasets import DatasetPair
from zerovision.training.data.reading.sources import UNKNOWN
from zerovision.training.data.settings import SEVERAL_LABELS

NAMED = 3
CURES = {
    "leaked": "validation or test images are identical to training images, so scores are too high: "
    "remove them from one part",
    "mislabelled": "images are identical to one with another label: remove the wrong ones, or give all labels "
    f"to each image by {SEVERAL_LABELS}",
    "repeated": "training images are identical to others, and so count more than once",
}


class Equal(NamedTuple):
    """The number of images that equal another one in one of the ways in `CURES`, and the paths of a few pairs."""

    images: int
    examples: list[tuple[str, str]]


def first_of_equal(digests: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the indices of the files that have a digest, int64 [K], and of the first file equal to each.

    Args:
        digests: int64 [N], `UNKNOWN` if there is none, see `reading.sources.digest_of`.
    """
    order = np.flatnonzero(digests != UNKNOWN)
    _, first_of, content = np.unique(digests[order], return_index=True, return_inverse=True)
    return order, order[first_of][content]


def equal_images(datasets: DatasetPair, digests: Mapping[str, np.ndarray]) -> dict[str, Equal]:
    """Find equal images by the digests of their files, int64 [N] per part; see `first_of_equal`."""
    sources = {name: set_.source for name, set_ in datasets.parts.items()}
    labels = np.concatenate([source.labels.numpy() for source in sources.values()])
    parts = np.repeat(list(sources), [len(source.labels) for source in sources.values()])
    positions = np.concatenate([np.arange(len(source.labels)) for source in sources.values()])
    # the training images are the first part, so that they are first of equal ones
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
    """Yield one line for each finding, with what to do about it."""
    for kind, (images, examples) in found.items():
        if images:
            pairs = "; ".join(f"{one} = {other}" for one, other in examples)
            yield f"{images} {CURES[kind]} ({pairs}{'; ...' if images > len(examples) else ''})"
