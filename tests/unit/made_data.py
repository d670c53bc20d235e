"""Folders of images, what else lists the same ones, and loaders of them, for the tests of data."""

from __future__ import annotations

import csv
import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from zerovision.delivery.pack import pack
from zerovision.training.data import DataOptions
from zerovision.training.data.datasets import DatasetPair
from zerovision.training.data.loader import Loader
from zerovision.training.data.reading.files import named, read_file
from zerovision.training.data.sampler import BatchPlan

CLASSES = ("ant", "bee", "cat")
SPLIT = {"val_fraction": 0.3, "split_seed": 5}


def of_files(decode: Callable[..., Any]) -> Callable[..., Any]:
    """Return what decodes files by their paths, of what decodes their bytes."""

    def read(path: str | Path, *choose: Any, found: dict[str, str] | None = None, **options: Any) -> Any:
        with named(path, found) as notes:
            return decode(read_file(path), *choose, notes=notes, **options)

    return read


def class_folders(root: Path) -> Iterator[Path]:
    """Make and yield the folders of classes a and b in train/ and in val/."""
    for part, name in product(("train", "val"), ("a", "b")):
        (root / part / name).mkdir(parents=True)
        yield root / part / name


def save_animation(path: Path, size: tuple[int, int]) -> None:
    """Write a file of two frames, of (width, height) pixels."""
    frames = [Image.new("RGB", size, colour) for colour in ("red", "lime")]
    frames[0].save(path, save_all=True, append_images=frames[1:])


def train_loader(datasets: DatasetPair, batch_size: int, **options) -> Loader:
    """Return the loader of the only rank, without accumulation."""
    return Loader(datasets.train, BatchPlan(len(datasets.train), batch_size, 1, 1, 0), 0, **options)


def make_photos(root: Path, count: int = 12) -> Path:
    """Write `count` JPEG and PNG images of each class, smooth ones, of several sizes."""
    generator = np.random.Generator(np.random.PCG64(3))
    for label, name in enumerate(CLASSES):
        (root / name).mkdir(parents=True)
        for number in range(count):
            colours = generator.integers(0, 256, (3, 4, 3), dtype=np.uint8)
            image = Image.fromarray(colours).resize((90 + 10 * label, 60 + number), Image.Resampling.BICUBIC)
            image.save(root / name / f"{number:02}.{'png' if number % 4 == 0 else 'jpg'}")
    return root


def write_csv(file: Path, rows: list[dict]) -> Path:
    with file.open("w", newline="", encoding="utf-8") as stream:
        writer = csv.DictWriter(stream, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return file


def as_table(root: Path, place: Path) -> Path:
    """Write the table of a folder, in an order of its own."""
    rows = []
    for path in root.rglob("*.*"):
        *part, label, name = path.relative_to(root).parts
        rows.append({"label": label, "path": str(Path(*part, label, name)), **({"split": part[0]} if part else {})})
    return write_csv(place.with_suffix(".csv"), sorted(rows, key=lambda row: row["path"][::-1]))


def as_tar(root: Path, place: Path) -> Path:
    """Pack a folder into tar files of about 20 kB."""
    pack(DataOptions(data=str(root), **SPLIT), place, 20_000)
    return place


def as_parquet(root: Path, place: Path) -> Path:
    """Write a folder as `datasets` pushes it to the hub: a ClassLabel, row groups, a file for each part."""
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    of_part: dict[str, list[Path]] = defaultdict(list)
    for path in sorted(root.rglob("*.*"), key=lambda path: path.name):
        *part, _, _ = path.relative_to(root).parts
        of_part[{"val": "validation"}.get(*part[:1], *part[:1]) if part else "all"].append(path)
    feature = {"names": [*CLASSES], "_type": "ClassLabel"}
    metadata = {"huggingface": json.dumps({"info": {"features": {"label": feature, "image": {"_type": "Image"}}}})}
    place.mkdir()
    for part, paths in of_part.items():
        images = [{"bytes": path.read_bytes(), "path": str(path.relative_to(root))} for path in paths]
        labels = [CLASSES.index(path.parent.name) for path in paths]
        table = pyarrow.table({"image": images, "label": labels}).replace_schema_metadata(metadata)
        parquet.write_table(table, place / f"{part}-00000-of-00001.parquet", row_group_size=5)
    return place


# By kind: from a folder and a name.
KINDS: dict[str, Callable[[Path, Path], Path]] = {"table": as_table, "tar": as_tar, "parquet": as_parquet}
