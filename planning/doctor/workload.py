"""The training's data set and model, measured on one machine: whether they load, and how fast each is."""

from __future__ import annotations

import hashlib
import itertools
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training.data import DATASETS, DataOptions, find_dataset, load_data
from training.data.reading.retry import entries_of, is_folder, patiently
from training.errors import UserError
from training.observe.control_groups import usable_cores

if TYPE_CHECKING:
    import torch
    from torch import nn

    from training.data.datasets import ImageDataset

SAMPLE = 256  # images of each part that are decoded
READ_SECONDS = 1.0
READ_BATCH = 16
MOST_ENTRIES = 20_000  # of a folder, in the fingerprint
WARM_UP_STEPS, TIMED_STEPS = 3, 10


def measure_dataset(options: Mapping[str, Any]) -> dict[str, Any]:
    """Load a data set, decode a sample of it and measure how fast one worker reads; ready for JSON.

    Args:
        options: fields of `DataOptions`.

    Raises:
        UserError: what keeps the data set from being loaded.
    """
    from planning.data_check import check_datasets

    datasets = load_data(replace(DataOptions(**options), cache="off", download=False))
    report = check_datasets(datasets, workers=0, most=SAMPLE)
    return {
        "classes": len(datasets.class_names),
        "train": sum(datasets.train_counts),
        "val": sum(datasets.val_counts),
        "image_size": datasets.preprocessing["image_size"],
        "image_channels": datasets.image_channels,
        "decoded": report.decoded,
        "unreadable": [f"{path} ({reason})" for path, reason in report.unreadable],
        "in_memory": datasets.train.source.in_memory,
        "images_per_second": None if report.unreadable else _read_rate(datasets.train),
    }


def _read_rate(dataset: ImageDataset) -> float:
    """Return images per second of one worker that decodes and augments as in training."""
    import numpy as np

    from training.data.reader import BatchReader
    from training.data.sampler import BatchKey

    dataset.most_bad = len(dataset) - 1
    reader, read = BatchReader(dataset), 0
    order = np.random.default_rng(0).permutation(len(dataset))
    start = time.perf_counter()
    while time.perf_counter() - start < READ_SECONDS:
        indices = order[np.arange(read, read + READ_BATCH) % len(dataset)]
        reader[BatchKey(0, indices, np.ones(READ_BATCH, dtype=np.float32), indices)]
        read += READ_BATCH
    return read / (time.perf_counter() - start)


def dataset_fingerprint(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a `hash` that differs between copies of a data set that differ, and what it `covers`.

    It covers the names and sizes of a folder's first files, in the order of their names, and opens none; nothing of a
    data set that is part of the installed packages.

    Raises:
        UserError: what keeps a torchvision data set from being loaded; the folder is missing.
    """
    given = replace(DataOptions(**options), cache="off", download=False)
    entry = find_dataset(given.data)
    if entry.takes_name:
        datasets = load_data(given)
        return {"hash": datasets.fingerprint, "covers": f"{len(datasets.train) + len(datasets.val)} images"}
    if entry is not DATASETS["folder"]:
        return {"hash": "", "covers": "part of the packages"}
    root = str(Path(os.path.expanduser(given.data)).resolve())
    if not is_folder(root):
        raise UserError(f"no folder {root!r}")
    entries = list(itertools.islice(_entries(root), MOST_ENTRIES))
    digest = hashlib.sha256(b"".join(os.fsencode(f"{path[len(root) :]}\0{size}\n") for path, size in entries))
    first = "the first " if len(entries) == MOST_ENTRIES else ""
    return {"hash": digest.hexdigest(), "covers": f"{first}{len(entries)} entries"}


def _entries(folder: str) -> Iterator[tuple[str, int]]:
    """Yield path and size of all folders (size 0) and files below one, hidden ones left out."""
    entries = [entry for entry in entries_of(folder) if not entry.name.startswith(".")]
    folders = [entry.path for entry in entries if entry.is_dir()]
    yield from ((path, 0) for path in folders)
    yield from ((entry.path, patiently(entry.stat, entry.path).st_size) for entry in entries if entry.is_file())
    for path in folders:
        yield from _entries(path)


def measure_model(
    model_type: str, members: Sequence[str], num_classes: int, image_size: int, batch_size: int, image_channels: int = 3
) -> dict[str, Any]:
    """Return `parameters`, `cores`, `device`, and the `images_per_second` of one rank (None without a GPU).

    Raises:
        UserError: for an unknown model or member.
    """
    import torch

    from models.build import describe_model, rebuild_model

    description = describe_model(model_type, num_classes, image_size, members, image_channels)
    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in rebuild_model(description).parameters())
    found: dict[str, Any] = {"parameters": parameters, "cores": usable_cores()}
    if not torch.cuda.is_available():
        return found | {"device": "cpu", "images_per_second": None}
    with torch.device("cuda") as device:
        module = rebuild_model(description)
    seconds = _step_seconds(module, batch_size, image_size, image_channels, device)
    return found | {"device": torch.cuda.get_device_name(), "images_per_second": batch_size / seconds}


def _step_seconds(
    module: nn.Module, batch_size: int, image_size: int, image_channels: int, device: torch.device
) -> float:
    """Time forward and backward of random images in a training's precision and layout; its optimizer takes little."""
    import torch

    from training.parallel.precision import resolve_precision, under_autocast

    layout, synchronize = torch.channels_last, torch.get_device_module(device).synchronize
    # Not is_bf16_supported, which is true of GPUs before Ampere, too: they only emulate it.
    network = under_autocast(module.to(memory_format=layout), resolve_precision("auto", device), device)
    images = torch.rand(batch_size, image_channels, image_size, image_size, device=device)
    images = images.contiguous(memory_format=layout)
    for step in range(WARM_UP_STEPS + TIMED_STEPS):
        if step == WARM_UP_STEPS:
            synchronize()
            start = time.perf_counter()
        network(images).square().mean().backward()
        module.zero_grad()
    synchronize()
    return (time.perf_counter() - start) / TIMED_STEPS
