"""The worker processes of a rank, which read the batches of all parts of the data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from training.data.datasets import ImageDataset
from training.data.reader import Batch, BatchReader
from training.data.sampler import BatchKey
from training.data.workers import end_with_parent, worker_context


class _Keys:
    """The sampler of a DataLoader that outlives the epoch: number of the set and key of each batch."""

    current: Iterable[tuple[int, BatchKey]] = ()

    def __iter__(self) -> Iterator[tuple[int, BatchKey]]:
        return iter(self.current)


class _Readers(Dataset):
    """Reads batches of several sets."""

    def __init__(self, datasets: Sequence[ImageDataset]) -> None:
        self._readers = [BatchReader(dataset) for dataset in datasets]

    def __getitem__(self, key: tuple[int, BatchKey]) -> Batch | Exception:
        part, batch_key = key
        return self._readers[part][batch_key]


class WorkerPool:
    """Worker processes that read the batches of several sets, those of one at a time; they live until `close`.

    Args:
        datasets: The sets.
        workers: Processes, at least 1.
        device: Device of the batches.
    """

    def __init__(self, datasets: Sequence[ImageDataset], workers: int, device: torch.device) -> None:
        self._datasets, self._keys = datasets, _Keys()
        self._workers: DataLoader | None = DataLoader(
            _Readers(datasets),
            batch_size=None,
            sampler=self._keys,
            num_workers=workers,
            collate_fn=_unchanged,
            worker_init_fn=end_with_parent,
            pin_memory=device.type == "cuda",
            persistent_workers=True,
            multiprocessing_context=worker_context(),
            generator=torch.Generator(),  # else every epoch draws from, and so shifts, the global generator
        )

    def read(self, dataset: ImageDataset, keys: Iterable[BatchKey]) -> Iterator[Batch | Exception]:
        """Yield what `BatchReader` makes of the keys of a set, in their order; what is left of the call before is lost.

        Raises:
            RuntimeError: The workers have been given other keys since.
        """
        assert self._workers is not None
        part = next(number for number, known in enumerate(self._datasets) if known is dataset)
        own = self._keys.current = ((part, key) for key in keys)
        for result in self._workers:
            yield result
            if self._keys.current is not own:
                raise RuntimeError("these workers read other batches now")

    def close(self) -> None:
        """End the processes."""
        # DataLoader has no public way to end persistent workers: they end when their iterator is dropped
        self._workers = None


def _unchanged(batch: Any) -> Any:
    return batch
