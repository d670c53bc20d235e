"""Sources of raw images: arrays in memory, or encoded images in files or archives; and the cache of decoded ones.

A cache is a folder of two files. `pixels` is only ever appended to; entry i of `index` contains the offset of image i,
the digest of its file, and a checksum over the entry, the name of the cache and the pixels, which is verified on every
read. Therefore a torn, stale or foreign entry is never used, no matter which process was killed and when; the image is
decoded again instead.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import itertools
import os
import struct
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zerovision.training.base.control_groups import usable_memory
from zerovision.training.base.errors import UserError
from zerovision.training.base.run_folder import SHARED_MEMORY
from zerovision.training.base.units import plural
from zerovision.training.data import DataOptions
from zerovision.training.data.augment import BoxChooser
from zerovision.training.data.images import Images
from zerovision.training.data.reading.decode import Decoder, crop, header_size, make_decoder, shrunk_bytes
from zerovision.training.data.reading.files import ImageError, Refused, named
from zerovision.training.data.reading.image_numbers import BYTES, decode_numbers, kind_of_numbers
from zerovision.training.data.settings import NUMBERS

INDEX, PIXELS = "index", "pixels"
RAM_SHARE = 0.25  # of the memory that this process may use, for all caches together
DISK_BYTES = 50 * 10**9
_ENTRY = struct.Struct("<QIIq8s")  # offset in bytes, height and width in pixels, digest of the file, checksum
_WORD = 8
CACHE_FORMAT = 4  # increased when decoding yields different pixels, or the format of the cache's files changes
IMAGES_CONVERTED = 1000  # per step
UNKNOWN = 0  # digest of a file that was not read


class ImageCache:
    """The images of one data set by position, as uint8 [H, W, C]; a cache can be sent to worker processes.

    The folder must exist; its name is part of every checksum. Once the file of pixels would exceed `max_bytes`, or the
    disk is full, `is_full` is true in this process, and it adds no more images.
    """

    def __init__(self, folder: Path, max_bytes: int, channels: int = 3) -> None:
        self.folder, self.max_bytes, self.channels, self.is_full = folder, max_bytes, channels, False
        self._open()

    def get(self, index: int) -> tuple[np.ndarray, int] | None:
        """Return an image and the digest of its file; None if the image is missing or damaged."""
        try:
            if (entry := self._entry(index)) is None:
                return None
            *facts, checksum = entry
            offset, height, width, digest = facts
            size = height * width * self.channels
            if size == 0 or offset + size > self.max_bytes:
                return None
            words = np.empty(-(-size // _WORD), dtype=np.uint64)
            if os.preadv(self._pixels, [words.data], offset) < words.nbytes:
                return None
        except OSError:
            return None
        if checksum != self._checksum(index, facts, words):
            return None
        return words.view(np.uint8)[:size].reshape(height, width, self.channels), digest

    def put(self, index: int, pixels: np.ndarray, digest: int) -> None:
        """Add an image, uint8 [H, W, C], and the digest of its file, unless the cache or the disk is full."""
        if self.is_full:
            return
        words = np.zeros(-(-pixels.size // _WORD), dtype=np.uint64)
        words.view(np.uint8)[: pixels.size] = pixels.reshape(-1)
        try:
            fcntl.flock(self._pixels, fcntl.LOCK_EX)  # held at most until the process ends
            try:
                offset = os.fstat(self._pixels).st_size
                if offset + words.nbytes > self.max_bytes:
                    self.is_full = True
                    return
                _write_all(self._pixels, words.data.cast("B"), offset)
            finally:
                fcntl.flock(self._pixels, fcntl.LOCK_UN)
            facts = [offset, *pixels.shape[:2], digest]
            entry = _ENTRY.pack(*facts, self._checksum(index, facts, words))
            _write_all(self._index, memoryview(entry), index * _ENTRY.size)
        except OSError:  # no space left, or over quota: training continues uncached
            self.is_full = True

    def __contains__(self, index: int) -> bool:
        with suppress(OSError):
            return bool((entry := self._entry(index)) and entry[1])
        return False

    def _entry(self, index: int) -> tuple[Any, ...] | None:
        entry = os.pread(self._index, _ENTRY.size, index * _ENTRY.size)
        return _ENTRY.unpack(entry) if len(entry) == _ENTRY.size else None

    def _open(self) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._index, self._pixels = (os.open(self.folder / name, flags, 0o600) for name in (INDEX, PIXELS))

    def _checksum(self, index: int, facts: Sequence[int], words: np.ndarray) -> bytes:
        # A sum detects a missing page or a flipped bit, at a hundredth of the cost of decoding.
        text = " ".join(map(str, (self.folder.name, index, *facts, int(words.sum()))))
        return blake2b(text.encode(), digest_size=8).digest()

    def __getstate__(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("folder", "max_bytes", "channels", "is_full")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        try:
            self._open()
        except OSError:  # the folder was removed, so a worker that starts now has no cache
            self._index = self._pixels = -1
            self.is_full = True


def _write_all(descriptor: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def open_cache(options: DataOptions, key: str, expected_bytes: int) -> tuple[ImageCache | None, str]:
    """Open or create the cache of a data set; return it, or None if this fails, and a one-line message for the user.

    The key is a folder name that depends on everything that determines the pixels.
    """
    root, bound = _location(options)
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Check the owners of a link and of its target. Nobody else can replace our folder: /dev/shm is sticky.
        if {root.lstat().st_uid, root.stat().st_uid} != {os.getuid()}:
            raise PermissionError(errno.EPERM, "belongs to another user")
        room = max(0, bound - sum(_size(path.parent) for path in root.glob(f"*/{INDEX}") if path.parent.name != key))
        (root / key).mkdir(mode=0o700, exist_ok=True)
        cache = ImageCache(root / key, room, options.image_channels or 3)
    except OSError as error:
        return None, f"no cache of decoded images: {root}: {error.strerror}"
    note = f"cache of decoded images: {options.cache}, about {expected_bytes / 1e9:.2f} GB in {cache.folder}"
    if expected_bytes > room:
        note += f", of which {room / 1e9:.2f} GB still fit into {root} (see --cache): remove what you do not need"
    return cache, note


def _location(options: DataOptions) -> tuple[Path, int]:
    """Return the folder of all caches, each in a subfolder named after its key, and their total limit in bytes."""
    bound = int(options.cache_gb * 1e9)
    if options.cache == "disk":
        return options.root / "images", bound or DISK_BYTES
    # other users may write to /dev/shm, so our files are in a folder of our own
    return SHARED_MEMORY / f"zerovision-{os.getuid()}", bound or int(RAM_SHARE * usable_memory())


def _size(folder: Path) -> int:
    with suppress(FileNotFoundError):  # not created yet, or already removed
        return sum((folder / name).stat().st_size for name in (INDEX, PIXELS))
    return 0


class Source:
    """Raw images by position.

    Attributes:
        channels: Number of channels C of the images as read.
        values: Original type of the numbers; all types but uint8 are read as float32.
        labels: int64 [N].
        in_memory: Whether the images need no decoding.
        digest: SHA-256 of the pixels, if only they tell the images from those of another file; otherwise ''.
        cache_folder: Folder of the cache of decoded images, or None.
        digests: Digests of the files that are read, by position (see `digest_of`); None to collect none.
        notes: Notes on unusual images that are read, by path; None to collect none.
        loss_weights: float32 [N], weights of the samples' training losses; None if all are 1.
    """

    channels: int
    values: str
    labels: torch.Tensor
    in_memory = True
    digest = ""
    cache_folder: Path | None = None
    digests: dict[int, int] | None = None
    notes: dict[str, str] | None = None
    loss_weights: torch.Tensor | None = None

    def read(self, index: int, choose: BoxChooser | None = None) -> torch.Tensor:
        """Return the image, or the part that `choose` selects: uint8 or float32 [C, h, w].

        Raises:
            ImageError: If the image cannot be read.
        """
        raise NotImplementedError

    def expect(self, indices: Iterable[int]) -> None:
        """Start fetching images that will be read, if they are remote and not cached."""

    def name(self, index: int) -> str:
        """Return the path of the image, or its position."""
        return f"image {index}"


class ArraySource(Source):
    """Images of one size in memory, uint8 [N, C, H, W] or float32 (see `to_values`); by default, gray becomes RGB."""

    def __init__(self, images: torch.Tensor, labels: torch.Tensor, channels: int = 0, values: str = BYTES) -> None:
        self.images, self.labels, self.values = images, labels, values
        self.channels = channels or (3 if images.shape[1] == 1 else images.shape[1])

    def in_channels(self, channels: int) -> ArraySource:
        """Return the source with `channels` channels, or the source itself if the number is 0 or unchanged.

        Only gray and RGB can be converted into each other; otherwise, raise a UserError.
        """
        if channels in (0, self.channels):
            return self
        found = self.images.shape[1]
        if found in (1, 3) and channels in (1, found):
            images = self.images if found == channels else grey(self.images)
            return ArraySource(images, self.labels, channels, self.values)
        able = "1 or 3" if found in (1, 3) else f"{found} alone"
        raise UserError(
            f"--image-channels {channels}: the images have {plural(found, 'channel')}, which can be read as {able}: "
            "change the flag, or the data."
        )

    def read(self, index: int, choose: BoxChooser | None = None) -> torch.Tensor:
        """See `Source`."""
        image = self.images[index].expand(self.channels, -1, -1)
        return crop(image.permute(1, 2, 0), choose).permute(2, 0, 1)


def grey(images: torch.Tensor) -> torch.Tensor:
    """Convert RGB images, uint8 or float32 [N, 3, H, W], to gray [N, 1, H, W] as Pillow does (ITU-R BT.601)."""
    shares = torch.tensor([19595, 38470, 7471])[:, None, None]  # of 2^16
    parts = images.split(IMAGES_CONVERTED)
    if images.is_floating_point():
        return torch.cat([(part * (shares / 2**16)).sum(1, True) for part in parts])
    return torch.cat([(((part * shares).sum(1, True) + 2**15) >> 16).to(torch.uint8) for part in parts])


@dataclass(eq=False, repr=False)
class FileSource(Source):
    """Encoded images, in files or archives.

    Attributes:
        images: The table of images.
        decoder: Decodes an image.
        cache: Cache of decoded images, or None.
        first_in_cache: Position of the first image in the cache.
        channels: Number of channels C of the decoded images.
        values: Type of the numbers in the files.
    """

    images: Images
    decoder: Decoder
    cache: ImageCache | None = None
    first_in_cache: int = 0
    channels: int = 3
    values: str = BYTES
    in_memory = False

    def __post_init__(self) -> None:
        self.cache_folder = self.cache.folder if self.cache else None
        self.labels, weights = self.images.columns["label"].long(), self.images.columns["weight"].float()
        self.loss_weights = None if bool((weights == 1).all()) else weights

    def expect(self, indices: Iterable[int]) -> None:
        """See `Source`."""
        cache, first = self.cache, self.first_in_cache
        self.images.expect([index for index in indices if cache is None or first + index not in cache])

    def read(self, index: int, choose: BoxChooser | None = None) -> torch.Tensor:
        """See `Source`."""
        cache, position = self.cache, self.first_in_cache + index
        cached = None if cache is None else cache.get(position)
        if cached is not None:
            pixels, digest = crop(cached[0], choose), cached[1]
        else:
            name, content = self.name(index), self.images.content(index)
            is_kept = cache is not None and not cache.is_full
            digest = digest_of(content) if is_kept or self.digests is not None else UNKNOWN
            with named(name, self.notes) as notes:
                pixels = self.decoder(content, None if is_kept else choose, notes)  # a cache needs the whole image
            if cache is not None and is_kept:
                cache.put(position, pixels, digest)
                pixels = crop(pixels, choose)
        if self.digests is not None:
            self.digests[index] = digest
        return torch.from_numpy(pixels).permute(2, 0, 1)  # without a copy

    def name(self, index: int) -> str:
        """See `Images.name`."""
        return self.images.name(index)


def digest_of(content: bytes) -> int:
    """Return 63 bits of a file's SHA-256, never `UNKNOWN`; equal digests mean byte-identical files."""
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "little") >> 1 or 1


def open_files(parts: Sequence[Images], image_size: int, options: DataOptions) -> tuple[list[FileSource], list[str]]:
    """Return a source for each part, with the decoder and the cache that `options` names, and notes for the user.

    A third part is the test part, which is read once and not cached.
    """
    channels, max_pixels, cached = options.image_channels or 3, options.max_megapixels * 10**6, parts[:2]
    values, cache, note = BYTES, None, ""
    if options.decode == NUMBERS and len(parts[0]):
        (values, found), *others = (kind_of_numbers(part, options) for part in parts)
        for (other, _), what in zip(others, ("validation", "test"), strict=False):
            if other != values:
                raise UserError(f"the {what} images are {other}, but the training images are {values}: use one type.")
        channels = options.image_channels or (3 if found == 1 else found)
        decoder: Decoder = partial(decode_numbers, wanted=values, channels=channels, max_pixels=max_pixels)
    else:
        decoder = make_decoder(options.decode, image_size, channels, max_pixels)
    if options.decode == "cpu" and options.cache != "off":
        sizes = []  # in bytes, of evenly spaced images that can be read
        for row in cached[0].spaced_rows():
            with suppress(ImageError, Refused):
                sizes.append(shrunk_bytes(*header_size(cached[0].content(row), max_pixels), image_size, channels))
        expected_bytes = int(sum(map(len, cached)) * (sum(sizes) / max(1, len(sizes))))
        cache, note = open_cache(options, _cache_key(cached, image_size, channels), expected_bytes)
    starts, caches = itertools.accumulate(map(len, parts), initial=0), (cache, cache, None)
    sources = [
        FileSource(part, decoder, own, start, channels, values)
        for part, own, start in zip(parts, caches, starts, strict=False)
    ]
    return sources, [note] if note else []


def _cache_key(parts: Sequence[Images], image_size: int, channels: int) -> str:
    """Return a name that depends on everything that determines the pixels and the order of shrunk images."""
    pixels = f"{image_size}" if channels == 3 else f"{image_size}x{channels}"
    digest = hashlib.sha256(f"{CACHE_FORMAT}\0{pixels}\0{parts[0].root}\0".encode("utf-8", "surrogateescape"))
    for part in parts:
        for path, size, changed in zip(part.paths(), part["size"].tolist(), part["changed"].tolist(), strict=True):
            digest.update(os.fsencode(f"{path}\0{size}\0{changed}\n"))
    return digest.hexdigest()
