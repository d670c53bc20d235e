"""Images/s from a folder, tar and Parquet files, and both behind a server that waits before each answer.

python -m benchmarks.remote [IMAGES] [ROUNDS] [DELAY_MS]

One process reads and decodes batches of 64 for a model of 112 pixels; rounds of all kinds take turns. Over http the
first epoch fetches, later ones read what was kept; "too large" are data of which the cache holds two fifths, in a
random order, and by shards with a window of a twelfth of the images. WebDataset and LitData, if they are installed, go
through their files in order and keep nothing; LitData has no http, so it is given a download of whole chunks.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image
from torchvision.transforms import v2

from tests.unit.made_data import as_parquet
from tests.unit.range_server import RangeServer
from zerovision.delivery.pack import pack
from zerovision.training.config import TrainConfig
from zerovision.training.data import DataOptions, load_data
from zerovision.training.data.loader import Loader
from zerovision.training.data.sampler import build_plan

CLASSES, BATCH, SIZE = ("ant", "bee", "cat"), 64, 112


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


def ours(data: str, root: Path, kept_gb: float, window: int, epoch: int) -> int:
    """Read an epoch, in a random order if the window is 0; return its images."""
    order = {"order": "shards", "shuffle_window": window} if window else {}
    pair = load_data(DataOptions(data=data, image_size=SIZE, data_root=str(root), remote_cache_gb=kept_gb, **order))
    loader = Loader(pair.train, build_plan(TrainConfig(**order, batch_size=BATCH), pair.train.source, 1), 0)
    return sum(len(batch.labels) for batch in loader.epoch(epoch))


def peers(url: str, root: Path) -> dict[str, Callable[[int], int]]:
    """Return what reads an epoch over http with each of the peers that are installed, given its number."""
    crop, to_tensor = v2.RandomResizedCrop(SIZE, antialias=True), v2.PILToTensor()
    found: dict[str, Callable[[int], int]] = {}
    with suppress(ImportError):
        import webdataset

        urls = [f"{url}/tar/{path.name}" for path in sorted((root / "tar").glob("train-*.tar"))]
        stream = webdataset.WebDataset(urls, shardshuffle=False).decode("pilrgb").to_tuple("jpg")
        samples = stream.map_tuple(v2.Compose([crop, to_tensor])).batched(BATCH)
        found["http, tar, WebDataset"] = lambda _: sum(len(batch) for (batch,) in samples)
    with suppress(ImportError):
        import litdata
        from litdata.streaming.downloader import Downloader, register_downloader
        from litdata.streaming.resolver import Dir

        class Http(Downloader):
            def download_file(self, remote_filepath: str, local_filepath: str) -> None:
                urllib.request.urlretrieve(remote_filepath, f"{local_filepath}.{os.getpid()}")
                os.replace(f"{local_filepath}.{os.getpid()}", local_filepath)

        register_downloader("http://", Http)
        writer = litdata.streaming.cache.Cache(str(root / "litdata"), chunk_bytes="4MB")
        for number, path in enumerate(sorted((root / "photos").glob("*/*.jpg"))):
            writer[number] = {"image": Image.open(path)}
        writer.done()
        writer.merge()

        def read(epoch: int) -> int:
            kept = root / f"litdata-{epoch}"
            kept.mkdir()
            chunks = litdata.StreamingDataset(Dir(path=str(kept), url=f"{url}/litdata"))
            images = sum(len(crop(sample["image"])) > 0 for sample in chunks)
            shutil.rmtree(kept)
            return images

        found["http, chunks, LitData"] = read
    return found


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
        kinds = {kind: partial(ours, f"{root}/{kind}", cache, 20.0, 0) for kind in ("photos", "tar", "parquet")}
        kinds |= {f"http, kept, {kind}": partial(ours, f"{url}/{kind}", cache, 20.0, 0) for kind in ("tar", "parquet")}
        new = {f"http, first epoch, {kind}": (kind, 20.0, 0) for kind in ("tar", "parquet")}
        new |= {
            f"http, too large, tar, {order}": ("tar", 0.4 * size / 1e9, window)
            for order, window in (("random", 0), ("shards", count // 12))
        }
        kinds |= {kind: partial(ours, f"{url}/{data}", root / kind, *how) for kind, (data, *how) in new.items()}
        kinds |= peers(url, root)
        rates: dict[str, list[float]] = {kind: [] for kind in kinds}
        for number in range(-1, rounds):  # the first one makes indexes and caches
            for kind, read in kinds.items():
                shutil.rmtree(root / kind / "remote", ignore_errors=True)
                begin = time.perf_counter()
                images = read(number + 1)
                found = images / (time.perf_counter() - begin)
                if number >= 0:
                    rates[kind].append(found / rates["photos"][-1] if kind != "photos" else found)
        server.terminate()
    for kind, values in rates.items():
        print(f"{kind:32} {statistics.median(values):9.2f}" + (" images/s" if kind == "photos" else ""))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
