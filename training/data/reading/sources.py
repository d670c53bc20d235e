"""Where raw images come from: arrays in memory, or files; and what identifies them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch

from training.data.crops import BoxChooser
from training.data.reading.cache import ImageCache
from training.data.reading.decode import Decoder, cut


class Source(Protocol):
    """Raw images by position.

    Attributes:
        labels: int64 [N].
        in_memory: Whether reading costs no decoding.
        decodes_later: Whether batches carry files, which the GPU decodes.
    """

    labels: torch.Tensor
    in_memory: bool
    decodes_later: bool

    def read(self, index: int) -> torch.Tensor:
        """Return the image as uint8 [3, H, W]; raise ImageError where it cannot be read."""

    def read_part(self, index: int, choose: BoxChooser) -> torch.Tensor:
        """Return what `choose` takes of the image that `read` gives: uint8 [3, h, w]."""

    def name(self, index: int) -> str:
        """Return the path of the image, or where it stands."""


class ArraySource:
    """Images of one size in memory: uint8 [N, 1 or 3, H, W]; grey ones are shown as three equal channels."""

    in_memory, decodes_later = True, False

    def __init__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self.images, self.labels = images, labels

    def read(self, index: int) -> torch.Tensor:
        """Return the image as uint8 [3, H, W]."""
        return self.images[index].expand(3, -1, -1)

    def read_part(self, index: int, choose: BoxChooser) -> torch.Tensor:
        """Return a part of the image, uint8 [3, h, w]."""
        box = choose(*self.images.shape[2:])
        return self.read(index)[:, box.top : box.top + box.height, box.left : box.left + box.width]

    def name(self, index: int) -> str:
        """Return where the image stands."""
        return f"image {index}"


class ImageFile(NamedTuple):
    """An image file: its path relative to the root of the data, its size in bytes, its label, when it was changed."""

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
        files: The files; only their paths and labels are kept.
        decoder: From a path to pixels.
        cache: Where decoded images are kept; None for nowhere.
        first_in_cache: Position of the first file in the cache.
        decodes_later: As for `Source`.
    """

    in_memory = False

    def __init__(
        self,
        root: Path,
        files: Sequence[ImageFile],
        decoder: Decoder,
        cache: ImageCache | None = None,
        first_in_cache: int = 0,
        decodes_later: bool = False,
    ) -> None:
        self.decodes_later = decodes_later
        self.root, self._decoder, self._cache, self._first_in_cache = root, decoder, cache, first_in_cache
        self.labels = torch.tensor([file.label for file in files])
        parts = [os.path.split(file.path) for file in files]
        numbers = {folder: number for number, folder in enumerate(dict.fromkeys(folder for folder, _ in parts))}
        self._folders = list(numbers)
        self._folder_of = torch.tensor([numbers[folder] for folder, _ in parts], dtype=torch.int32)
        names = [os.fsencode(name) for _, name in parts]
        self._names = torch.from_numpy(np.frombuffer(bytearray(b"".join(names)), dtype=np.uint8))
        self._ends = torch.tensor([len(name) for name in names]).cumsum(0)

    def read(self, index: int) -> torch.Tensor:
        """Return the image as uint8 [3, H, W]; raise ImageError where it cannot be read."""
        cached = self._cached(index)
        return _channels_first(self._decode(index) if cached is None else cached)

    def read_part(self, index: int, choose: BoxChooser) -> torch.Tensor:
        """Return a part of the image, uint8 [3, h, w]; raise ImageError where it cannot be read."""
        pixels = self._cached(index)
        if pixels is None:
            if self._cache is None or self._cache.is_full:
                return _channels_first(self._decoder.read_part(self.name(index), choose))
            pixels = self._decode(index)
        return _channels_first(cut(pixels, choose))

    def name(self, index: int) -> str:
        """Return the path of the image."""
        start, end = int(self._ends[index - 1]) if index else 0, int(self._ends[index])
        name = os.fsdecode(self._names[start:end].numpy().tobytes())
        return str(self.root / self._folders[int(self._folder_of[index])] / name)

    def _cached(self, index: int) -> np.ndarray | None:
        return None if self._cache is None else self._cache.get(self._first_in_cache + index)

    def _decode(self, index: int) -> np.ndarray:
        pixels = self._decoder.read(self.name(index))
        if self._cache is not None:
            self._cache.put(self._first_in_cache + index, pixels)
        return pixels


def _channels_first(pixels: np.ndarray) -> torch.Tensor:
    """Show [H, W, 3] as [3, H, W]; the memory stays as it is."""
    return torch.from_numpy(pixels).permute(2, 0, 1)


def pixel_statistics(images: torch.Tensor) -> tuple[list[float], list[float]]:
    """Return mean and standard deviation per channel of uint8 [N, C, H, W] as values in 0..1, 4 decimals, 3 entries."""
    means, stds = [], []
    levels = np.arange(256) / 255
    for channel in images.unbind(1):
        shares = np.bincount(channel.reshape(-1).numpy(), minlength=256) / channel.numel()
        mean = float(shares @ levels)
        means.append(round(mean, 4))
        stds.append(round(float(shares @ (levels - mean) ** 2) ** 0.5, 4))
    repeats = 3 // len(means)
    return means * repeats, stds * repeats


def fingerprint_arrays(class_names: list[str], *sources: ArraySource) -> str:
    """Return the sha256 over the class names and the bytes of images and labels."""
    digest = hashlib.sha256("\0".join(class_names).encode())
    for source in sources:
        digest.update(source.images.contiguous().numpy().data)
        digest.update(source.labels.numpy().data)
    return digest.hexdigest()


def fingerprint_files(class_names: list[str], *parts: Iterable[ImageFile]) -> str:
    """Return the sha256 over the class names and the sorted path, size and label of the files of each part."""
    digest = hashlib.sha256("\0".join(class_names).encode("utf-8", "surrogateescape"))
    for part in parts:
        digest.update(b"\n\n")
        for file in sorted(part):
            digest.update(os.fsencode(f"{file.path}\0{file.size}\0{file.label}\n"))
    return digest.hexdigest()
