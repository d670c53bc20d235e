"""Sources of raw images: arrays in memory, or encoded images, which are files or lie in archives."""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path, PurePath
from typing import NamedTuple, Protocol

import numpy as np
import torch

from zerovision.training.base.errors import UserError
from zerovision.training.data import DataOptions
from zerovision.training.data.augment import BoxChooser
from zerovision.training.data.reading.cache import ImageCache, open_cache
from zerovision.training.data.reading.decode import Decoder, crop, decode_exact, header_size, make_decoder, shrunk_bytes
from zerovision.training.data.reading.image_numbers import decode_numbers, kind_of_numbers
from zerovision.training.data.reading.images import MAX_FILE_BYTES, ImageError, read_file
from zerovision.training.data.settings import NUMBERS
from zerovision.training.data.values import BYTES

CACHE_FORMAT = 3  # increased when the same file gives other pixels, or the files of a cache change their format
HEADERS_READ = 64
IMAGES_CONVERTED = 1000  # at a time
ROW_BITS = 32  # of a place in a Parquet file, above which is the number of the row group
UNKNOWN = 0  # the digest of a file that was not read


class Source(Protocol):
    """Raw images by position.

    Attributes:
        channels: C of the images as they are read.
        values: Type that their numbers had; all but uint8 are read as float32.
        labels: int64 [N].
        in_memory: Whether reading needs no decoding.
        cache_folder: Where decoded images are kept; None if they are not.
        digests: Of the files that are read from now on, by position, see `digest_of`; None to collect none.
        loss_weights: float32 [N], of the samples' losses in training; None if all are 1.
    """

    channels: int
    values: str
    labels: torch.Tensor
    in_memory: bool
    cache_folder: Path | None
    digests: dict[int, int] | None
    loss_weights: torch.Tensor | None

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
    loss_weights: torch.Tensor | None = None

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
    """An encoded image.

    Attributes:
        path: Relative to the root of the data; of an image in an archive what it is called there.
        size: In bytes.
        label: Number of its class.
        changed_ns: Time of the last change.
        weight: Of its loss in training.
        archive: Number of the file of the `Archive` that it is in.
        place: Where it is in that file: by bytes, or by row group and row, see `ROW_BITS`.
    """

    path: str
    size: int
    label: int
    changed_ns: int = 0
    weight: float = 1.0
    archive: int = 0
    place: int = 0


class Archive(Protocol):
    """Files that contain encoded images; can be sent to worker processes."""

    @property
    def files(self) -> Sequence[PurePath]:
        """Their paths."""

    def read(self, archive: int, place: int, size: int) -> bytes:
        """Return an image of so many bytes by where it is, see `ImageFile`.

        Raises:
            UserError: The file is not the one any more that was listed.
            FileServerError: It cannot be read now, see `patiently`.
        """

    # One whose files are far away also has `expect`, see `RemoteArchive`.


class FileSource:
    """Encoded images: files below `root`, or in archives.

    Folders and names are bytes in arrays, because a list of a million strings would take ten times the memory, and be
    copied to every worker process.

    Args:
        root: Folder that the paths are relative to.
        files: The images; all but the time of their last change is kept.
        decoder: Decodes an image.
        cache: Keeps decoded images.
        first_in_cache: Position of the first image in the cache.
        channels: C of what the decoder gives.
        archive: What the images are in; None if each is a file of its own.

    Attributes:
        loss_weights: float32 [N], of the samples' losses in training; None if all are 1.
    """

    in_memory, values = False, BYTES
    digests: dict[int, int] | None = None

    def __init__(
        self,
        root: PurePath,
        files: Sequence[ImageFile],
        decoder: Decoder,
        cache: ImageCache | None = None,
        first_in_cache: int = 0,
        channels: int = 3,
        archive: Archive | None = None,
    ) -> None:
        self.channels, self._archive = channels, archive
        self.root, self._decode, self._cache, self._first_in_cache = root, decoder, cache, first_in_cache
        self.cache_folder = cache.folder if cache else None
        self.labels, self.sizes = _integers(file.label for file in files), _integers(file.size for file in files)
        numbers: dict[str, int] = {}
        names, ends, folder_of = bytearray(), array("q"), array("i")
        for file in files:
            folder, name = os.path.split(file.path)
            folder_of.append(numbers.setdefault(folder, len(numbers)))
            names += os.fsencode(name)
            ends.append(len(names))
        self._folders = list(numbers)
        self._folder_of = torch.from_numpy(np.array(folder_of, dtype=np.int32))
        self._names, self._ends = torch.from_numpy(np.array(names, dtype=np.uint8)), _integers(ends)
        self._places = None
        if archive:
            self._places = _integers(number for file in files for number in (file.archive, file.place)).view(-1, 2)
        weights = torch.from_numpy(np.fromiter((file.weight for file in files), dtype=np.float32))
        self.loss_weights = None if bool((weights == 1).all()) else weights

    def content(self, index: int) -> bytes:
        """Return the bytes of the image, undecoded; raise ImageError if they cannot be had."""
        if self._archive is None or self._places is None:
            return read_file(self.name(index))
        (archive, place), size = self._places[index].tolist(), int(self.sizes[index])
        if size > MAX_FILE_BYTES:
            raise ImageError(self.name(index), f"{size / 1e6:.0f} MB, more than {MAX_FILE_BYTES / 1e6:g} MB")
        return self._archive.read(archive, place, size)

    def expect(self, indices: Iterable[int]) -> None:
        """Begin to fetch images that will be read, if they are far away and not in the cache."""
        expect = getattr(self._archive, "expect", None)
        if expect is None or self._places is None:
            return
        cache, first = self._cache, self._first_in_cache
        far = [index for index in indices if cache is None or not cache.digest(first + index)]
        expect((*self._places[index].tolist(), int(self.sizes[index])) for index in far)

    def shards(self) -> np.ndarray:
        """Return the shard of each image and its place in that, int64 [N, 2], or [0, 2] if each is a file of its own.

        A shard is a tar file, of a larger one 4 GB, or a row group of a Parquet file.
        """
        if self._places is None:
            return np.empty((0, 2), dtype=np.int64)
        archive, place = self._places.numpy().T
        return np.stack([archive << 31 | place >> ROW_BITS, place], axis=1)

    def read(self, index: int, choose: BoxChooser | None = None) -> torch.Tensor:
        """Return the image, or the part that `choose` takes of it: uint8 [C, h, w]; raise ImageError if it is bad."""
        cache, position = self._cache, self._first_in_cache + index
        cached = None if cache is None else cache.get(position)
        if cache is not None and cached is not None:
            self._note_digest(index, cache.digest(position))
            pixels = crop(cached, choose)
        else:
            name, content = self.name(index), self.content(index)
            is_kept = cache is not None and not cache.is_full
            digest = digest_of(content) if is_kept or self.digests is not None else UNKNOWN
            self._note_digest(index, digest)
            if cache is None or not is_kept:
                pixels = self._decode(name, choose, content)  # of a JPEG no more than that part
            else:
                whole = self._decode(name, data=content)
                cache.put_digest(position, digest)
                cache.put(position, whole)
                pixels = crop(whole, choose)
        return torch.from_numpy(pixels).permute(2, 0, 1)  # the memory keeps its order

    def _note_digest(self, index: int, digest: int) -> None:
        if self.digests is not None:
            self.digests[index] = digest

    def name(self, index: int) -> str:
        """Return the path of the image, of one in an archive that of the archive and its name there."""
        if self._archive is None or self._places is None:
            return str(self.root / self.path(index))
        return f"{self._archive.files[int(self._places[index, 0])]}/{self.path(index)}"

    def path(self, index: int) -> str:
        """Return the path of the image, as in `ImageFile`."""
        start, end = int(self._ends[index - 1]) if index else 0, int(self._ends[index])
        name = os.fsdecode(self._names[start:end].numpy().tobytes())
        return os.path.join(self._folders[int(self._folder_of[index])], name)


def _integers(values: Iterable[int]) -> torch.Tensor:
    """Return int64 [N], of millions of values without a list of them."""
    return torch.from_numpy(np.fromiter(values, dtype=np.int64))


def digest_of(content: bytes) -> int:
    """Return 63 bits of a file's sha256, never `UNKNOWN`: equal ones mean the same file, byte for byte."""
    return int.from_bytes(hashlib.sha256(content).digest()[:8], "little") >> 1 or 1


def open_files(
    root: PurePath,
    parts: Sequence[list[ImageFile]],
    image_size: int,
    options: DataOptions,
    archive: Archive | None = None,
) -> tuple[list[FileSource], list[str]]:
    """Return the source of each list of images, with the decoder and the cache that the options name, and notes."""
    files = [file for part in parts for file in part]
    cache, note, channels, max_pixels = None, "", options.image_channels or 3, options.max_megapixels * 10**6
    values = BYTES
    if options.decode == NUMBERS and files:
        example = FileSource(root, files[:1], decode_exact, archive=archive)
        values, found = kind_of_numbers(example.name(0), example.content(0), max_pixels)
        channels = options.image_channels or (3 if found == 1 else found)
        decoder: Decoder = partial(decode_numbers, kind=values, channels=channels, max_pixels=max_pixels)
    else:
        decoder = make_decoder(options.decode, image_size, channels, max_pixels)
    if options.decode == "cpu" and options.cache != "off":
        few = [files[number] for number in np.linspace(0, len(files) - 1, min(len(files), HEADERS_READ)).astype(int)]
        sides = _sides(FileSource(root, few, decoder, archive=archive), max_pixels)
        key = _cache_key(root, files, image_size, channels)
        each = sum(shrunk_bytes(*side, image_size, channels) for side in sides) / max(1, len(sides))
        cache, note = open_cache(options, key, int(len(files) * each))
    sources, first = [], 0
    for part in parts:
        sources.append(FileSource(root, part, decoder, cache, first, channels, archive))
        sources[-1].values = values
        first += len(part)
    return sources, [note] if note else []


def _cache_key(root: PurePath, files: Sequence[ImageFile], image_size: int, channels: int) -> str:
    """Return a name that changes with everything that decides the pixels of shrunk images, and their order."""
    pixels = f"{image_size}" if channels == 3 else f"{image_size}x{channels}"
    digest = hashlib.sha256(f"{CACHE_FORMAT}\0{pixels}\0{os.fspath(root)}\0".encode("utf-8", "surrogateescape"))
    for file in files:
        digest.update(os.fsencode(f"{file.path}\0{file.size}\0{file.changed_ns}\n"))
    return digest.hexdigest()


def _sides(source: FileSource, max_pixels: int) -> list[tuple[int, int]]:
    """Return height and width of the images that can be read."""
    sides = []
    source.expect(range(len(source.labels)))
    for index in range(len(source.labels)):
        with suppress(ImageError):
            sides.append(header_size(source.name(index), source.content(index), max_pixels))
    return sides
