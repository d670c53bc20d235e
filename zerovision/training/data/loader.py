"""Loads the batches of one rank in the order of the plan, in this process or in workers, onto the device."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial

import numpy as np
import torch

from zerovision.training.base.control_groups import usable_cores
from zerovision.training.data.bad_images import check_budget
from zerovision.training.data.batch_transforms import to_device
from zerovision.training.data.datasets import DatasetPair, ImageDataset
from zerovision.training.data.reader import Batch, WorkerPool, batch_of, fit_workers_into_memory, read_batch
from zerovision.training.data.reading.image_numbers import BYTES
from zerovision.training.data.reading.sources import UNKNOWN, ArraySource, Source
from zerovision.training.data.sampler import BatchKey, BatchPlan, EvaluationPlan
from zerovision.training.data.settings import DataSettings
from zerovision.training.world.collectives import gather_rows
from zerovision.training.world.world import World

MAX_BYTES = 2 * 10**9
MAX_SHARE_OF_GPU = 0.25  # of the memory that is free before the model is loaded
CPU = torch.device("cpu")


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

    `dataset` is a set of arrays whose augmentation can be applied to whole batches; its `images` are uint8 or float32
    [N, 1 or C, H, W].
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
