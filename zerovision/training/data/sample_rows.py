"""A network's outputs for the images of a set, kept for all epochs."""

from __future__ import annotations

import torch

from zerovision.training.data.loader import Loader
from zerovision.training.data.reader import Batch, batch_of
from zerovision.training.data.sampler import BatchKey
from zerovision.training.data.transfer import to_device
from zerovision.training.world.collectives import gather_rows
from zerovision.training.world.world import World


class SampleRows:
    """A network's D outputs for each image of a set, on every rank.

    Args:
        loader: Loader of the images.
        world: The ranks, which read different images.
        stride: Read only every `stride`-th image of the set; the images in between have no rows.

    Attributes:
        labels: int64 [images].
        values: Outputs [images, D] on the device.
        weights: float32 [images], 0 for images that could not be read.
        first: Images and outputs of this rank's first batch.
    """

    def __init__(self, loader: Loader, world: World, stride: int = 1) -> None:
        self._source, self._world, self._stride = loader.dataset.source, world, stride
        self.labels = self._source.labels[::stride]
        self.weights = torch.zeros(len(self.labels))
        self.values = torch.empty(0)
        self.first: tuple[torch.Tensor, ...] = ()

    def add(self, batch: Batch, own: torch.Tensor) -> None:
        """Store the outputs [B, D] for all ranks' batches; a collective."""
        if not self.first:
            self.first, self.values = (batch.images, own), own.new_zeros(len(self.weights), own.shape[1])
        numbers = torch.where(batch.weights > 0, to_device(batch.indices, own.device), -1)
        places = gather_rows(numbers, self._world).view(-1) // self._stride
        # as bytes, because gloo does not support bf16
        rows = gather_rows(own.contiguous().view(torch.uint8).view(-1), self._world).view(own.dtype)
        is_read = places >= 0
        self.values[places[is_read]] = rows.view(len(places), -1)[is_read]
        self.weights[places[is_read].cpu()] = 1.0

    def batch(self, key: BatchKey) -> Batch:
        """Return the batch for a key, with outputs in place of images; unreadable images have weight 0."""
        places = to_device(torch.from_numpy(key.indices), self.values.device)
        key = key._replace(weights=key.weights * self.weights.numpy()[key.indices])
        return batch_of(key, self._source, self.values.index_select(0, places), is_transformed=True)
