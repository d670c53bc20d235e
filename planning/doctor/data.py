"""The data set as one machine has it: does it load, can it be read, how fast; and what follows from that."""

from __future__ import annotations

import hashlib
import itertools
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from planning.doctor.table import Row
from training.data import DATASETS, DataOptions, find_dataset, load_data
from training.errors import UserError

SAMPLE = 256  # images of each part that are decoded
DECODE_SECONDS = 1.0
BATCH = 16
MOST_ENTRIES = 20_000  # that the cheap fingerprint looks at
BAD_FILES_NAMED = 3


def examine_data(options: Mapping[str, Any]) -> dict[str, Any]:
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
        "classes": len(report.class_names),
        "train": sum(report.train_counts),
        "val": sum(report.val_counts),
        "smallest_class": min(report.train_counts),
        "image_size": datasets.preprocessing["image_size"],
        "decoded": report.decoded,
        "unreadable": [f"{path} ({reason})" for path, reason in report.unreadable],
        "in_memory": datasets.train.source.in_memory,
        "images_per_second": None if report.unreadable else _read_rate(datasets.train),
    }


def _read_rate(dataset: Any) -> float:
    """Return images per second of one worker: decoding and augmentation, as the training does them."""
    import numpy as np

    from training.data.reader import BatchReader
    from training.data.sampler import BatchKey

    dataset.most_bad = len(dataset) - 1
    reader, read = BatchReader(dataset), 0
    order = np.random.default_rng(0).permutation(len(dataset))
    start = time.perf_counter()
    while time.perf_counter() - start < DECODE_SECONDS:
        indices = order[np.arange(read, read + BATCH) % len(dataset)]
        reader[BatchKey(0, indices, np.ones(BATCH, dtype=np.float32))]
        read += BATCH
    return read / (time.perf_counter() - start)


def cheap_fingerprint(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what tells this machine's copy of a data set from another's: a hash, and what it covers.

    Of a folder the names and sizes of the first files in the order of their names, without opening one; of a data set
    that is part of the installed packages nothing.

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
    root, digest, seen = Path(given.data).expanduser().resolve(), hashlib.sha256(), 0
    if not root.is_dir():
        raise UserError(f"no folder {str(root)!r}")
    for path, size in itertools.islice(_entries(str(root)), MOST_ENTRIES):
        digest.update(os.fsencode(f"{path[len(str(root)) :]}\0{size}\n"))
        seen += 1
    return {"hash": digest.hexdigest(), "covers": f"{'the first ' if seen == MOST_ENTRIES else ''}{seen} entries"}


def _entries(folder: str) -> Iterator[tuple[str, int]]:
    """Yield path and size of all folders (size 0) and files below one, hidden ones left out."""
    with os.scandir(folder) as scan:
        entries = sorted((entry for entry in scan if not entry.name.startswith(".")), key=lambda entry: entry.name)
    folders = [entry for entry in entries if entry.is_dir()]
    yield from ((entry.path, 0) for entry in folders)
    yield from ((entry.path, entry.stat().st_size) for entry in entries if entry.is_file())
    for entry in folders:
        yield from _entries(entry.path)


def judge_data(name: str, host: str, facts: Mapping[str, Any], model: Mapping[str, Any], ranks: int) -> list[Row]:
    """Judge what `examine_data` found on a host, against what a rank's step takes (`model_facts`, may be empty)."""
    if "late" in facts:
        cure = "training will wait as long: fewer, larger files, or a disk of the machine's own; --check-data has time"
        return [Row("data", "warning", f"{name} could not be looked at: {facts['late']}", cure, host)]
    if "problem" in facts:
        return [Row("data", "wrong", facts["problem"], "correct --data, or put the data set there", host)]
    sample = "all" if facts["decoded"] == facts["train"] + facts["val"] else f"a sample of {facts['decoded']}"
    found = f"{name}: {facts['classes']} classes, {facts['train']} + {facts['val']} images, {sample} decoded"
    bad = facts["unreadable"]
    if bad:
        more = f" and {len(bad) - BAD_FILES_NAMED} more" if len(bad) > BAD_FILES_NAMED else ""
        found = f"{found}; unreadable: {', '.join(bad[:BAD_FILES_NAMED])}{more}"
        cure = "repair or remove them: scripts/doctor.py --check-data lists all; or train with --bad-images skip"
        return [Row("data", "wrong", found, cure, host)]
    return [Row("data", "ok", found, "", host), _judge_rate(host, facts, model, ranks)]


def _judge_rate(host: str, facts: Mapping[str, Any], model: Mapping[str, Any], ranks: int) -> Row:
    rate = facts["images_per_second"]
    found = f"{rate:.0f} images/s a worker ({'in memory' if facts['in_memory'] else 'decoded'})"
    if not model.get("images_per_second"):
        return Row("reading", "ok", found, "", host)
    eaten, device = model["images_per_second"], model["device"]
    workers = max(model["cores"] // max(ranks, 1) - 1, 1)
    found = f"{found}; a rank on {device} takes {eaten:.0f} images/s, and has {workers} core(s) for workers"
    if device == "cpu" or workers * rate >= eaten or facts["in_memory"]:
        return Row("reading", "ok", found, "", host)
    cure = "the GPUs will wait for data: smaller files, --cache ram or disk, --decode gpu, or more cores"
    return Row("reading", "warning", found, cure, host)
