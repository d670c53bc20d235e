"""Moves batches to the device, while a GPU computes the previous batch; small data sets are kept on the device."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator

import numpy as np
import torch

from zerovision.training.data.datasets import ImageDataset
from zerovision.training.data.reader import Batch, batch_of
from zerovision.training.data.reading.sources import ArraySource
from zerovision.training.data.sampler import BatchKey
from zerovision.training.data.transfer import to_device

MAX_BYTES = 2 * 10**9
MAX_SHARE_OF_GPU = 0.25  # of the memory that is free before the model is loaded


def batches_on_device(batches: Iterable[Batch], dataset: ImageDataset, device: torch.device) -> Iterator[Batch]:
    """Yield the batches with transformed images, labels, targets and weights on `device`; indices stay on the CPU.

    On a GPU, copies and transforms run on a separate stream, one batch ahead of the computation.
    """
    if device.type != "cuda":
        yield from (_transformed(batch, dataset, device) for batch in batches)
        return
    stream = _side_stream(device)
    ahead: tuple[Batch, torch.cuda.Event] | None = None
    remaining = iter(batches)
    while True:
        with torch.cuda.stream(stream):
            batch = next(remaining, None)
            following = (_transformed(batch, dataset, device), stream.record_event()) if batch is not None else None
        if ahead is not None:
            yield _ready(*ahead, device)
        if following is None:
            return
        ahead = following


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    """Return the one stream that all loaders share, because the allocator never reuses memory across streams."""
    return torch.cuda.Stream(device)


def _transformed(batch: Batch, dataset: ImageDataset, device: torch.device) -> Batch:
    images, labels, weights = (to_device(tensor, device) for tensor in (batch.images, batch.labels, batch.weights))
    dataset = dataset.for_epoch(batch.epoch)
    targets = None if dataset.sets is None else to_device(dataset.sets.targets[batch.labels], device)
    if not batch.is_transformed:
        images = dataset.batch_transforms(images, batch.epoch, batch.draw_keys)
    if dataset.mixing is not None:
        images, targets = dataset.mixing(images, labels, batch.weights.numpy(), batch.epoch, batch.leaf, targets)
    own = None if batch.loss_weights is None else to_device(batch.loss_weights, device)
    return dataclasses.replace(batch, images=images, labels=labels, weights=weights, targets=targets, loss_weights=own)


def _ready(batch: Batch, copied: torch.cuda.Event, device: torch.device) -> Batch:
    current = torch.cuda.current_stream(device)
    current.wait_event(copied)
    for tensor in (batch.images, batch.labels, batch.weights, batch.targets, batch.loss_weights):
        if tensor is not None:
            tensor.record_stream(current)  # its memory must not be reused by the other stream while this one reads it
    return batch


class ImagesOnDevice:
    """All images of a set in one tensor on the device, from which batches are selected by index and then transformed.

    Args:
        dataset: A set of arrays whose augmentation can be applied to whole batches.
        images: Images of the set, uint8 or float32 [N, 1 or C, H, W].
        device: The device that stores the images.
    """

    def __init__(self, dataset: ImageDataset, images: torch.Tensor, device: torch.device) -> None:
        self._dataset, self._images, self._device = dataset, images, device
        self._fill(dataset.for_epoch(0))

    def _fill(self, dataset: ImageDataset) -> None:
        """Copy the images to the device, resized and padded as `dataset` requires."""
        images = self._images
        if images.shape[2:] != dataset.preprocessing.sides:
            # `ImageDataset.read` resizes each image, so that the result is bit-identical
            images = torch.stack([dataset.read(0, index, [])[: images.shape[1]] for index in range(len(dataset))])
        bordered = dataset.batch_transforms.with_border(images.permute(0, 2, 3, 1).contiguous())
        self._filled_with, self._bordered = dataset, bordered.to(self._device)

    def batch(self, key: BatchKey) -> Batch:
        """Return the batch for a key: images float32 [B, C, S, S] on the device, the other tensors on the CPU."""
        dataset = self._dataset.for_epoch(key.epoch)
        if dataset is not self._filled_with:
            self._fill(dataset)
        images = dataset.batch_transforms.from_set(self._bordered, key.indices, key.epoch, key.draw_keys)
        return batch_of(key, dataset.source, images, is_transformed=True)


def images_on_device(dataset: ImageDataset, device: torch.device) -> ImagesOnDevice | None:
    """Copy a set to `device` if it consists of arrays, is small, and is augmented in batches; otherwise return None."""
    source = dataset.source
    if not isinstance(source, ArraySource) or not dataset.augmentation.in_batches:
        return None
    shape = [side + 2 * dataset.batch_transforms.border for side in dataset.preprocessing.sides]
    bound = MAX_BYTES
    if device.type == "cuda":
        bound = min(bound, int(MAX_SHARE_OF_GPU * torch.cuda.mem_get_info(device)[0]))
    fits = int(np.prod([*source.images.shape[:2], *shape])) * source.images.element_size() <= bound
    return ImagesOnDevice(dataset, source.images, device) if fits else None
