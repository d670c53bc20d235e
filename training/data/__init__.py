"""What the trainer learns from: one table of data sets, one of augmentations, and `load_data`.

Importing this module loads neither torch nor Pillow, so that `--help` can print the tables at once; the module of a
data set is imported when it is asked for. A new data set is one module with `load(options)` and one line in `DATASETS`.
"""

from __future__ import annotations

import importlib
import re
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING

from training.errors import UserError, unknown_name

if TYPE_CHECKING:
    from training.config import TrainConfig
    from training.data.datasets import DatasetPair


@dataclass(frozen=True)
class DatasetEntry:
    """One line of `DATASETS`.

    Attributes:
        usage: What to type after `--data`.
        summary: What it is, in one sentence.
        module: The module whose `load(options)` returns the `DatasetPair`.
        takes_name: Whether a name follows after a colon.
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
    "folder": DatasetEntry(
        "DIR",
        "a folder with train/ and val/, or one folder that is split; below each, one folder of images per class",
        "training.data.folder",
    ),
}

AUGMENTATIONS: dict[str, str] = {
    "auto": "what suits the data set: shift for digits, shift_flip for CIFAR and its like, crop_flip for folders",
    "none": "the evaluation transform, unchanged",
    "shift": "shift by up to 10 % of the size (3 pixels at 32), zeros move in",
    "shift_flip": "shift, and mirror left-right half of the time",
    "crop_flip": "a random crop of 8-100 % of the area, resized, mirrored half of the time",
    "randaugment": "crop_flip, then timm's RandAugment (rand-m9-mstd0.5)",
}

DECODERS: dict[str, str] = {
    "cpu": "JPEG files shrunk while decoding, never below twice --image-size",
    "exact": "every pixel decoded at full size",
    "gpu": "JPEG files decoded at full size by the GPU (nvJPEG)",
}
CACHES = ("auto", "ram", "disk", "off")

INTERPOLATIONS = ("bilinear", "bicubic")
BAD_IMAGES_USAGE = "error, skip, skip:SHARE"
DEFAULT_BAD_IMAGE_SHARE = Fraction(1, 1000)
MIN_IMAGE_SIZE, MAX_IMAGE_SIZE = 8, 4096


@dataclass(frozen=True)
class DataOptions:
    """What to load and how to prepare it.

    Attributes:
        data: A name from `DATASETS` or the path of a folder.
        val_fraction: Share of the images held out where one folder is split; above 0, below 1.
        image_size: Side of the square that the model sees, in pixels; 0 takes the data set's own.
        augmentation: A name from `AUGMENTATIONS`.
        bad_images: As `bad_image_share` reads it.
        download: Whether a torchvision data set may be fetched.
        seed: Decides the augmentation.
        interpolation: Filter of every resize, one of `INTERPOLATIONS`.
        data_root: Where torchvision data sets are kept; a leading `~` is expanded.
        mean: Per channel, of pixels in 0..1; None takes the data set's own (a pretrained backbone brings its own).
        std: As `mean`.
        decode: A name from `DECODERS`.
        cache: Where shrunk images of files are kept, one of `CACHES`.
        cache_gb: Most gigabytes of all caches in memory, or on disk; 0 for the defaults.
    """

    data: str = "digits"
    val_fraction: float = 0.2
    image_size: int = 0
    augmentation: str = "auto"
    bad_images: str = "error"
    download: bool = False
    seed: int = 0
    interpolation: str = "bilinear"
    data_root: str = "~/.cache/zerovision"
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    decode: str = "cpu"
    cache: str = "off"
    cache_gb: float = 0.0


def data_options(config: TrainConfig) -> DataOptions:
    """Return the options of the data set that a configuration names."""
    from models.weights_metadata import starting_normalization

    normalization = starting_normalization(config.model_type, pretrained=config.pretrained, weights=config.weights)
    mean, std = normalization or (None, None)
    return DataOptions(
        mean=mean,
        std=std,
        data=config.data,
        val_fraction=config.val_fraction,
        image_size=config.image_size,
        augmentation=config.augmentation,
        bad_images=config.bad_images,
        download=config.download,
        data_root=config.data_root,
        seed=config.seed,
        decode=config.decode,
        cache=config.cache,
        cache_gb=config.cache_gb,
    )


def load_data(options: DataOptions) -> DatasetPair:
    """Load the training and validation set that `options` names; every rank gets the same.

    Raises:
        UserError: An option or the data is wrong; see the module of the data set.
    """
    _check_options(options)
    entry = find_dataset(options.data)
    return importlib.import_module(entry.module).load(options)


def bad_image_share(word: str) -> Fraction:
    """Return the share of a set's images that may be unreadable: 0 for "error", 0.001 for "skip", S for "skip:S".

    Raises:
        UserError: The word is another, or the share not a decimal number above 0 and below 1.
    """
    if word in ("error", "skip"):
        return DEFAULT_BAD_IMAGE_SHARE if word == "skip" else Fraction(0)
    mode, _, share = word.partition(":")
    if mode != "skip" or not re.fullmatch(r"0?\.[0-9]{1,9}", share) or not Fraction(share):
        raise UserError(
            f"--bad-images {word!r}: expected {BAD_IMAGES_USAGE}, such as skip:0.01 for 1 % of the images; "
            "the share is above 0 and below 1."
        )
    return Fraction(share)


def find_dataset(data: str) -> DatasetEntry:
    """Return the entry that a `--data` value means: a name of the table, else a folder."""
    name, colon, _ = data.partition(":")
    entry = DATASETS.get(name)
    return entry if entry and entry.takes_name == bool(colon) else DATASETS["folder"]


def _check_options(options: DataOptions) -> None:
    tables = (
        ("augmentation", options.augmentation, AUGMENTATIONS),
        ("interpolation", options.interpolation, INTERPOLATIONS),
        ("decoder", options.decode, DECODERS),
        ("cache", options.cache, CACHES),
    )
    bad_image_share(options.bad_images)
    for kind, given, allowed in tables:
        if given not in allowed:
            raise unknown_name(kind, given, allowed)
    if options.decode == "gpu" and options.augmentation == "randaugment":
        raise UserError("the decoder gpu does not go with the augmentation randaugment: take the decoder cpu.")
    if not 0 < options.val_fraction < 1:
        raise UserError(f"the validation fraction is {options.val_fraction}: give a number above 0 and below 1.")
    if options.image_size and not MIN_IMAGE_SIZE <= options.image_size <= MAX_IMAGE_SIZE:
        raise UserError(
            f"the image size is {options.image_size}: give {MIN_IMAGE_SIZE} to {MAX_IMAGE_SIZE} pixels, "
            "or 0 for the data set's own."
        )


def dataset_root(options: DataOptions) -> Path:
    """Return the folder that holds downloaded data sets."""
    return Path(options.data_root).expanduser()
