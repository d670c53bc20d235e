"""Sources of raw images: arrays in memory, or files."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch

from training.base.errors import UserError
from training.data import DataOptions
from training.data.augment import BoxChooser
from training.data.reading.cache import ImageCache, open_cache
from training.data.reading.decode import Decoder, crop, header_size, make_decoder, shrunk_bytes
from training.data.reading.images import ImageError, read_file
from training.data.values import BYTES

CACHE_FORMAT = 2  # increased when the same file gives other pixels, or the files of a cache change their format
HEADERS_READ = 64
IMAGES_CONVERTED = 1000  # at a time
UNKNOWN = 0  # the digest of a file that was not read
# What `--cache auto` makes a cache for, by benchmarks/results/cache_2cpu_2026-11-22.md.
FEWEST_EPOCHS = 3  # of a run
FEWEST_PIXELS = 2  # of a file, for each pixel that the model sees


class Source(Protocol):
    """Raw images by position.

    Attributes:
        channels: C of the images as they are read.
        values: Type that their numbers had; all but uint8 are read as float32.
        labels: int64 [N].
        in_memory: Whether reading needs no decoding.
        cache_folder: Where decoded images are kept; None if they are not.
        digests: Of the files that are read from now on, by position, see `digest_of`; None to collect none.
    """

    channels: int
    values: str
    labels: torch.Tensor
    in_memory: bool
    cache_folder: Path | None
    digests: dict[int, int] | None

    def read(self, index: int, choose: BoxChooser | None = None) -> torch.Tensor:
        """Return the image, or the part that `choose` takes of it: uint8 or float32 [C, h, w].

        Raises:
            ImageError: The image cannot be read.
        """

    def name(self, index: int) -> str:
        """Return the path of the image, or its position."""


class ArraySource:
    """Images of one size in memory: uint8 [N, C, H, W], or float32 as of `to_values`.

    Grey ones are read as three equal channels, unless `channels` is 1.
    """

    in_memory = True
    cache_folder: Path | None = None
    digests: dict[int, int] | None = None  # arrays have none

    def __init__(self, images: torch.Tensor, labels: torch.Tensor, channels: int = 0, values: str = BYTES) -> None:
        self.images, self.labels, self.values = images, labels, values
        self.channels = channels or (3 if images.shape[1] == 1 else images.shape[1])

    def in_channels(self, channels: int) -> ArraySource:
        """Return the images as they are read with another number of channels; itself for 0, its own number.

        Raises:
            UserError: They cannot be converted: only grey and RGB are, into each other.
        """
        if channels in (0, self.channels):
            return self
        found = self.images.shape[1]
        if found in (1, 3) and channels in (1, found):
            images = self.images if found == channels else grey(self.images)
            return ArraySource(images, self.labels, channels, self.values)
        able = "1 or 3" if found in (1, 3) else f"{found} alone"
        raise UserError(
            f"the images have {found} channel(s), which are read as {able}, not as {channels}: change --image-channels "
            "of the training, or the data."
        )

    def read(self, index: int, choose: BoxChooser | None = None) -> torch.Tensor:
        """Return the image, or the part that `choose` takes of it: uint8 or float32 [C, h, w]."""
        image = self.images[index].expand(self.channels, -1, -1)
        if choose is None:
            return image
        top, left, height, width = choose(*image.shape[1:])
        return image[:, top : top + height, left : left + width]

    def name(self, index: int) -> str:
        """Return the position of the image."""
        return f"image {index}"


def grey(images: torch.Tensor) -> torch.Tensor:
    """Return the grey levels, [N, 1, H, W], of RGB images, uint8 or float32 [N, 3, H, W]: Pillow's, of ITU-R BT.601."""
    shares = torch.tensor([19595, 38470, 7471])[:, None, None]  # of 2^16
    parts = images.split(IMAGES_CONVERTED)
    if images.is_floating_point():
        return torch.cat([(part * (shares / 2**16)).sum(1, True) for part in parts])
    return torch.cat([(((part * shares).sum(1, True) + 2**15) >> 16).to(torch.uint8) for part in parts])


class ImageFile(NamedTuple):
    """Path of an image file relative to the root of the data, size in bytes, label, time of the last change in ns."""

    path: str
    size: int
    label: int
    changed_ns: int = 0


class FileSource:
    """Images in files below `root`.

    Folders and names are bytes in arrays, because a list of a million strings would take ten times the memory, and be
    copied to every worker process.

    Args:
        root: Folder that the paths are relative to.
        files: The files; all but the time of their last change is kept.
        decoder: Decodes a file.
        cache: Keeps decoded images.
        first_in_cache: Position of the first file in the cache.
        channels: C of what the decoder gives.
    """

    in_memory, values = False, BYTES
    digests: dict[int, int] | None = None

    def __init__(
        self,
        root: Path,
        files: Sequence[ImageFile],
        decoder: Decoder,
        cache: ImageCache | None = None,
        first_in_cache: int = 0,
        channels: int = 3,
    ) -> None:
        self.channels = channels
        self.root, self._decode, self._cache, self._first_in_cache = root, decoder, cache, first_in_cache
        self.cache_folder = cache.folder if cache else None
        self.labels = torch.tensor([file.label for file in files])
        self.sizes = torch.tensor([file.size for file in files])
        parts = [os.path.split(file.path) for file in files]
        numbers = {folder: number for number, folder in enumerate(dict.fromkeys(folder for folder, _ in parts))}
        self._folders = list(numbers)
        self._folder_of = torch.tensor([numbers[folder] for folder, _ in parts], dtype=torch.int32)
        names = [os.fsencode(name) for _, name in parts]
        self._names = torch.from_numpy(np.frombuffer(bytearray(b"".join(names)), dtype=np.uint8))
        self._ends = torch.tensor([len(name) for name in names]).cumsum(0)

    def read(self, index: int, choose: BoxChooser | None = None) -> torch.Tensor:
        """Return the image, or the part that `choose` takes of it: uint8 [C, h, w]; raise ImageError if it is bad."""
        cache, position = self._cache, self._first_in_cache + index
        cached = None if cache is None else cache.get(position)
        if cache is not None and cached is not None:
            self._note_digest(index, cache.digest(position))
            pixels = crop(cached, choose)
        elif cache is None or cache.is_full:
            name = self.name(index)
            content = read_file(name)
            if self.digests is not None:
                self._note_digest(index, digest_of(content))
            pixels = self._decode(name, choose, content)  # of a JPEG no more than that part
        else:
            name = self.name(index)
            content = read_file(name)
            digest = digest_of(content)
            self._note_digest(index, digest)
            whole = self._decode(name, data=content)
            cache.put_digest(position, digest)
            cache.put(position, whole)
            pixels = crop(whole, choose)
        return torch.from_numpy(pixels).permute(2, 0, 1)  # the memory keeps its order

    def _note_digest(self, index: int, digest: int) -> None:
        if self.digests is not None:
            self.digests[index] = digest

    def name(self, index: int) -> str:
        """Return the path of the image."""
        return str(self.root / self.path(index))

    def path(self, index: int) -> str:
        """Return the path of the image, relative to `root`."""
        start, end = int(self._ends[index - 1]) if index else 0, int(self._ends[index])
        name = os.fsdecode(self._names[start:end].numpy().tobytes())
        return os.path.join(self._folders[int(self._folder_of[index])], name)


def digest_of(content: bytes) -> int:
    """Return 63 bits of a file's sha256, never `UNKNOWN`: equal ones mean the same file, byte for byte."""
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "little") >> 1 or 1


def open_files(
    root: Path, parts: Sequence[list[ImageFile]], image_size: int, options: DataOptions
) -> tuple[list[FileSource], list[str]]:
    """Return the source of each list of files, with the decoder and the cache that the options name, and notes."""
    files = [file for part in parts for file in part]
    cache, note, channels = None, "", options.image_channels or 3
    decoder = make_decoder(options.decode, image_size, channels)
    if options.decode == "cpu" and options.cache != "off":
        sides = _sides_of_some(root, files)
        key = _cache_key(root, files, image_size, channels)
        cache, note = open_cache(
            options,
            key,
            expected_bytes=int(len(files) * _mean([shrunk_bytes(*side, image_size, channels) for side in sides])),
            not_worth_it=_not_worth_it(options.epochs, _mean([height * width for height, width in sides]), image_size),
        )
    sources, first = [], 0
    for part in parts:
        sources.append(FileSource(root, part, decoder, cache, first, channels=channels))
        first += len(part)
    return sources, [note] if note else []


def _cache_key(root: Path, files: Sequence[ImageFile], image_size: int, channels: int) -> str:
    """Return a name that changes with everything that decides the pixels of shrunk images, and their order."""
    pixels = f"{image_size}" if channels == 3 else f"{image_size}x{channels}"
    digest = hashlib.sha256(f"{CACHE_FORMAT}\0{pixels}\0{os.fspath(root)}\0".encode("utf-8", "surrogateescape"))
    for file in files:
        digest.update(os.fsencode(f"{file.path}\0{file.size}\0{file.changed_ns}\n"))
    return digest.hexdigest()


def _sides_of_some(root: Path, files: Sequence[ImageFile]) -> list[tuple[int, int]]:
    """Return height and width of a few images, evenly spread, from their headers."""
    sides = []
    for position in np.linspace(0, len(files) - 1, min(len(files), HEADERS_READ)).astype(int):
        with suppress(ImageError):
            sides.append(header_size(str(root / files[position].path)))
    return sides


def _mean(values: Sequence[int]) -> float:
    return sum(values) / max(1, len(values))


def _not_worth_it(epochs: int, pixels: float, image_size: int) -> str:
    """Return why a run should not begin a cache, '' if it should; the same on every rank and at every start."""
    if epochs < FEWEST_EPOCHS:
        return f"a run of {epochs} epoch(s) hardly earns it back"
    if pixels < FEWEST_PIXELS * image_size**2:
        return f"files of {pixels:.0f} pixels are decoded quickly beside a model that sees {image_size**2}"
    return ""
