"""Start-up, memory, resume and rate of each kind of data with very many images, which are made up.

python -m benchmarks.many_images [IMAGES] [KIND ...]        # 1000000 table tar parquet folder

Tar and Parquet files are one small file under many names; their indexes, as the table, list its images again and again.
A folder has links to copies of few files. There are 20,000 classes. Each kind is loaded in a process of its own, with
the indexes there: memory is what `load_data` adds to the process, at most and for good; "resume" is the time from there
to the first batch at three quarters of epoch 50, its order included; the rate is of a random order, in one process.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from benchmarks.photographs import write_photographs
from tests.unit.made_data import write_csv
from zerovision.delivery.pack import pack
from zerovision.training.config import TrainConfig
from zerovision.training.data import DataOptions, load_data, parquet
from zerovision.training.data.archives import Index, Kind, identity_of, index_of, write_index
from zerovision.training.data.loader import Loader
from zerovision.training.data.sampler import build_plan
from zerovision.training.data.tar_shards import TAR

KINDS = ("table", "tar", "parquet", "folder")
PHOTOGRAPHS, CLASSES, PER_SHARD, BATCHES = 40, 20_000, 10_000, 12
MOST_LINKS = 50_000  # of one file, of which ext4 allows 65,000


def named(number: int) -> str:
    """Return the path of an image."""
    return f"class-{number % CLASSES:05}/{number:09}.jpg"


def make_table(root: Path, images: int) -> Path:
    """Write a table of `images` lines."""
    table = root / "photos" / "list.csv"
    with table.open("w") as stream:
        stream.write("path,label,split\n")
        for number in range(images):
            label, part = named(number).partition("/")[0], "train" if number % 10 else "val"
            stream.write(f"{number % PHOTOGRAPHS:05}.jpg,{label},{part}\n")
    return table


def make_folder(root: Path, images: int) -> Path:
    """Link the photographs, again and again, of each as many copies as names of a file need."""
    originals, place = sorted((root / "photos").glob("*.jpg")), root / "folder"
    for label in range(min(CLASSES, images)):
        (place / named(label)).parent.mkdir(parents=True)
    for number in range(images):
        original = originals[number % PHOTOGRAPHS]
        copy = root / f"{number // (PHOTOGRAPHS * MOST_LINKS)}-{original.name}"
        if not copy.exists():
            shutil.copy(original, copy)
        os.link(copy, place / named(number))
    return place


def make_shards(root: Path, images: int, kind: Kind, first: Path) -> Path:
    """Link one file under many names, and write an index of each."""
    entries, place = kind.scan(first).entries, root / kind.suffix[1:]
    place.mkdir()
    starts = {
        place / f"{'val' if shard % 10 == 9 else 'train'}-{shard:06}{kind.suffix}": start
        for shard, start in enumerate(range(0, images, PER_SHARD))
    }
    for file in starts:
        os.link(first, file)
    state, inode = identity_of(first.stat())  # every link changes the time of its inode's change
    for file, start in starts.items():
        own = [
            entries[number % len(entries)]._replace(path=named(number), label=number % CLASSES)
            for number in range(start, min(start + PER_SHARD, images))
        ]
        write_index(Index(own, columns=kind.columns, state=state, file=inode), index_of(file))
    return place


def make(kind: str, root: Path, images: int) -> Path:
    """Make data of a kind."""
    if kind in ("table", "folder"):
        return {"table": make_table, "folder": make_folder}[kind](root, images)
    if kind == "tar":
        table = [
            {"path": path.name, "label": str(n % 2)} for n, path in enumerate(sorted((root / "photos").glob("*.jpg")))
        ]
        pack(DataOptions(data=str(write_csv(root / "photos" / "few.csv", table))), root / "packed", 10**9)
        return make_shards(root, images, TAR, root / "packed" / "train-000000.tar")
    import pyarrow
    from pyarrow.parquet import write_table

    contents = [{"bytes": path.read_bytes(), "path": path.name} for path in sorted((root / "photos").glob("*.jpg"))]
    write_table(pyarrow.table({"image": contents, "label": [0] * len(contents)}), root / "one.parquet")
    return make_shards(root, images, parquet.kind_of(DataOptions()), root / "one.parquet")


def measure(data: str) -> dict[str, float]:
    """Load data in this process."""
    before, begin = psutil.Process().memory_info().rss, time.process_time()
    pair = load_data(DataOptions(data=data, image_size=112))
    loaded, kept = time.process_time() - begin, psutil.Process().memory_info().rss - before
    images, peak = (
        sum(map(len, pair.parts.values())),
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before,
    )
    begin = time.perf_counter()
    plan = build_plan(TrainConfig(batch_size=64), pair.train.source, 1)
    step = plan.steps_per_epoch * 3 // 4
    found = {"images": images, "start-up CPU s": loaded, "peak bytes": peak / images, "kept bytes": kept / images}
    batches = Loader(pair.train, plan, 0).epoch(50, step)
    next(batches)
    resumed, begin = time.perf_counter() - begin, time.perf_counter()
    count = sum(len(batch.labels) for batch, _ in zip(batches, range(BATCHES), strict=False))
    return found | {"resume s": resumed, "images/s": count / (time.perf_counter() - begin)}


def main() -> None:
    """Make each kind, and measure it in another process."""
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(sys.argv[2])))
        return
    images, kinds = int(sys.argv[1]) if sys.argv[1:] else 1_000_000, sys.argv[2:] or KINDS
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        (root / "photos").mkdir()
        write_photographs(root / "photos", PHOTOGRAPHS)
        for kind in kinds:
            data = str(make(kind, root, images))
            command = [sys.executable, "-m", "benchmarks.many_images", "--measure", data]
            found = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout)
            print(f"{kind:8}", "  ".join(f"{name} {value:,.4g}" for name, value in found.items()), flush=True)


if __name__ == "__main__":
    main()
