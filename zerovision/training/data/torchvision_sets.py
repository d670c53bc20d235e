"""torchvision's data sets, as sources of arrays in memory or of files."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from torchvision import datasets

from zerovision.training.base.errors import FileServerError, UserError, check_name, one_line
from zerovision.training.data import DataOptions
from zerovision.training.data.datasets import DatasetPair, make_array_datasets, make_file_datasets
from zerovision.training.data.images import Images, ImagesBuilder
from zerovision.training.data.reading.retry import patiently
from zerovision.training.data.reading.sources import ArraySource


@dataclass(frozen=True)
class TorchvisionEntry:
    """How a torchvision data set names its parts."""

    train: str = ""  # value of `split` for the training part; "" if the argument `train` selects the part instead
    val: str = ""  # value of `split` for the validation part, or for the test part if there is no validation part
    augmentation: str = "shift_flip"  # what "auto" selects; digits must not be mirrored
    files: str = ""  # name of the attribute that lists the image files; "" if the images are an array in memory

    def arguments(self, *, is_train: bool) -> dict[str, Any]:
        """Return the arguments that select a part."""
        return {"split": self.train if is_train else self.val} if self.train else {"train": is_train}


TORCHVISION_SETS: dict[str, TorchvisionEntry] = {
    "CIFAR10": TorchvisionEntry(),
    "CIFAR100": TorchvisionEntry(),
    "MNIST": TorchvisionEntry(augmentation="shift"),
    "FashionMNIST": TorchvisionEntry(),
    "KMNIST": TorchvisionEntry(augmentation="shift"),
    "USPS": TorchvisionEntry(augmentation="shift"),
    "SVHN": TorchvisionEntry("train", "test", "shift"),
    "STL10": TorchvisionEntry("train", "test"),
    "DTD": TorchvisionEntry("train", "val", "crop_flip", files="_image_files"),
    "FGVCAircraft": TorchvisionEntry("train", "val", "crop_flip", files="_image_files"),
    "Flowers102": TorchvisionEntry("train", "val", "crop_flip", files="_image_files"),
    "Food101": TorchvisionEntry("train", "test", "crop_flip", files="_image_files"),
    "OxfordIIITPet": TorchvisionEntry("trainval", "test", "crop_flip", files="_images"),
}


def load(options: DataOptions) -> DatasetPair:
    """Load `torchvision:NAME` from the folder of downloaded data sets, or raise a UserError."""
    name = options.data.partition(":")[2]
    check_name("torchvision data set", name, TORCHVISION_SETS)
    entry = TORCHVISION_SETS[name]
    train, val = (_open(name, options, entry.arguments(is_train=is_train)) for is_train in (True, False))
    class_names = [str(name) for name in getattr(train, "classes", None) or range(int(_labels(train).max()) + 1)]
    notes = [f"the validation images are torchvision's {'val' if entry.val == 'val' else 'test'} part"]
    if entry.files:
        parts = [_list_files(dataset, entry.files, options.root, class_names) for dataset in (train, val)]
        return make_file_datasets([replace(part, notes=notes) for part in parts], options)
    sources = (_array_source(train), _array_source(val))
    size = sources[0].images.shape[-1]
    return make_array_datasets(*sources, class_names, options, size, entry.augmentation).noted(notes)


def _open(name: str, options: DataOptions, arguments: dict[str, Any]) -> Any:
    root = options.root
    make = partial(getattr(datasets, name), str(root), **arguments)
    if not options.download:
        try:
            return patiently(make, root)
        except FileServerError:
            raise
        except Exception:  # a truncated file may raise any exception
            raise UserError(
                f"torchvision:{name} is missing or incomplete in {str(root)!r}: add --download, "
                "or set its folder with --data-root."
            ) from None
    try:
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / ".download.lock"):  # one rank per machine downloads while the others wait
            return make(download=True)
    except Exception as error:  # a network error, or as above
        reason = " ".join(str(error).split())
        raise UserError(f"torchvision:{name} could not be downloaded to {str(root)!r}: {reason}.") from None


def _labels(dataset: Any) -> torch.Tensor:
    for attribute in ("targets", "labels", "_labels"):
        if hasattr(dataset, attribute):
            return torch.as_tensor(getattr(dataset, attribute)).long()
    raise TypeError(f"{type(dataset).__name__} has no list of labels")


def _array_source(dataset: Any) -> ArraySource:
    """Convert torchvision's layouts, [N, H, W], [N, H, W, 3] and [N, 3, H, W], to uint8 [N, C, H, W]."""
    images = torch.as_tensor(np.asarray(dataset.data))
    if images.ndim == 3:
        images = images.unsqueeze(1)
    elif images.shape[-1] == 3:
        images = images.permute(0, 3, 1, 2)
    return ArraySource(images.contiguous(), _labels(dataset))


def _list_files(dataset: Any, attribute: str, root: Path, class_names: list[str]) -> Images:
    """Return the images of a part, in torchvision's order."""
    builder = ImagesBuilder()
    try:
        for path, label in zip(getattr(dataset, attribute), _labels(dataset).tolist(), strict=True):
            status = patiently(partial(os.stat, path), path)
            state = status.st_size, status.st_mtime_ns
            builder.add(os.path.relpath(path, root), class_names[label], state=state)
    except OSError as error:
        raise UserError(
            f"torchvision's {type(dataset).__name__} is incomplete in {str(root)!r}: {one_line(error)}. Remove its "
            "folder and add --download."
        ) from None
    return builder.build(root).renamed("label", {name: name for name in class_names}, class_names)
