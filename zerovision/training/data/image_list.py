"""The list of a run's images by path and content, which shows what it used and what has changed since."""

from __future__ import annotations

import csv
import gzip
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from zerovision.training.base.errors import UserError, printable
from zerovision.training.base.files import replacing
from zerovision.training.base.points import Loggers
from zerovision.training.base.run_folder import IMAGES, RunFolder
from zerovision.training.data.datasets import DatasetPair
from zerovision.training.data.loader import Loader
from zerovision.training.data.reading.sources import UNKNOWN, FileSource
from zerovision.training.world.collectives import broadcast_object, largest_over_ranks
from zerovision.training.world.world import World

COLUMNS = ("part", "class", "bytes", "digest", "path")
NAMED = 3


class ListedImage(NamedTuple):
    """A line of the list.

    Attributes:
        part: "train", "val" or "test".
        label: Name of the class.
        size: Size of the file, in bytes.
        digest: Digest of the file's contents; see `reading.sources.digest_of`.
        path: Path of the file, relative to the data folder.
    """

    part: str
    label: str
    size: int
    digest: int
    path: str


def list_images(data: DatasetPair, digests: Mapping[str, np.ndarray] | None = None) -> list[ListedImage]:
    """Return the images of all parts that are read from files.

    Args:
        data: The data sets.
        digests: Digests of each part's images, int64 [N] by part; `UNKNOWN` for missing parts.
    """
    listed, names = [], data.label_names
    for part, set_ in data.parts.items():
        source = set_.source
        if isinstance(source, FileSource):
            images, own = source.images, (digests or {}).get(part, np.full(len(set_), UNKNOWN))
            labels = (names[label] for label in source.labels.tolist())
            rows = zip(labels, images["size"].tolist(), own.tolist(), images.paths(), strict=True)
            listed += [ListedImage(part, *row) for row in rows]
    return listed


def write_image_list(file: Path, images: Sequence[ListedImage]) -> None:
    """Write the list as gzip-compressed CSV, which `zcat` can print."""
    with replacing(file) as temporary, gzip.open(temporary, "wt", 1, "utf-8", "surrogateescape", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(COLUMNS)
        writer.writerows((one.part, one.label, one.size, f"{one.digest:016x}", one.path) for one in images)


def read_image_list(file: Path) -> list[ListedImage]:
    """Return the list in a file; [] if the file does not exist, as for a run on images in memory.

    Raises:
        UserError: If the file is damaged.
    """
    if not file.is_file():
        return []
    try:
        with gzip.open(file, "rt", encoding="utf-8", errors="surrogateescape", newline="") as stream:
            rows = csv.reader(stream)
            next(rows)
            return [
                ListedImage(part, label, int(size), int(digest, 16), path) for part, label, size, digest, path in rows
            ]
    except (OSError, EOFError, ValueError, StopIteration, csv.Error) as error:
        raise UserError(f"'{file}' is damaged ({error}): restore it, or remove it.") from None


def describe_change(before: Sequence[ListedImage], data: DatasetPair) -> str:
    """Describe how a data set differs from a run's list: the number of images then and now, and some examples."""
    now = {one.path: one for one in list_images(data) if one.part != "test"}
    then = {one.path: one for one in before if one.part != "test"}
    if not then:
        return "other images, which the run did not list"
    moved = [path for path in now.keys() & then.keys() if now[path][:2] != then[path][:2]]
    changed = [path for path in now.keys() & then.keys() if now[path].size != then[path].size]
    kinds = {
        "new": now.keys() - then.keys(),
        "gone": then.keys() - now.keys(),
        "changed": changed,
        "in another part or class": moved,
    }
    found = [
        f"{len(paths)} {kind}: {', '.join(sorted(paths)[:NAMED])}{', ...' if len(paths) > NAMED else ''}"
        for kind, paths in kinds.items()
        if paths
    ]
    return printable(f"{len(then)} images then, {len(now)} now; {'; '.join(found) or 'another folder of data'}")


class TrainedImages:
    """The images that a run was trained on, identified by content, or by path if the content is unknown."""

    def __init__(self, images: Sequence[ListedImage]) -> None:
        trained = [one for one in images if one.part == "train"]
        self._digests = np.unique([one.digest for one in trained if one.digest != UNKNOWN]).astype(np.int64)
        self._paths = {os.fsencode(one.path) for one in trained if one.digest == UNKNOWN}

    def __bool__(self) -> bool:
        return bool(len(self._digests) or self._paths)

    def contain(self, digests: np.ndarray, paths: Sequence[str]) -> np.ndarray:
        """Return which images were trained on, bool [B].

        Args:
            digests: int64 [B], `UNKNOWN` for a file that was not read.
            paths: Paths of the images, relative to their data folder.
        """
        found = np.isin(digests, self._digests) & (digests != UNKNOWN)
        return found | np.array([os.fsencode(path) in self._paths for path in paths], dtype=bool)


class ImageContents:
    """Collects the digests of a run's images until all images have been read once, then writes the list.

    The constructor and `after_epoch` are collectives.

    Args:
        folder: The run's folder; if it already contains the list of images, nothing is collected.
        data: The data sets.
        loaders: This rank's loaders, by part.
        world: The ranks.
        loggers: Loggers that receive a message if the list cannot be written.
    """

    def __init__(
        self, folder: RunFolder, data: DatasetPair, loaders: dict[str, Loader], world: World, loggers: Loggers
    ) -> None:
        self._file, self._data, self._loaders = folder.path / IMAGES, data, loaders
        self._world, self._loggers = world, loggers
        is_needed = broadcast_object(not self._file.is_file(), world) and not data.train.source.in_memory
        for loader in loaders.values():
            loader.watch(is_on=is_needed)

    def after_epoch(self, *, is_last_chance: bool) -> None:
        """Write the list once all images have been read; a collective.

        Args:
            is_last_chance: Whether the epoch was read completely or is the last epoch.
        """
        own = {name: loader.digests for name, loader in self._loaders.items() if loader.digests is not None}
        if not (is_last_chance and own):
            return
        here, world = self._world.device, self._world
        digests = {
            name: largest_over_ranks(torch.from_numpy(part).to(here), world).cpu().numpy() for name, part in own.items()
        }
        for loader in self._loaders.values():
            loader.watch(is_on=False)
        if not self._world.is_main:
            return
        try:
            write_image_list(self._file, list_images(self._data, digests))
        except OSError as error:
            self._loggers.message(f"note: the list of images cannot be written: {error}")
