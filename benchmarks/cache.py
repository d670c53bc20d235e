"""What the cache of decoded images costs in the first epoch and gains later: with it against without, in one run.

    python benchmarks/cache.py
    python benchmarks/cache.py --rounds 15 --images 200

For each kind of file one loader reads with an empty cache, another without; epochs alternate between them in random
order, and a round has 10 of each. CPU time of the process, one thread; a ratio is taken within a round, and the median
over the rounds is printed with the quartiles. The cache lies in /dev/shm, as with `--cache ram`. "With training" adds
the time of forward and backward of mobilenet, measured apart, to both sides.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from photographs import write_photographs
from PIL import Image
from torch.nn import functional

from zerovision.models.build import build_model
from zerovision.training.data import DataOptions, load_data
from zerovision.training.data.loader import Loader
from zerovision.training.data.reading.decode import shrunk_bytes
from zerovision.training.data.sampler import BatchPlan

EPOCHS = 10
SHOWN = (1, 3, 10)
BATCH_SIZE = 16


KINDS = [
    (64, 64, 64),
    (128, 128, 64),
    (256, 256, 64),
    (256, 256, 224),
    (500, 375, 64),
    (500, 375, 224),
    (2000, 1500, 224),
]


def write_files(folder: Path, width: int, height: int, images: int) -> Path:
    """Write photographs of this size: two classes for training, two images of each for validation."""
    for part, label in product(("train", "val"), ("a", "b")):
        place = folder / part / label
        place.mkdir(parents=True)
        count = images // 2 if part == "train" else 2
        for path in write_photographs(place, count, min(width, 500), min(height, 375)):
            if width > 500:
                with Image.open(path) as image:
                    image.resize((width, height)).save(path, quality=90)
    return folder


def loader(data: Path, image_size: int, root: Path | None) -> Loader:
    """Return the loader of one rank, with a new cache below `root`, or without."""
    cache = {"cache": "disk", "data_root": str(root)} if root else {"cache": "off"}
    pair = load_data(DataOptions(data=str(data), image_size=image_size, **cache))
    return Loader(pair.train, BatchPlan(len(pair.train), BATCH_SIZE, 1, 1, 0), 0)


def round_of(data: Path, image_size: int) -> dict[bool, list[float]]:
    """Return the CPU seconds of each epoch with (True) and without a cache."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as root:
        loaders = {True: loader(data, image_size, Path(root)), False: loader(data, image_size, None)}
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for epoch in range(EPOCHS):
            for cached in random.sample((True, False), 2):
                began = time.process_time()
                for _ in loaders[cached].epoch(epoch):
                    pass
                seconds[cached].append(time.process_time() - began)
        for one in loaders.values():
            one.close()
    return seconds


def step_seconds(image_size: int) -> float:
    """Return the CPU seconds of forward and backward of mobilenet, per image."""
    module = build_model("mobilenet", num_classes=10, image_size=image_size).module
    images, targets = torch.randn(BATCH_SIZE, 3, image_size, image_size), torch.arange(BATCH_SIZE) % 10
    seconds = []
    for _ in range(6):
        began = time.process_time()
        functional.cross_entropy(module(images), targets).backward()
        seconds.append(time.process_time() - began)
    return statistics.median(seconds) / BATCH_SIZE


def quartiles(values: list[float]) -> str:
    """Return median and quartiles."""
    low, middle, high = statistics.quantiles(values, n=4)
    return f"{middle:.2f} ({low:.2f}-{high:.2f})"


def row_of(data: Path, image_size: int, rounds: int) -> list[str]:
    """Return the cells of one kind of file at one image size."""
    images = len(loader(data, image_size, None).dataset)
    found = [round_of(data, image_size) for _ in range(rounds + 1)][1:]  # the first only warms up
    step = step_seconds(image_size) * images
    plain = statistics.median(statistics.mean(one[False]) for one in found)
    first = statistics.median(one[True][0] for one in found)
    later = statistics.median(statistics.mean(one[True][1:]) for one in found)
    cells = [f"{seconds / images * 1e3:.2f}" for seconds in (plain, first, later, step)]
    cells.append(f"{1 + (first - plain) / (plain - later):.1f}")
    for added in (0.0, step):
        for epochs in SHOWN:
            totals = [[sum(one[cached][:epochs]) + epochs * added for cached in (True, False)] for one in found]
            cells.append(quartiles([cached / off for cached, off in totals]))
    return cells


def main() -> None:
    """Measure every kind of file and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--images", type=int, default=64)
    given = parser.parse_args()
    torch.set_num_threads(1)
    random.seed(0)
    columns = ["files, to pixels", "pixels ratio", "in the cache", "ms off", "first epoch", "later", "step"]
    columns += ["even after", *(f"{what}{epochs}" for what in ("epochs: ", "with training: ") for epochs in SHOWN)]
    print("", *columns, "\n" + "|---" * len(columns), "", sep=" | ")
    for width, height, image_size in KINDS:
        with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
            data = write_files(Path(folder), width, height, given.images)
            kind = (f"{width}x{height}, {image_size}", f"{width * height / image_size**2:.1f}")
            size = f"{shrunk_bytes(height, width, image_size) / 1e3:.0f} kB"
            print("", *kind, size, *row_of(data, image_size, given.rounds), "", sep=" | ", flush=True)


if __name__ == "__main__":
    main()
