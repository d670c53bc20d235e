"""Brings batches to the device, on a GPU beside the computation."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

import torch

from training.data.datasets import ImageDataset
from training.data.reader import Batch
from training.data.transfer import to_device


def batches_on_device(batches: Iterable[Batch], dataset: ImageDataset, device: torch.device) -> Iterator[Batch]:
    """Yield the batches with images, labels and weights on `device`, images finished; indices stay on the CPU.

    On a GPU copying and finishing run on a stream of their own, one batch ahead of the one that is computed.
    """
    if device.type != "cuda":
        yield from (_finished(batch, dataset, device) for batch in batches)
        return
    stream = torch.cuda.Stream(device)
    ahead: tuple[Batch, torch.cuda.Event] | None = None
    remaining = iter(batches)
    while True:
        with torch.cuda.stream(stream):
            batch = next(remaining, None)
            following = (_finished(batch, dataset, device), stream.record_event()) if batch is not None else None
        if ahead is not None:
            yield _handed_over(*ahead, device)
        if following is None:
            return
        ahead = following


def _finished(batch: Batch, dataset: ImageDataset, device: torch.device) -> Batch:
    images, labels, weights = (to_device(tensor, device) for tensor in (batch.images, batch.labels, batch.weights))
    return dataclasses.replace(
        batch,
        images=dataset.batch_transforms(images, batch.epoch, batch.indices.numpy()),
        labels=labels,
        weights=weights,
    )


def _handed_over(batch: Batch, ready: torch.cuda.Event, device: torch.device) -> Batch:
    current = torch.cuda.current_stream(device)
    current.wait_event(ready)
    for tensor in (batch.images, batch.labels, batch.weights):
        tensor.record_stream(current)  # its memory must not be given to the other stream while this one reads it
    return batch
