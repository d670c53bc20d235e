"""Data sets of torchvision, read into the same two kinds of source as our own: arrays in memory, or files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from torchvision import datasets

from training.data import DataOptions, dataset_root
from training.data.datasets import PHOTOGRAPHS, DatasetDefaults, DatasetPair, make_dataset_pair
from training.data.reading.file_sources import file_sources
from training.data.reading.sources import (
    ArraySource,
    ImageFile,
    fingerprint_arrays,
    fingerprint_files,
    pixel_statistics,
)
from training.errors import UserError, unknown_name


@dataclass(frozen=True)
class TorchvisionEntry:
    """How a data set of torchvision names its parts.

    Attributes:
        train: Arguments that select the training part.
        val: Arguments that select the part that is held out: the test part, where the authors made no other.
        augmentation: What "auto" means; mirrored digits would be other digits.
        files: Name of the attribute that lists the image files; "" where the images are an array in memory.
    """

    train: Mapping[str, Any] = field(default_factory=lambda: {"train": True})
    val: Mapping[str, Any] = field(default_factory=lambda: {"train": False})
    augmentation: str = "shift_flip"
    files: str = ""


def _split(train: str, val: str, **values: Any) -> TorchvisionEntry:
    return TorchvisionEntry({"split": train}, {"split": val}, **values)


TORCHVISION_SETS: dict[str, TorchvisionEntry] = {
    "CIFAR10": TorchvisionEntry(),
    "CIFAR100": TorchvisionEntry(),
    "MNIST": TorchvisionEntry(augmentation="shift"),
    "FashionMNIST": TorchvisionEntry(),
    "KMNIST": TorchvisionEntry(augmentation="shift"),
    "USPS": TorchvisionEntry(augmentation="shift"),
    "SVHN": _split("train", "test", augmentation="shift"),
    "STL10": _split("train", "test"),
    "DTD": _split("train", "val", augmentation="crop_flip", files="_image_files"),
    "FGVCAircraft": _split("train", "val", augmentation="crop_flip", files="_image_files"),
    "Flowers102": _split("train", "val", augmentation="crop_flip", files="_image_files"),
    "Food101": _split("train", "test", augmentation="crop_flip", files="_image_files"),
    "OxfordIIITPet": _split("trainval", "test", augmentation="crop_flip", files="_images"),
}


def load(options: DataOptions) -> DatasetPair:
    """Load `torchvision:NAME` from the folder of downloaded data sets.

    Raises:
        UserError: An unknown name; not downloaded and `download` not set; the download failed.
    """
    name = options.data.partition(":")[2]
    if name not in TORCHVISION_SETS:
        raise unknown_name("torchvision data set", name, TORCHVISION_SETS)
    entry = TORCHVISION_SETS[name]
    train, val = (_open(name, arguments, options) for arguments in (entry.train, entry.val))
    class_names = _class_names(train)
    notes = [f"the validation images are torchvision's {'test' if entry.val.get('split') != 'val' else 'val'} part"]
    if entry.files:
        root = dataset_root(options)
        train_files, val_files = (_list_files(dataset, entry.files, root) for dataset in (train, val))
        fingerprint = fingerprint_files(class_names, train_files, val_files)
        train_source, val_source, cache_notes = file_sources(root, train_files, val_files, options)
        return make_dataset_pair(
            train_source, val_source, class_names, PHOTOGRAPHS, options, fingerprint, notes + cache_notes
        )
    train_arrays, val_arrays = _array_source(train), _array_source(val)
    mean, std = pixel_statistics(train_arrays.images)
    defaults = DatasetDefaults(train_arrays.images.shape[-1], entry.augmentation, centre_crop=False, mean=mean, std=std)
    fingerprint = fingerprint_arrays(class_names, train_arrays, val_arrays)
    return make_dataset_pair(train_arrays, val_arrays, class_names, defaults, options, fingerprint, notes)


def _open(name: str, arguments: Mapping[str, Any], options: DataOptions) -> Any:
    root = dataset_root(options)
    make = getattr(datasets, name)
    if not options.download:
        try:
            return make(str(root), **arguments)
        except (RuntimeError, OSError):
            raise UserError(
                f"torchvision:{name} is not (whole) in {str(root)!r}: add --download to fetch it, "
                "or give --data-root, the folder where it is."
            ) from None
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / ".download.lock"):  # the ranks of a machine share the folder: one fetches, the others wait
            return make(str(root), download=True, **arguments)
    except (RuntimeError, OSError) as error:
        reason = " ".join(str(error).split())
        raise UserError(f"torchvision:{name} could not be fetched to {str(root)!r}: {reason}.") from None


def _class_names(dataset: Any) -> list[str]:
    names = getattr(dataset, "classes", None)
    labels = _labels(dataset)
    return [str(name) for name in names] if names else [str(label) for label in range(int(labels.max()) + 1)]


def _labels(dataset: Any) -> torch.Tensor:
    for attribute in ("targets", "labels", "_labels"):
        if hasattr(dataset, attribute):
            return torch.as_tensor(getattr(dataset, attribute)).long()
    raise TypeError(f"{type(dataset).__name__} has no list of labels")


def _array_source(dataset: Any) -> ArraySource:
    """Bring torchvision's layouts, [N, H, W], [N, H, W, 3] and [N, 3, H, W], to uint8 [N, C, H, W]."""
    images = torch.as_tensor(np.asarray(dataset.data))
    if images.ndim == 3:
        images = images.unsqueeze(1)
    elif images.shape[-1] == 3:
        images = images.permute(0, 3, 1, 2)
    return ArraySource(images.contiguous(), _labels(dataset))


def _list_files(dataset: Any, attribute: str, root: Path) -> list[ImageFile]:
    statuses = ((os.path.relpath(path, root), os.stat(path)) for path in getattr(dataset, attribute))
    return [
        ImageFile(path, status.st_size, label, status.st_mtime_ns)
        for (path, status), label in zip(statuses, _labels(dataset).tolist(), strict=True)
    ]
