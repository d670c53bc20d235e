"""From lists of image files to data sets, with the decoder and the cache that the options ask for."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from training.data import DataOptions
from training.data.datasets import PHOTOGRAPHS, DatasetPair, make_dataset_pair
from training.data.reading.cache import open_cache
from training.data.reading.decode import make_decoder, shrunk_bytes
from training.data.reading.images import ImageError
from training.data.reading.sources import FileSource, ImageFile

CACHE_FORMAT = 2  # increased when the same file gives other pixels, or the files of a cache change their format
HEADERS_READ = 64


def make_file_datasets(
    root: Path, parts: Sequence[list[ImageFile]], class_names: list[str], options: DataOptions, notes: Iterable[str]
) -> DatasetPair:
    """Make the data sets of training and validation files, or both of one list of files.

    Raises:
        UserError: As `make_dataset_pair`.
    """
    size = options.image_size or PHOTOGRAPHS.image_size
    files = [file for part in parts for file in part]
    cache, note = None, ""
    if options.decode == "cpu" and options.cache != "off":
        cache, note = open_cache(options, _cache_key(root, files, size), _expected_bytes(root, files, size))
    decoder, sources, first = make_decoder(options.decode, size), [], 0
    for part in parts:
        sources.append(FileSource(root, part, decoder, cache, first, decodes_later=options.decode == "gpu"))
        first += len(part)
    fingerprint = _fingerprint(class_names, parts)
    all_notes = [*notes, *([note] if note else [])]
    return make_dataset_pair(sources[0], sources[-1], class_names, PHOTOGRAPHS, options, fingerprint, all_notes)


def _fingerprint(class_names: list[str], parts: Iterable[list[ImageFile]]) -> str:
    """Return the sha256 over the class names and the sorted path, size and label of the files of each part."""
    digest = hashlib.sha256("\0".join(class_names).encode("utf-8", "surrogateescape"))
    for part in parts:
        digest.update(b"\n\n")
        for file in sorted(part):
            digest.update(os.fsencode(f"{file.path}\0{file.size}\0{file.label}\n"))
    return digest.hexdigest()


def _cache_key(root: Path, files: Sequence[ImageFile], image_size: int) -> str:
    """Return a name that changes with everything that decides the pixels of shrunk images, and their order."""
    digest = hashlib.sha256(f"{CACHE_FORMAT}\0{image_size}\0{os.fspath(root)}\0".encode("utf-8", "surrogateescape"))
    for file in files:
        digest.update(os.fsencode(f"{file.path}\0{file.size}\0{file.changed_ns}\n"))
    return digest.hexdigest()


def _expected_bytes(root: Path, files: Sequence[ImageFile], image_size: int) -> int:
    """Estimate the bytes of all shrunk images from the headers of a few, evenly spread."""
    sizes = []
    for position in np.linspace(0, len(files) - 1, min(len(files), HEADERS_READ)).astype(int):
        try:
            sizes.append(shrunk_bytes(str(root / files[position].path), image_size))
        except ImageError:
            continue
    return int(np.mean(sizes) * len(files)) if sizes else 0
