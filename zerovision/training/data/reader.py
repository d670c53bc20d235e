"""Reads one batch from its key; this part of loading runs in the worker processes, which are started here.

Workers are started with `forkserver`, because a plain fork copies the locks of the threads that gloo, NCCL and CUDA run
in the parent, and the child can then hang forever. The fork server imports torch once, so that each worker starts
quickly. Workers block SIGINT and SIGTERM, which a launcher sends to every process, because the trainer still needs the
workers' data to finish the step and save. Workers exit when the process that started them dies. Unlike the processes of
Python's multiprocessing, workers do not import the main module: they need nothing from it, and a script without
`if __name__ == "__main__"` would start training in each worker.
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import threading
import time
import types
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from multiprocessing import forkserver, popen_forkserver, resource_tracker, util
from multiprocessing.context import ForkServerContext, ForkServerProcess
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset

from zerovision.training.base.errors import FileServerError, UserError
from zerovision.training.base.helper_processes import current_folder_kept_out, socket_place, temporary_files_in
from zerovision.training.base.plugins import LoadedPlugins
from zerovision.training.base.run_folder import SHARED_MEMORY
from zerovision.training.data.bad_images import read_or_replace
from zerovision.training.data.datasets import ImageDataset
from zerovision.training.data.reading.sources import UNKNOWN, Source
from zerovision.training.data.sampler import BatchKey
from zerovision.training.world.preserved_process import preserved_generators

# Installed packages only: Python 3.11's fork server lacks the paths that a script added to sys.path.
_PRELOADED_MODULES = ["torch", "torchvision.transforms.v2", "PIL.Image"]
_SIGNALS_FOR_THE_TRAINER = {signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2}
BATCHES_OF_A_WORKER = 3  # in shared memory at the same time: two read ahead, one in use
QUEUE_SECONDS = 2.0  # time limit for closing queues to workers that have died
MOST_DESCRIPTORS = 65536  # requested; a hard limit may be infinite


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


def fit_workers_into_memory(
    workers: int, is_automatic: bool, batch_bytes: int, ranks_on_machine: int, *, is_main: bool
) -> int:
    """Return `workers`, or fewer if the number is automatic and shared memory is too small for the workers' batches.

    Otherwise the first batch that does not fit would end the run (Docker's default is 64 MB of shared memory). If the
    user requested more workers than there is room for, raise a UserError.
    """
    room = 0
    if os.access(SHARED_MEMORY, os.W_OK):  # otherwise it has no room even for the workers' semaphores
        room = shutil.disk_usage(SHARED_MEMORY).free // (batch_bytes * BATCHES_OF_A_WORKER * ranks_on_machine)
    if workers <= room:
        return workers
    problem = f"{SHARED_MEMORY} has room for the batches of {room} data workers of each rank"
    if not is_automatic:
        raise UserError(
            f"--workers {workers}: {problem}. Use --workers {room}, or more shared memory (docker run --shm-size=8g)."
        )
    if is_main:
        print(f"note: {problem}, {workers} would be better", file=sys.stderr, flush=True)
    return room


class _Started(popen_forkserver.Popen):
    def terminate(self) -> None:
        """Kill the process, because at exit Python terminates the workers of unclosed loaders and waits for them."""
        self.kill()


class _Worker(ForkServerProcess):
    @staticmethod
    def _Popen(process: BaseProcess) -> popen_forkserver.Popen:
        """Start the process without a main module: a module with neither spec nor file is not imported."""
        main, sys.modules["__main__"] = sys.modules["__main__"], types.ModuleType("__main__")
        try:
            return _Started(process)
        finally:
            sys.modules["__main__"] = main


class _WorkerContext(ForkServerContext):
    Process = _Worker

    def __init__(self) -> None:
        super().__init__()
        self._queues: list[Queue[Any]] = []

    def Queue(self, maxsize: int = 0) -> Queue[Any]:
        """Return a queue; `wait_for_queues` waits for its sending thread."""
        self._queues.append(super().Queue(maxsize))
        return self._queues[-1]

    def wait_for_queues(self) -> None:
        """Wait until the sending threads of closed queues have ended, for which DataLoader does not wait.

        A process that exits earlier leaks the threads' semaphores, and Python's resource tracker prints a warning.
        """
        threads = [getattr(queue, "_thread", None) for queue in self._queues]
        self._queues.clear()
        deadline = time.monotonic() + QUEUE_SECONDS
        for thread in filter(None, threads):
            thread.join(max(0.0, deadline - time.monotonic()))


def worker_context() -> _WorkerContext:
    """Return the multiprocessing context for all workers, and start its fork server in the background.

    The soft limit on open files is raised up to the hard limit, because each batch from a worker needs some
    descriptors.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MOST_DESCRIPTORS)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    context = _WorkerContext()
    context.set_forkserver_preload(_PRELOADED_MODULES)
    with temporary_files_in(socket_place()):
        util.get_temp_dir()  # created now, and kept for all sockets of this process and its workers
    with current_folder_kept_out():
        resource_tracker.ensure_running()  # it unblocks SIGINT and SIGTERM when it starts, so it must start first
        # the fork server and its workers inherit the mask and keep it for life
        previous = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS_FOR_THE_TRAINER)
        try:
            forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, previous)
    return context


def end_with_parent(worker_id: int) -> None:
    """Make this worker process exit when its parent dies; used as DataLoader's `worker_init_fn`.

    DataLoader's own check compares parent process IDs. But the parent of a worker is the fork server, which waits for
    its workers, so killing only the trainer would leave the fork server and all workers running.
    """
    threading.Thread(target=_end_after_parent, daemon=True).start()


def _end_after_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


class _Keys:
    """The sampler of a DataLoader that outlives the epoch; yields the data set's index and the key of each batch."""

    current: Iterable[tuple[int, BatchKey]] = ()

    def __iter__(self) -> Iterator[tuple[int, BatchKey]]:
        return iter(self.current)


class _Readers(Dataset):
    """Reads batches of several data sets."""

    def __init__(self, datasets: Sequence[ImageDataset]) -> None:
        self._plugins = LoadedPlugins()  # first, because the data sets may need them
        self._datasets = datasets

    def __getitem__(self, key: tuple[int, BatchKey]) -> Batch | Exception:
        part, batch_key = key
        return read_batch(self._datasets[part], batch_key)


class WorkerPool:
    """Worker processes that read batches of several data sets, one set at a time; they run until `close`."""

    def __init__(self, datasets: Sequence[ImageDataset], workers: int, device: torch.device) -> None:
        self._datasets, self._keys, self._context = datasets, _Keys(), worker_context()
        self._workers: DataLoader | None = DataLoader(
            _Readers(datasets),
            batch_size=None,
            sampler=self._keys,
            num_workers=workers,
            worker_init_fn=end_with_parent,
            pin_memory=device.type == "cuda",
            persistent_workers=True,
            multiprocessing_context=self._context,
            generator=torch.Generator(),  # otherwise every epoch would draw from the global generator
        )

    def read(self, dataset: ImageDataset, keys: Iterable[BatchKey]) -> Iterator[Batch | Exception]:
        """Yield the result of `read_batch` for each key of a set, in order.

        A later call discards the results of this one, which then raises a RuntimeError.
        """
        assert self._workers is not None
        part = next(number for number, known in enumerate(self._datasets) if known is dataset)
        own = self._keys.current = ((part, key) for key in keys)
        for result in self._workers:
            yield result
            if self._keys.current is not own:
                raise RuntimeError("these workers read other batches now")

    def close(self) -> None:
        """Stop the worker processes."""
        # DataLoader has no public way to stop persistent workers: they exit when their iterator is deleted
        self._workers = None
        self._context.wait_for_queues()
