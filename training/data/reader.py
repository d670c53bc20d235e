"""Makes one batch from its key: the part of loading that runs in the worker processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial

import torch
from torch.utils.data import Dataset

from training.data.datasets import ImageDataset
from training.data.randomness import preserved_generators
from training.data.reading.image_notes import collected_notes
from training.data.reading.images import ImageError
from training.data.sampler import BatchKey
from training.errors import UserError

PATHS_IN_MESSAGE = 3


# from a set, epoch, index and draws to the bytes of a file, uint8 [n], or an image, uint8 [3, S, S]
EncodedReader = Callable[[ImageDataset, int, int, list[float]], torch.Tensor]


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one rank.

    Attributes:
        images: uint8 [B, 3, S, S] as read, or float32, normalised, as the loaders hand them out.
        labels: int64 [B].
        weights: float32 [B]; 0 for padding and for images that could not be read, else 1.
        indices: int64 [B], positions in the data set.
        bad_images: Path and reason of the images of this batch that could not be read; others stand in their slots.
        notes: Path and note of the images that are odd, see `image_notes`.
        epoch: Decides the rest of the augmentation.
        encoded: Images that are still to be decoded on the GPU, see `gpu_decode`; `images` is empty then.
    """

    images: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor
    indices: torch.Tensor
    bad_images: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    epoch: int = 0
    encoded: list[torch.Tensor] = field(default_factory=list)

    def pin_memory(self) -> Batch:
        """Return the batch in page-locked memory, from which copies to a GPU run beside the computation."""
        pinned = {name: getattr(self, name).pin_memory() for name in ("images", "labels", "weights")}
        return dataclasses.replace(self, **pinned)


@dataclass(frozen=True)
class ReadFailure:
    """A user's mistake found by a worker: as data, because DataLoader turns exceptions into pages of traceback."""

    message: str


class BatchReader(Dataset):
    """Makes the batch of a key; runs in the worker processes.

    Args:
        dataset: The samples.
        most_bad: Images of the set that may be unreadable, and then weigh 0; with 0 the first is an error.
        read_encoded: Reads an image that is decoded later; None decodes at once.
    """

    def __init__(self, dataset: ImageDataset, most_bad: int, read_encoded: EncodedReader | None = None) -> None:
        self._dataset, self._most_bad = dataset, most_bad
        self._read_image = dataset.read if read_encoded is None else partial(read_encoded, dataset)
        self._read_encoded = read_encoded is not None

    def __getitem__(self, key: BatchKey) -> Batch | ReadFailure:
        try:
            with preserved_generators() if self._dataset.steps.randaugment else nullcontext():
                return self._read(key)
        except UserError as error:
            return ReadFailure(str(error))

    def _read(self, key: BatchKey) -> Batch:
        weights = torch.from_numpy(key.weights)
        bad_images: dict[str, str] = {}
        draws = self._dataset.draws(key.epoch, key.indices)
        images: list[torch.Tensor] = []
        with collected_notes() as notes:
            for slot, index in enumerate(key.indices.tolist()):
                read = partial(self._read_image, key.epoch, draws=draws[slot])
                image, error = read_or_replace(read, index, len(self._dataset), self._most_bad)
                if error is not None:
                    bad_images[error.path] = error.reason
                    weights[slot] = 0
                images.append(image)
        indices = torch.from_numpy(key.indices)
        labels = self._dataset.source.labels[indices]
        encoded: list[torch.Tensor] = []
        if self._read_encoded:
            images, encoded = [], images
        return Batch(_stack(images), labels, weights, indices, bad_images, notes, key.epoch, encoded)


def read_or_replace(
    read: Callable[[int], torch.Tensor], index: int, total: int, most_bad: int
) -> tuple[torch.Tensor, ImageError | None]:
    """Read an image of a set, or the next one that can be read: BatchNorm sees a real one in the slot that weighs 0.

    Args:
        read: from an index to an image.
        index: of the image.
        total: images of the set.
        most_bad: images of it that may be unreadable.

    Returns:
        The image, and why the one at `index` could not be read.

    Raises:
        ImageError: The image cannot be read, and none may be bad.
        UserError: More than `most_bad` images in a row cannot be read.
    """
    try:
        return read(index), None
    except ImageError as error:
        if not most_bad:
            raise
        problem = error
    for distance in range(1, most_bad + 1):
        with suppress(ImageError):
            return read((index + distance) % total), problem
    raise over_budget(total, most_bad)


def _stack(images: list[torch.Tensor]) -> torch.Tensor:
    """Lay images [3, S, S] into one tensor [B, 3, S, S], channels innermost."""
    if not images:
        return torch.empty(0)
    batch = torch.empty((len(images), *images[0].shape), dtype=images[0].dtype, memory_format=torch.channels_last)
    for slot, image in enumerate(images):
        batch[slot] = image
    return batch


def bad_image_budget(share: Fraction, total: int) -> int:
    """Return how many of `total` images may be unreadable: the share rounded down, at least 1; none if it is 0."""
    return max(1, int(share * total)) if share else 0


def over_budget(total: int, most_bad: int, bad_paths: Iterable[str] = ()) -> UserError:
    """Build the error for more than `most_bad` unreadable images of `total`; shows the first few."""
    shown = ", ".join(list(bad_paths)[:PATHS_IN_MESSAGE])
    return UserError(
        f"more than {most_bad} of {total} images cannot be used, the limit of --bad-images"
        f"{': ' + shown if shown else ''}. Repair or remove them (scripts/doctor.py --check-data lists all), or allow "
        "a larger share, such as --bad-images skip:0.05."
    )
