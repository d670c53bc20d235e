"""Where raw images come from: arrays in memory, or files; and what identifies them."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torchvision.transforms.v2.functional import pil_to_tensor

from training.data.images import open_image


class Source(Protocol):
    """Raw images by position.

    Attributes:
        labels: int64 [N].
        in_memory: Whether reading costs no decoding.
    """

    labels: torch.Tensor
    in_memory: bool

    def read(self, index: int) -> torch.Tensor:
        """Return the image as uint8 [3, H, W]; raise ImageError where it cannot be read."""

    def name(self, index: int) -> str:
        """Return the path of the image, or where it stands."""


class ArraySource:
    """Images of one size in memory: uint8 [N, 1 or 3, H, W]; grey ones are shown as three equal channels."""

    in_memory = True

    def __init__(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self.images, self.labels = images, labels

    def read(self, index: int) -> torch.Tensor:
        """Return the image as uint8 [3, H, W]."""
        return self.images[index].expand(3, -1, -1)

    def name(self, index: int) -> str:
        """Return where the image stands."""
        return f"image {index}"


class ImageFile(NamedTuple):
    """An image file: its path relative to the root of the data, its size in bytes, its label."""

    path: str
    size: int
    label: int


class FileSource:
    """Images in files below `root`.

    The paths are one uint8 tensor, because a list of a million strings would be copied to every worker process.
    """

    in_memory = False

    def __init__(self, root: Path, files: Sequence[ImageFile]) -> None:
        self.root, self.labels = root, torch.tensor([file.label for file in files])
        names = np.array([os.fsencode(file.path) for file in files], dtype=np.bytes_)
        self._names = torch.from_numpy(names.view(np.uint8).reshape(len(names), -1))

    def read(self, index: int) -> torch.Tensor:
        """Decode the image: uint8 [3, H, W]; raise ImageError where that fails."""
        return pil_to_tensor(open_image(self.name(index)))

    def name(self, index: int) -> str:
        """Return the path of the image."""
        return str(self.root / os.fsdecode(self._names[index].numpy().tobytes().rstrip(b"\0")))


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
