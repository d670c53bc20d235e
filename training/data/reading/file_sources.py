"""From lists of image files to sources: with the decoder and the cache that the options ask for."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from training.data import DataOptions
from training.data.datasets import PHOTOGRAPHS
from training.data.reading.cache import ImageCache
from training.data.reading.cache_folders import open_cache
from training.data.reading.decode import Decoder, FullDecoder, ShrinkingDecoder
from training.data.reading.images import ImageError
from training.data.reading.sources import FileSource, ImageFile

CACHE_FORMAT = 2  # another number where the same file gives other pixels, or the files of a cache look otherwise
HEADERS_READ = 64
DECODES_LATER = ("gpu",)

_DECODERS: dict[str, Callable[[int], Decoder]] = {
    "cpu": ShrinkingDecoder,
    "exact": lambda image_size: FullDecoder(),
    "gpu": lambda image_size: FullDecoder(),  # of what is left to the CPU
}


def file_sources(
    root: Path, train: Sequence[ImageFile], val: Sequence[ImageFile], options: DataOptions
) -> tuple[FileSource, FileSource, list[str]]:
    """Make the sources of training and validation files, with what the user should know of their cache."""
    size = options.image_size or PHOTOGRAPHS.image_size
    decoder = make_decoder(options.decode, size)
    cache: ImageCache | None = None
    note = ""
    if isinstance(decoder, ShrinkingDecoder):
        files = [*train, *val]
        expected = _expected_bytes(root, files, decoder) if options.cache != "off" else 0
        cache, note = open_cache(options, _cache_key(root, files, size), expected)
    later = options.decode in DECODES_LATER
    train_source = FileSource(root, train, decoder, cache, decodes_later=later)
    val_source = FileSource(root, val, decoder, cache, first_in_cache=len(train), decodes_later=later)
    return train_source, val_source, [note] if note else []


def make_decoder(name: str, image_size: int) -> Decoder:
    """Return the decoder of a name of `training.data.DECODERS`, for images that the model sees at `image_size`."""
    return _DECODERS[name](image_size)


def file_source(root: Path, files: Sequence[ImageFile], options: DataOptions) -> FileSource:
    """Make the source of files that are read once, without a cache."""
    decoder = make_decoder(options.decode, options.image_size or PHOTOGRAPHS.image_size)
    return FileSource(root, files, decoder, decodes_later=options.decode in DECODES_LATER)


def _cache_key(root: Path, files: Sequence[ImageFile], image_size: int) -> str:
    """Return a name that changes with everything that decides the pixels of shrunk images, and their order."""
    digest = hashlib.sha256(f"{CACHE_FORMAT}\0{image_size}\0{os.fspath(root)}\0".encode("utf-8", "surrogateescape"))
    for file in files:
        digest.update(os.fsencode(f"{file.path}\0{file.size}\0{file.changed_ns}\n"))
    return digest.hexdigest()


def _expected_bytes(root: Path, files: Sequence[ImageFile], decoder: ShrinkingDecoder) -> int:
    """Estimate the bytes of all shrunk images from the headers of a few, evenly spread."""
    chosen = np.linspace(0, len(files) - 1, min(len(files), HEADERS_READ)).astype(int)
    sizes = []
    for position in chosen:
        try:
            height, width = decoder.shrunk_size(str(root / files[position].path))
        except ImageError:
            continue
        sizes.append(3 * height * width)
    return int(np.mean(sizes) * len(files)) if sizes else 0
