"""Reads one batch from its key; this part of loading runs in worker processes."""

from __future__ import annotations

import dataclasses
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch

from zerovision.training.base.errors import FileServerError, UserError
from zerovision.training.data.bad_images import read_or_replace
from zerovision.training.data.datasets import ImageDataset
from zerovision.training.data.reading.sources import UNKNOWN, Source
from zerovision.training.data.sampler import BatchKey
from zerovision.training.world.preserved_process import preserved_generators


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one rank.

    Attributes:
        images: uint8 or float32 [B, C, S, S] when read; normalized float32 when yielded by a loader.
        labels: int64 [B].
        weights: float32 [B]; 0 for padding and for images that could not be read, otherwise 1.
        indices: int64 [B], positions in the data set.
        bad_images: Reason for each unreadable image, by path; other images fill the slots of unreadable images.
        notes: Note on each unusual image, by path; see `reading.files.named`.
        epoch: Epoch, which determines the part of the augmentation that is applied to whole batches.
        draw_keys: int64 [B], keys that seed the augmentation together with `epoch`; see `BatchKey`.
        leaf: See `BatchKey`.
        targets: float32 [B, classes], or None if `labels` are the targets; see `batch_transforms` and `LabelTargets`.
        is_transformed: Whether `images` are already normalized.
        digests: int64 [B], digests of the images' files; see `reading.sources.digest_of`; empty unless the key requests
            them.
        loss_weights: float32 [B], weights of the training losses; None if all are 1.
    """

    images: torch.Tensor
    labels: torch.Tensor
    weights: torch.Tensor
    indices: torch.Tensor
    bad_images: dict[str, str] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    epoch: int = 0
    draw_keys: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    leaf: int = 0
    targets: torch.Tensor | None = None
    is_transformed: bool = False
    digests: np.ndarray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    loss_weights: torch.Tensor | None = None

    def pin_memory(self) -> Batch:
        """Return the batch in page-locked memory, from which it can be copied to a GPU asynchronously."""
        pinned = {name: getattr(self, name).pin_memory() for name in ("images", "labels", "weights")}
        return dataclasses.replace(self, **pinned)


def batch_of(key: BatchKey, source: Source, images: torch.Tensor, **more: Any) -> Batch:
    """Return the batch for a key, with these images and a source's labels; `more` contains other fields."""
    indices, own = torch.from_numpy(key.indices), source.loss_weights
    more |= {"epoch": key.epoch, "draw_keys": key.draw_keys, "leaf": key.leaf}
    more["loss_weights"] = None if own is None else own[indices]
    return Batch(images, source.labels[indices], torch.from_numpy(key.weights), indices, **more)


def read_batch(dataset: ImageDataset, key: BatchKey) -> Batch | UserError | FileServerError:
    """Read the batch for a key. Errors are returned, because DataLoader would add a traceback to raised errors."""
    try:
        with preserved_generators() if dataset.augmentation.draws_globally else nullcontext():
            return _read(dataset.for_epoch(key.epoch), key)
    except UserError as error:
        return UserError(str(error))  # subclasses with different arguments cannot be sent between processes
    except FileServerError as error:
        return error


def _read(dataset: ImageDataset, key: BatchKey) -> Batch:
    source = dataset.source
    source.digests, source.notes = {} if key.wants_digests else None, {}
    source.expect(key.indices.tolist())
    draws, offsets = dataset.draws(key.epoch, key.draw_keys), (key.draw_keys - key.indices).tolist()
    bad_images: dict[str, str] = {}
    images: list[torch.Tensor] = []
    for slot, index in enumerate(key.indices.tolist()):
        read = partial(dataset.read, key.epoch, draws=draws[slot], offset=offsets[slot])
        image, error = read_or_replace(read, index, dataset)
        if error is not None:
            bad_images[error.path] = error.reason
            key.weights[slot] = 0
        images.append(image)
    stacked = torch.stack([image.permute(1, 2, 0) for image in images]).permute(0, 3, 1, 2)  # channels innermost
    digests = [] if source.digests is None else [source.digests.get(index, UNKNOWN) for index in key.indices.tolist()]
    found = {"bad_images": bad_images, "notes": source.notes, "digests": np.array(digests, dtype=np.int64)}
    return batch_of(key, source, stacked, **found)
