"""Images/s from a folder, tar and Parquet files, and both behind a server that waits before each answer.

python -m benchmarks.remote [IMAGES] [ROUNDS] [DELAY_MS]

One process reads and decodes batches of 64 for a model of 112 pixels; rounds of all kinds take turns. Over http the
first epoch fetches, later ones read what was kept; "too large" are data of which the cache holds two fifths, in a
random order, and by shards with a window of a twelfth of the images.
"""

from __future__ import annotations

import multiprocessing
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

from delivery.pack import pack
from tests.unit.made_data import as_parquet
from tests.unit.range_server import RangeServer
from training.config import TrainConfig
from training.data import DataOptions, load_data
from training.data.loader import Loader
from training.data.sampler import build_plan

CLASSES, BATCH = ("ant", "bee", "cat"), 64


def make_photos(root: Path, count: int) -> Path:
    """Write JPEG files of 500x375 pixels, of about 40 kB each."""
    generator = np.random.default_rng(0)
    for number in range(count):
        place = root / CLASSES[number % len(CLASSES)] / f"{number:05}.jpg"
        place.parent.mkdir(parents=True, exist_ok=True)
        colours = generator.integers(0, 256, (75, 100, 3), dtype=np.uint8)
        Image.fromarray(colours).resize((500, 375), Image.Resampling.BICUBIC).save(place, quality=85)
    return root


def serve(root: Path, delay_s: float, port: multiprocessing.Queue) -> None:
    """Serve a folder, and tell the port."""
    server = RangeServer(root)
    server.delay_s = delay_s
    port.put(server.port)
    time.sleep(3600)


def rate(data: str, root: Path, epoch: int, kept_gb: float, window: int) -> float:
    """Return the images/s of an epoch, in a random order if the window is 0."""
    order = {"order": "shards", "shuffle_window": window} if window else {}
    pair = load_data(DataOptions(data=data, image_size=112, data_root=str(root), remote_cache_gb=kept_gb, **order))
    loader = Loader(pair.train, build_plan(TrainConfig(**order, batch_size=BATCH), pair.train.source, 1), 0)
    begin = time.perf_counter()
    images = sum(len(batch.labels) for batch in loader.epoch(epoch))
    return images / (time.perf_counter() - begin)


def main(count: int = 1500, rounds: int = 5, delay_ms: float = 50) -> None:
    """Print medians, as shares of the folder's rate."""
    with tempfile.TemporaryDirectory() as folder:
        root, cache, port = Path(folder), Path(folder) / "cache", multiprocessing.Queue()
        photos = make_photos(root / "photos", count)
        pack(DataOptions(data=str(photos)), root / "tar", 4_000_000)
        as_parquet(photos, root / "parquet")
        server = multiprocessing.Process(target=serve, args=(root, delay_ms / 1000, port), daemon=True)
        server.start()
        url = f"http://127.0.0.1:{port.get()}"
        size = sum(file.stat().st_size for file in (root / "tar").glob("*.tar"))
        kinds: dict[str, tuple[str, Path, float, int]]
        kinds = {kind: (f"{root}/{kind}", cache, 20.0, 0) for kind in ("photos", "tar", "parquet")}
        kinds |= {
            f"http, first epoch, {kind}": (f"{url}/{kind}", root / f"new-{kind}", 20.0, 0)
            for kind in ("tar", "parquet")
        }
        kinds |= {f"http, kept, {kind}": (f"{url}/{kind}", cache, 20.0, 0) for kind in ("tar", "parquet")}
        kinds |= {
            f"http, too large, tar, {order}": (f"{url}/tar", root / order, 0.4 * size / 1e9, window)
            for order, window in (("random", 0), ("shards", count // 12))
        }
        rates: dict[str, list[float]] = {kind: [] for kind in kinds}
        for number in range(-1, rounds):  # the first one makes indexes and caches
            for kind, (data, place, kept_gb, window) in kinds.items():
                if place != cache:
                    shutil.rmtree(place / "remote", ignore_errors=True)
                found = rate(data, place, number + 1, kept_gb, window)
                if number >= 0:
                    rates[kind].append(found / rates["photos"][-1] if kind != "photos" else found)
        server.terminate()
    for kind, values in rates.items():
        print(f"{kind:32} {statistics.median(values):9.2f}" + (" images/s" if kind == "photos" else ""))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
