"""Images that a data set has twice, byte for byte: in training and in evaluation, or under two labels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from zerovision.training.data.datasets import DatasetPair
from zerovision.training.data.reading.sources import UNKNOWN

NAMED = 3


@dataclass
class Duplicates:
    """Images with the content of another one.

    Attributes:
        leaked: Validation or test images that are training images too.
        mislabelled: Images with the content of one that has another label.
        repeated: Training images beyond the first of each content.
        examples: By the name of one of these counts, a few pairs of paths.
    """

    leaked: int = 0
    mislabelled: int = 0
    repeated: int = 0
    examples: dict[str, list[tuple[str, str]]] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """Return what was found and what to do about it, a line each."""
        texts = {
            "leaked": "validation or test images are identical to training images, so their scores are too good: "
            "remove them from one of the two parts",
            "mislabelled": "images are identical to one with another label: remove the wrong ones, or give all labels "
            "to each image by --task multilabel",
            "repeated": "training images are identical to others, and so count more than once",
        }
        return [
            f"{count} {text} ({'; '.join(f'{one} = {other}' for one, other in self.examples[name])}"
            f"{'; ...' if count > len(self.examples[name]) else ''})"
            for name, text in texts.items()
            if (count := getattr(self, name))
        ]


def first_of_each(digests: np.ndarray, order: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the known ones of `order`, in which equal digests stand together; whether each is its content's first; and
    which that is."""
    order = order[digests[order] != UNKNOWN]
    values = digests[order]
    is_first = np.r_[True, values[1:] != values[:-1]] if len(values) else np.empty(0, dtype=bool)
    return order, is_first, order[is_first][np.cumsum(is_first) - 1]


def find_duplicates(datasets: DatasetPair, digests: Mapping[str, np.ndarray]) -> Duplicates:
    """Find equal images by the digests of their files.

    Args:
        datasets: The sets.
        digests: By the name of a part, int64 [N], see `reading.sources.digest_of`; a part may be missing.
    """
    parts = [(name, set_) for name, set_ in datasets.parts.items() if name in digests]
    all_digests = np.concatenate([digests[name] for name, _ in parts])
    labels = np.concatenate([set_.source.labels.numpy() for _, set_ in parts])
    is_train = np.concatenate([np.full(len(set_), name == "train") for name, set_ in parts])
    starts = np.cumsum([0, *(len(set_) for _, set_ in parts)])

    def path(position: int) -> str:
        part = int(np.searchsorted(starts, position, side="right")) - 1
        return parts[part][1].source.name(int(position - starts[part]))

    # Of equal digests, which stand together, training images come first, and then the order is that of the set.
    order, is_first, firsts = first_of_each(all_digests, np.lexsort((~is_train, all_digests)))
    found = {
        "leaked": ~is_train[order] & is_train[firsts],
        "mislabelled": labels[order] != labels[firsts],
        "repeated": ~is_first & is_train[order],
    }
    return Duplicates(
        **{name: int(is_so.sum()) for name, is_so in found.items()},
        examples={
            name: [
                (path(int(own)), path(int(first)))
                for own, first in zip(order[is_so][:NAMED], firsts[is_so], strict=False)
            ]
            for name, is_so in found.items()
        },
    )
