"""Training data: the tables of data sets and decoders, and `load_data`; augmentations have one of their own.

Importing this module imports neither torch nor Pillow, so that `--help` prints the tables at once; the module of a data
set is imported on demand. A new data set is one module with `load(options)` and one line in `DATASETS`.
"""

from __future__ import annotations

import importlib
import os
import re
from dataclasses import dataclass, fields
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

from training.data.augmentations import (
    CROP_RATIO,
    CROP_SCALE,
    ERASING_MODES,
    MIRRORS,
    PADDINGS,
    RANDAUGMENT,
)
from training.errors import UserError, unknown_name

if TYPE_CHECKING:
    from training.config import TrainConfig
    from training.data.datasets import DatasetPair


@dataclass(frozen=True)
class DatasetEntry:
    """One line of `DATASETS`.

    Attributes:
        usage: The value of `--data`.
        summary: One sentence for `--help`.
        module: The module whose `load(options)` returns the `DatasetPair`.
        takes_name: Whether a colon and a name follow.
    """

    usage: str
    summary: str
    module: str
    takes_name: bool = False


DATASETS: dict[str, DatasetEntry] = {
    "digits": DatasetEntry(
        "digits",
        "scikit-learn's 1,797 handwritten digits, embedded: 1,437 to train, 360 held out",
        "training.data.digits",
    ),
    "fake": DatasetEntry(
        "fake", "random patterns with a learnable class, made in memory: for tests and benchmarks", "training.data.fake"
    ),
    "torchvision": DatasetEntry(
        "torchvision:NAME",
        "a data set of torchvision, such as torchvision:CIFAR10 (--download fetches it)",
        "training.data.torchvision_sets",
        takes_name=True,
    ),
    "npz": DatasetEntry(
        "npz:FILE",
        "arrays x_train, y_train, x_test, y_test in a NumPy file, as Keras stores its data sets",
        "training.data.npz",
        takes_name=True,
    ),
    "folder": DatasetEntry(
        "DIR",
        "a folder with train/, val/ and test/, or one folder that is split; below each, one folder of images per class",
        "training.data.folder",
    ),
}


DECODERS: dict[str, str] = {
    "cpu": "JPEG files shrunk while decoding, never below twice --image-size",
    "exact": "every pixel decoded at full size",
}
CACHES = ("auto", "ram", "disk", "off")
LINKS = ("follow", "refuse")

INTERPOLATIONS = ("bilinear", "bicubic")
BAD_IMAGES_USAGE = "error, skip, skip:SHARE"
DEFAULT_BAD_IMAGE_SHARE = Fraction(1, 1000)
MIN_IMAGE_SIZE, MAX_IMAGE_SIZE = 8, 4096


@dataclass(frozen=True)
class DataOptions:
    """What to load and how to prepare it; a field of `TrainConfig` by the same name has the same meaning.

    Attributes:
        mean: Per channel, of pixels in 0..1; None for the data set's own (a pretrained backbone brings its own).
        std: As `mean`.
        epochs: How often the images are read: `cache` "auto" and the end of mixing depend on it.
    """

    data: str = "digits"
    val_fraction: float = 0.2
    split_seed: int = 0
    val_part: str = ""
    links: str = "follow"
    image_size: int = 0
    eval_image_size: int = 0
    eval_crop: float = 0.875
    interpolation: str = "bilinear"
    image_channels: int = 0
    progressive_size: str = ""
    augmentation: str = "auto"
    randaugment: str = RANDAUGMENT
    crop_scale: str = CROP_SCALE
    crop_ratio: str = CROP_RATIO
    mirror: str = "auto"
    shift_pixels: int | str = "auto"
    shift_padding: str = "zeros"
    color_jitter: float = 0.0
    random_erasing: float = 0.0
    random_erasing_mode: str = "pixel"
    mixup: float = 0.0
    cutmix: float = 0.0
    mixup_probability: float = 1.0
    mixup_switch_probability: float = 0.5
    mixup_off_epochs: int = 0
    sampling: str = "uniform"
    class_weights: str = "none"
    bad_images: str = "error"
    download: bool = False
    seed: int = 0
    data_root: str = "~/.cache/zerovision"
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    decode: str = "cpu"
    cache: str = "off"
    cache_gb: float = 0.0
    epochs: int = 1

    @property
    def root(self) -> Path:
        """The folder of downloaded data sets."""
        return Path(os.path.expanduser(self.data_root))


def data_options(config: TrainConfig) -> DataOptions:
    """Return the options of the data set that a configuration names; a pretrained backbone brings its normalization."""
    from models.weights_metadata import starting_normalization

    normalization = starting_normalization(
        config.model_type, config.ensemble_members.split(","), pretrained=config.pretrained, weights=config.weights
    )
    mean, std = normalization or (None, None)
    shared = [field.name for field in fields(DataOptions) if hasattr(config, field.name)]
    return DataOptions(mean=mean, std=std, **{name: getattr(config, name) for name in shared})


def load_data(options: DataOptions) -> DatasetPair:
    """Load the training and validation set that `options` names; the same on every rank.

    Raises:
        UserError: An option or the data is invalid; see the module of the data set.
    """
    _check_options(options)
    entry = find_dataset(options.data)
    return importlib.import_module(entry.module).load(options)


def bad_image_share(value: str) -> Fraction:
    """Return the share of a set's images that may be unreadable: 0 for "error", 0.001 for "skip", S for "skip:S".

    Raises:
        UserError: Another value, or a share that is not a decimal number above 0 and below 1.
    """
    if value in ("error", "skip"):
        return DEFAULT_BAD_IMAGE_SHARE if value == "skip" else Fraction(0)
    mode, _, share = value.partition(":")
    if mode != "skip" or not re.fullmatch(r"0?\.[0-9]{1,9}", share) or not Fraction(share):
        raise UserError(
            f"--bad-images {value!r}: expected {BAD_IMAGES_USAGE}, such as skip:0.01 for 1 % of the images; "
            "the share is above 0 and below 1."
        )
    return Fraction(share)


def find_dataset(data: str) -> DatasetEntry:
    """Return the entry of a `--data` value: a name from the table, else a folder."""
    name, colon, _ = data.partition(":")
    entry = DATASETS.get(name)
    return entry if entry and entry.takes_name == bool(colon) else DATASETS["folder"]


def _check_options(options: DataOptions) -> None:
    tables = (
        ("mirror", options.mirror, MIRRORS),
        ("shift padding", options.shift_padding, PADDINGS),
        ("random erasing mode", options.random_erasing_mode, ERASING_MODES),
        ("interpolation", options.interpolation, INTERPOLATIONS),
        ("decoder", options.decode, DECODERS),
        ("cache", options.cache, CACHES),
        ("way with links", options.links, LINKS),
    )
    bad_image_share(options.bad_images)
    for kind, given, allowed in tables:
        if given not in allowed:
            raise unknown_name(kind, given, allowed)
    if not 0 < options.val_fraction < 1:
        raise UserError(f"the validation fraction is {options.val_fraction}: give a number above 0 and below 1.")
    if options.image_size and not MIN_IMAGE_SIZE <= options.image_size <= MAX_IMAGE_SIZE:
        raise UserError(
            f"the image size is {options.image_size}: give {MIN_IMAGE_SIZE} to {MAX_IMAGE_SIZE} pixels, "
            "or 0 for the data set's own."
        )
