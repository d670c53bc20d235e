"""Loads the batches of one rank in the order of the plan, in this process or in worker processes."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import numpy as np
import torch

from zerovision.training.base.control_groups import usable_cores
from zerovision.training.data.bad_images import check_budget
from zerovision.training.data.datasets import DatasetPair, ImageDataset
from zerovision.training.data.device import batches_on_device, images_on_device
from zerovision.training.data.reader import Batch, read_batch
from zerovision.training.data.reading.image_numbers import BYTES
from zerovision.training.data.reading.sources import UNKNOWN, Source
from zerovision.training.data.sampler import BatchKey, BatchPlan, EvaluationPlan
from zerovision.training.data.settings import DataSettings
from zerovision.training.data.workers import WorkerPool, fit_workers_into_memory
from zerovision.training.world.world import World

CPU = torch.device("cpu")


class Loader:
    """Loads the batches of one rank in the order of a plan; worker processes run from the first batch to `close`.

    Args:
        dataset: The data set.
        plan: Assigns samples to batches.
        rank: This rank, 0 to `plan.world_size` - 1.
        workers: Number of worker processes, 0 to read in this process; or a pool that several loaders share.
        device: Device of the batches.

    Attributes:
        dataset: The data set.
        pool: The worker processes, which other loaders may share; None if this process reads the images.
        bad_images: Reason for each unreadable image that this rank has found, by path.
        notes: Note on each unusual image that this rank has decoded, by path.
        digests: int64 [N], digests of the files that this rank has read; None if not collected (see `watch`).
    """

    def __init__(
        self,
        dataset: ImageDataset,
        plan: BatchPlan | EvaluationPlan,
        rank: int,
        *,
        workers: WorkerPool | int = 0,
        device: torch.device = CPU,
    ) -> None:
        self.dataset, self._plan, self._rank, self._device = dataset, plan, rank, device
        if isinstance(workers, int):
            self.pool = WorkerPool([dataset], workers, device) if workers else None
        else:
            self.pool = workers
        self.bad_images: dict[str, str] = {}
        self.notes: dict[str, str] = {}
        self.digests: np.ndarray | None = None
        in_memory = images_on_device(dataset, device) if self.pool is None else None
        self._from_memory: Callable[[BatchKey], Batch] | None = None if in_memory is None else in_memory.batch

    def __len__(self) -> int:
        return self._plan.batches_per_rank

    def __iter__(self) -> Iterator[Batch]:
        return self.epoch(0)

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """Yield the batches of steps `first_step`, `first_step` + 1, ... of `epoch`.

        Raises:
            UserError: If more images are unreadable than `--bad-images` allows; raised on this rank only.
        """
        keys = self._plan.epoch_keys(epoch, self._rank, first_step)
        if self.digests is not None:
            keys = (key._replace(wants_digests=True) for key in keys)
        read = self._read(keys) if self._from_memory is None else map(self._from_memory, keys)
        return batches_on_device(read, self.dataset, self._device)

    def each_once(self) -> Loader:
        """Return a loader that yields each sample once, and shares this loader's findings about the images."""
        plan, other = self._plan, copy.copy(self)
        other._plan = EvaluationPlan(len(self.dataset), plan.batch_size_per_rank, plan.world_size)
        return other

    def read_from(self, batch_of: Callable[[BatchKey], Batch]) -> None:
        """Read all further batches with `batch_of`, which maps a key to a batch of transformed images on the device."""
        self._from_memory = batch_of

    def close(self) -> None:
        """Stop the worker processes."""
        if self.pool is not None:
            self.pool.close()

    def watch(self, *, is_on: bool = True) -> None:
        """Start or stop collecting the digests of files that are read; images in memory have no digests."""
        is_on = is_on and not self.dataset.source.in_memory
        self.digests = np.full(len(self.dataset), UNKNOWN, dtype=np.int64) if is_on else None

    def _read(self, keys: Iterable[BatchKey]) -> Iterator[Batch]:
        pool = self.pool
        here = partial(read_batch, self.dataset)
        for batch in map(here, _ahead(self.dataset.source, keys)) if pool is None else pool.read(self.dataset, keys):
            if isinstance(batch, Exception):
                raise batch
            self.notes |= batch.notes
            if self.digests is not None and len(batch.digests):
                self.digests[batch.indices.numpy()] = batch.digests
            if batch.bad_images:
                self.bad_images |= batch.bad_images
                check_budget(self.bad_images, self.dataset)
            yield batch


def _ahead(source: Source, keys: Iterable[BatchKey]) -> Iterator[BatchKey]:
    """Yield the keys; before each key, start fetching the next key's images if they are remote."""
    first, second = itertools.tee(keys)
    for key, following in itertools.zip_longest(first, itertools.islice(second, 1, None)):
        if following is not None:
            source.expect(following.indices.tolist())
        yield key


def build_loaders(
    config: DataSettings, datasets: DatasetPair, plan: BatchPlan, world: World, others: Sequence[ImageDataset] = ()
) -> tuple[Loader, Loader]:
    """Build this rank's loaders of training and validation batches, which share one pool of workers.

    The workers also read the sets in `others`.

    Raises:
        UserError: If the settings need more shared memory than this machine has.
    """
    is_automatic = config.workers == "auto"
    workers = automatic_workers(datasets.train, plan.batches_per_rank, world) if is_automatic else int(config.workers)
    if workers:
        value_bytes = 1 if datasets.train.source.values == BYTES else 4
        batch_bytes = config.micro_batch * math.prod(datasets.preprocessing.shape) * value_bytes
        workers = fit_workers_into_memory(workers, is_automatic, batch_bytes, world.local_size, is_main=world.is_main)
    pool = WorkerPool([*datasets.parts.values(), *others], workers, world.device) if workers else 0
    evaluation = EvaluationPlan(len(datasets.val), config.micro_batch, world.data.size)
    return (
        Loader(datasets.train, plan, world.data.rank, workers=pool, device=world.device),
        Loader(datasets.val, evaluation, world.data.rank, workers=pool, device=world.device),
    )


def automatic_workers(dataset: ImageDataset, batches: int, world: World) -> int:
    """Choose the number of worker processes for one rank.

    The number is 0 for images in memory, and for a CPU rank, where workers would compete with training for cores.
    Otherwise it is the rank's share of the cores minus one, because decoding is usually the bottleneck for a fast GPU,
    but no more than the number of batches.

    Args:
        dataset: The data set to read.
        batches: Number of batches that the rank reads one after another.
        world: The ranks.
    """
    if dataset.source.in_memory or world.device.type == "cpu":
        return 0
    return min(batches, most_workers(world.local_size))


def most_workers(ranks_on_machine: int = 1) -> int:
    """Return a rank's share of the cores minus one, but at least 1."""
    return max(usable_cores() // ranks_on_machine - 1, 1)
