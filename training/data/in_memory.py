"""Small data sets: all images in one tensor on the device, a batch is an index into it."""

from __future__ import annotations

import numpy as np
import torch

from training.data.datasets import ImageDataset
from training.data.reader import Batch
from training.data.reading.sources import ArraySource
from training.data.sampler import BatchKey

MAX_BYTES = 2 * 10**9
MAX_SHARE_OF_GPU = 0.25  # of the memory that is free before the model is there


class InMemoryImages:
    """A whole set on the device, and its batches, finished.

    Args:
        dataset: A set with an augmentation that works on batches.
        images: Its images, uint8 [N, 1 or 3, H, W].
        device: Where the images are kept.
    """

    def __init__(self, dataset: ImageDataset, images: torch.Tensor, device: torch.device) -> None:
        self._dataset = dataset
        images = _at_final_size(dataset, images)
        bordered = dataset.batch_transforms.with_border(images.permute(0, 2, 3, 1).contiguous())
        self._bordered = bordered.to(device)

    def batch(self, key: BatchKey) -> Batch:
        """Return the batch of a key: images float32 [B, 3, S, S] on the device, all else on the CPU."""
        images = self._dataset.batch_transforms.from_set(self._bordered, key.indices, key.epoch, key.indices)
        indices = torch.from_numpy(key.indices)
        labels = self._dataset.source.labels[indices]
        return Batch(images, labels, torch.from_numpy(key.weights), indices, epoch=key.epoch)


def _at_final_size(dataset: ImageDataset, stored: torch.Tensor) -> torch.Tensor:
    """Return uint8 [N, 1 or 3, S, S], each image resized as `ImageDataset.read` does it: not one bit may differ."""
    size = dataset.batch_transforms.size
    if stored.shape[2:] == (size, size):
        return stored
    return torch.stack([dataset.read(0, index, [])[: stored.shape[1]] for index in range(len(dataset))])


def images_on_device(dataset: ImageDataset, device: torch.device) -> InMemoryImages | None:
    """Put a set into the memory of `device`, if it is one of arrays, small enough, and augmented in batches."""
    source = dataset.source
    if not isinstance(source, ArraySource) or not dataset.steps.in_batches:
        return None
    side = dataset.batch_transforms.size + 2 * dataset.batch_transforms.border
    bound = MAX_BYTES
    if device.type == "cuda":
        bound = min(bound, int(MAX_SHARE_OF_GPU * torch.cuda.mem_get_info(device)[0]))
    fits = int(np.prod([*source.images.shape[:2], side, side])) <= bound
    return InMemoryImages(dataset, source.images, device) if fits else None
