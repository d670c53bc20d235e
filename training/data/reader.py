"""Makes one batch from its key: the part of loading that runs in the worker processes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial

import torch
from torch.utils.data import Dataset

from training.data.bundle import ImageDataset
from training.data.images import ImageError
from training.data.randomness import preserved_generators
from training.data.sampler import BatchKey
from training.errors import UserError

BAD_IMAGE_BUDGET = 0.001
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
        bad_paths: Files of this batch that could not be read, each with its reason (only with `skip_bad_images`).
        epoch: Decides the rest of the augmentation.
        encoded: Images that are still to be decoded on the GPU, see `gpu_decode`; `images` is empty then.
    """

    images: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor
    indices: torch.Tensor
    bad_paths: list[str] = field(default_factory=list)
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
        skip_bad_images: Whether an unreadable image weighs 0 instead of being an error.
        read_encoded: Reads an image that is decoded later; None decodes at once.
    """

    def __init__(self, dataset: ImageDataset, skip_bad_images: bool, read_encoded: EncodedReader | None = None) -> None:
        self._dataset, self._skip_bad_images = dataset, skip_bad_images
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
        bad_paths: list[str] = []
        draws = self._dataset.draws(key.epoch, key.indices)
        images: list[torch.Tensor] = []
        for slot, index in enumerate(key.indices.tolist()):
            try:
                image = self._read_image(key.epoch, index, draws[slot])
            except ImageError as error:
                if not self._skip_bad_images:
                    raise
                bad_paths.append(f"{error.path} ({error.reason})")
                weights[slot] = 0
                image = self._next_readable(key.epoch, index, draws[slot])
            images.append(image)
        indices = torch.from_numpy(key.indices)
        labels = self._dataset.source.labels[indices]
        encoded: list[torch.Tensor] = []
        if self._read_encoded:
            images, encoded = [], images
        return Batch(_stack(images), labels, weights, indices, bad_paths, key.epoch, encoded)

    def _next_readable(self, epoch: int, bad_index: int, draws: list[float]) -> torch.Tensor:
        """Return the next image that can be read, so that BatchNorm sees a real image in the slot that weighs 0."""
        total = len(self._dataset)
        for distance in range(1, bad_image_budget(total) + 1):
            try:
                return self._read_image(epoch, (bad_index + distance) % total, draws)
            except ImageError:
                continue
        raise over_budget(total)


def _stack(images: list[torch.Tensor]) -> torch.Tensor:
    """Lay images [3, S, S] into one tensor [B, 3, S, S], channels innermost."""
    if not images:
        return torch.empty(0)
    batch = torch.empty((len(images), *images[0].shape), dtype=images[0].dtype, memory_format=torch.channels_last)
    for slot, image in enumerate(images):
        batch[slot] = image
    return batch


def bad_image_budget(num_samples: int) -> int:
    """Count the images of a set that may be skipped: 0.1 %, at least 1."""
    return max(1, int(BAD_IMAGE_BUDGET * num_samples))


def over_budget(total: int, bad_paths: Iterable[str] = ()) -> UserError:
    """Build the error for more unreadable images than `bad_image_budget(total)`; shows the first few."""
    shown = ", ".join(list(bad_paths)[:PATHS_IN_MESSAGE])
    return UserError(
        f"more than {bad_image_budget(total)} of {total} images cannot be used, the limit of --bad-images skip"
        f"{': ' + shown if shown else ''}. Repair or remove them; scripts/doctor.py --check-data lists all."
    )
