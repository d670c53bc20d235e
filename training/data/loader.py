"""The batches of one rank, in the order that the plan gives, read in this process or in worker processes."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from training.data.bundle import DataBundle, ImageDataset
from training.data.device import batches_on_device
from training.data.gpu_decode import read_encoded
from training.data.images import ImageError
from training.data.in_memory import images_on_device
from training.data.randomness import preserved_generators
from training.data.reader import Batch, BatchReader, ReadFailure, bad_image_budget, over_budget
from training.data.sampler import BatchKey, BatchPlan, EvaluationPlan
from training.data.workers import end_with_parent, worker_context
from training.errors import UserError

CPU = torch.device("cpu")
IMAGES_PER_SECOND_OF_A_GPU = 6000  # about what a small network takes on a large GPU, at 224 pixels and in bf16
IMAGES_TIMED = 16


class TrainLoader:
    """The training batches of one rank; worker processes live from the first epoch to `close`.

    Args:
        bundle: The data.
        plan: Which samples belong to which step.
        rank: This rank, 0 to `plan.world_size` - 1.
        workers: Worker processes, 0 reads in this process; see `automatic_workers`.
        device: Where the batches go.
    """

    def __init__(
        self, bundle: DataBundle, plan: BatchPlan, rank: int, *, workers: int = 0, device: torch.device = CPU
    ) -> None:
        self._plan, self._rank = plan, rank
        self._fetcher = _Fetcher(bundle.train, bundle.skip_bad_images, workers, device)

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """Yield the micro-batches of optimizer steps `first_step`, `first_step` + 1, ... of `epoch`.

        Raises:
            UserError: An image cannot be read, or more than the budget of skipped ones; raised on this rank only.
        """
        return self._fetcher.fetch(self._plan.epoch_keys(epoch, self._rank, first_step))

    @property
    def bad_paths(self) -> list[str]:
        """Files that this rank has skipped so far, each with its reason, in the order they were met."""
        return list(self._fetcher.bad_paths)

    def close(self) -> None:
        """End the worker processes."""
        self._fetcher.close()


class EvaluationLoader:
    """The validation batches of one rank, as many on every rank; iterate as often as needed.

    Args:
        bundle: The data.
        plan: Which samples belong to which rank.
        rank: This rank, 0 to `plan.world_size` - 1.
        workers: As for `TrainLoader`.
        device: As for `TrainLoader`.
    """

    def __init__(
        self, bundle: DataBundle, plan: EvaluationPlan, rank: int, *, workers: int = 0, device: torch.device = CPU
    ) -> None:
        self._plan, self._rank = plan, rank
        self._fetcher = _Fetcher(bundle.val, bundle.skip_bad_images, workers, device)

    def __len__(self) -> int:
        return self._plan.batches_per_rank

    def __iter__(self) -> Iterator[Batch]:
        return self._fetcher.fetch(self._plan.keys(self._rank))

    @property
    def bad_paths(self) -> list[str]:
        """As `TrainLoader.bad_paths`."""
        return list(self._fetcher.bad_paths)

    def close(self) -> None:
        """End the worker processes."""
        self._fetcher.close()


def automatic_workers(dataset: ImageDataset, device: torch.device = CPU, ranks_on_machine: int = 1) -> int:
    """Choose the worker processes of one rank.

    None for images in memory, and none for a rank on CPU, where they would only share the cores that train. Otherwise
    enough to read `IMAGES_PER_SECOND_OF_A_GPU`, by the measured time of a few images (short, where a cache is warm),
    and no more than the rank's share of the cores less one.
    """
    if dataset.source.in_memory or device.type == "cpu":
        return 0
    needed = math.ceil(IMAGES_PER_SECOND_OF_A_GPU * _seconds_per_image(dataset))
    return min(max(needed, 1), most_workers(ranks_on_machine))


def most_workers(ranks_on_machine: int = 1) -> int:
    """Return a rank's share of the cores less one, at least 1."""
    return max(len(os.sched_getaffinity(0)) // ranks_on_machine - 1, 1)


def _seconds_per_image(dataset: ImageDataset) -> float:
    """Return the median time of reading an image; bad ones are left to the training to find."""
    indices = np.linspace(0, len(dataset) - 1, min(len(dataset), IMAGES_TIMED)).astype(int)
    seconds = []
    for index, draws in zip(indices.tolist(), dataset.draws(0, indices), strict=True):
        start = time.perf_counter()
        with preserved_generators(), contextlib.suppress(ImageError):
            dataset.read(0, index, draws)
        seconds.append(time.perf_counter() - start)
    return float(np.median(seconds))


class _Keys:
    """The sampler of a DataLoader that outlives the epoch: yields the keys that were put in last."""

    def __init__(self) -> None:
        self.current: Iterable[BatchKey] = ()

    def __iter__(self) -> Iterator[BatchKey]:
        return iter(self.current)


class _Fetcher:
    """Turns keys into batches, in order, with or without workers; counts what was skipped against the budget."""

    def __init__(self, dataset: ImageDataset, skip_bad_images: bool, workers: int, device: torch.device) -> None:
        self.bad_paths: dict[str, None] = {}
        self._dataset, self._device = dataset, device
        self._reader = BatchReader(dataset, skip_bad_images, read_encoded if dataset.source.decodes_later else None)
        self._keys = _Keys()
        self._in_memory = None if workers else images_on_device(dataset, device)
        self._loader = self._make_loader(workers) if workers else None

    def _make_loader(self, workers: int) -> DataLoader:
        return DataLoader(
            self._reader,
            batch_size=None,
            sampler=self._keys,
            num_workers=workers,
            collate_fn=_unchanged,
            worker_init_fn=end_with_parent,
            pin_memory=self._device.type == "cuda",
            persistent_workers=True,
            multiprocessing_context=worker_context(),
            generator=torch.Generator(),  # else every epoch draws from, and so shifts, the global generator
        )

    def fetch(self, keys: Iterable[BatchKey]) -> Iterator[Batch]:
        if self._in_memory is not None:
            return batches_on_device(map(self._in_memory.batch, keys), self._dataset, self._device)
        return batches_on_device(self._checked(keys), self._dataset, self._device)

    def _checked(self, keys: Iterable[BatchKey]) -> Iterator[Batch]:
        for result in self._results(keys):
            if isinstance(result, ReadFailure):
                raise UserError(result.message)
            if result.bad_paths:
                self.bad_paths.update(dict.fromkeys(result.bad_paths))
                if len(self.bad_paths) > bad_image_budget(len(self._dataset)):
                    raise over_budget(len(self._dataset), self.bad_paths)
            yield result

    def _results(self, keys: Iterable[BatchKey]) -> Iterator[Batch | ReadFailure]:
        if self._loader is None:
            yield from map(self._reader.__getitem__, keys)
            return
        self._keys.current = keys
        yield from self._loader

    def close(self) -> None:
        # DataLoader has no public way to end persistent workers: they end when their iterator is dropped
        self._loader = None


def _unchanged(batch: Any) -> Any:
    return batch
