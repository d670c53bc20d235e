"""The batches of one rank, in the order that the plan gives, read in this process or in worker processes."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from training.config import TrainConfig
from training.data.datasets import DatasetPair, ImageDataset
from training.data.device import batches_on_device
from training.data.in_memory import images_on_device
from training.data.randomness import preserved_generators
from training.data.reader import Batch, BatchReader, ReadFailure, bad_image_budget, over_budget
from training.data.reading.gpu_decode import decode_batch, read_encoded
from training.data.reading.images import ImageError
from training.data.sampler import BatchKey, BatchPlan, EvaluationPlan
from training.data.workers import end_with_parent, fit_workers_into_memory, worker_context
from training.errors import UserError
from training.parallel.world import World

CPU = torch.device("cpu")
IMAGES_PER_SECOND_OF_A_GPU = 6000  # about what a small network takes on a large GPU, at 224 pixels and in bf16
IMAGES_TIMED = 16


class _Loader:
    """What both loaders have in common.

    Attributes:
        most_bad: Images of the set that may be unreadable; with 0 the first is an error.
        bad_images: Path and reason of the unreadable images that this rank has met so far.
        notes: Path and note of the odd images that this rank has decoded so far.
    """

    def __init__(self, dataset: ImageDataset, datasets: DatasetPair, workers: int, device: torch.device) -> None:
        self.most_bad = bad_image_budget(datasets.bad_image_share, len(dataset))
        self.bad_images: dict[str, str] = {}
        self.notes: dict[str, str] = {}
        self._dataset, self._device = dataset, device
        self._fetcher = _Fetcher(dataset, self.most_bad, workers, device)

    def check_number(self, bad_images: Mapping[str, str]) -> None:
        """Raise UserError if these, by their paths, are more unreadable images than allowed."""
        if len(bad_images) > self.most_bad:
            raise over_budget(
                len(self._dataset), self.most_bad, (f"{path} ({why})" for path, why in bad_images.items())
            )

    def close(self) -> None:
        """End the worker processes."""
        self._fetcher.close()

    def _fetch(self, keys: Iterable[BatchKey]) -> Iterator[Batch]:
        return batches_on_device(map(self._counted, self._fetcher.fetch(keys)), self._dataset, self._device)

    def _counted(self, batch: Batch) -> Batch:
        self.notes |= batch.notes
        if batch.bad_images:
            self.bad_images |= batch.bad_images
            self.check_number(self.bad_images)
        return batch


class TrainLoader(_Loader):
    """The training batches of one rank; worker processes live from the first epoch to `close`.

    Args:
        datasets: The data.
        plan: Which samples belong to which step.
        rank: This rank, 0 to `plan.world_size` - 1.
        workers: Worker processes, 0 reads in this process; see `automatic_workers`.
        device: Where the batches go.
    """

    def __init__(
        self, datasets: DatasetPair, plan: BatchPlan, rank: int, *, workers: int = 0, device: torch.device = CPU
    ) -> None:
        self._plan, self._rank = plan, rank
        super().__init__(datasets.train, datasets, workers, device)

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """Yield the micro-batches of optimizer steps `first_step`, `first_step` + 1, ... of `epoch`.

        Raises:
            UserError: An image cannot be read, or more than the budget of skipped ones; raised on this rank only.
        """
        return self._fetch(self._plan.epoch_keys(epoch, self._rank, first_step))


class EvaluationLoader(_Loader):
    """The validation batches of one rank, as many on every rank; iterate as often as needed.

    Args:
        datasets: The data.
        plan: Which samples belong to which rank.
        rank: This rank, 0 to `plan.world_size` - 1.
        workers: As for `TrainLoader`.
        device: As for `TrainLoader`.
    """

    def __init__(
        self, datasets: DatasetPair, plan: EvaluationPlan, rank: int, *, workers: int = 0, device: torch.device = CPU
    ) -> None:
        self._plan, self._rank = plan, rank
        super().__init__(datasets.val, datasets, workers, device)

    def __len__(self) -> int:
        return self._plan.batches_per_rank

    def __iter__(self) -> Iterator[Batch]:
        return self._fetch(self._plan.keys(self._rank))


def build_loaders(
    config: TrainConfig, data: DatasetPair, plan: BatchPlan, world: World
) -> tuple[TrainLoader, EvaluationLoader]:
    """Build this rank's loaders of training and validation batches, and start their workers.

    Raises:
        UserError: if the settings ask for a GPU or for shared memory that this machine does not have.
    """
    if data.train.source.decodes_later and world.device.type != "cuda":
        raise UserError("--decode gpu needs a GPU, and this run has none: leave it at --decode cpu.")
    is_automatic = config.workers == "auto"
    workers = automatic_workers(data.train, world.device, world.local_size) if is_automatic else int(config.workers)
    if workers:
        workers = fit_workers_into_memory(
            workers,
            is_automatic,
            config.batch_size,
            data.preprocessing["image_size"],
            world.local_size,
            is_main=world.is_main,
        )
    evaluation = EvaluationPlan(len(data.val), config.batch_size, world.size)
    return (
        TrainLoader(data, plan, world.rank, workers=workers, device=world.device),
        EvaluationLoader(data, evaluation, world.rank, workers=workers, device=world.device),
    )


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
    """Turns keys into batches, in order, with or without workers; all images are decoded, on the device at the last."""

    def __init__(self, dataset: ImageDataset, most_bad: int, workers: int, device: torch.device) -> None:
        self._dataset, self._most_bad, self._device = dataset, most_bad, device
        self._reader = BatchReader(dataset, most_bad, read_encoded if dataset.source.decodes_later else None)
        self._pin_memory = device.type == "cuda"
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
            yield from map(self._in_memory.batch, keys)
            return
        for result in self._results(keys):
            if isinstance(result, ReadFailure):
                raise UserError(result.message)
            yield decode_batch(result, self._dataset, self._device, self._most_bad) if result.encoded else result

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
