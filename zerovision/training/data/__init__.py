"""Training data: `load_data` and its options. Importing this module imports neither torch nor Pillow."""

from __future__ import annotations

import contextlib
import importlib
import os
import re
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_origin, get_type_hints

from zerovision.models import LARGEST_IMAGE_SIZE, sides
from zerovision.training.base.errors import UserError, check_name
from zerovision.training.data.augmentations import MIN_IMAGE_SIZE
from zerovision.training.data.reading.remote import check_url
from zerovision.training.data.reading.retry import is_folder, patiently
from zerovision.training.data.settings import BAD_IMAGES_USAGE, DATASETS, URL, DataFields, DatasetEntry

if TYPE_CHECKING:
    from zerovision.training.config import TrainConfig
    from zerovision.training.data.datasets import DatasetPair
    from zerovision.training.data.images import Images

TABLE_EXTENSIONS = (".csv", ".tsv")
ARCHIVES = {".tar": "tar", ".parquet": "parquet"}  # file suffix to name in `DATASETS`
FOLDERS_OF_ARCHIVES = ("train", "val", "valid", "validation", "test", "data")
DEFAULT_BAD_IMAGE_SHARE = Fraction(1, 1000)
FROM_WEIGHTS: dict[str, Callable[[Any], bool]] = {  # values that "auto" may take from the starting weights
    "interpolation": ("bilinear", "bicubic").__contains__,
    "eval_crop": lambda share: share is not None and 0.5 <= share <= 1,
}


@dataclass(frozen=True)
class DataOptions(DataFields):
    """Which data to load and how to prepare it: the data flags, and the other flags that affect loading.

    Attributes:
        mean: Mean per channel of pixel values in 0..1, as used by pretrained weights; None to use the data set's mean.
        std: Standard deviation per channel; see `mean`.
        seed: The run's seed.
        epochs: Number of training epochs, which determines when mixing ends.
        class_weights: Value of `--class-weights`; only with "none", a note about class imbalance is printed.
        eval_crop: Value of `--eval-crop`, with "auto" resolved.
        interpolation: Value of `--interpolation`, with "auto" resolved.
        made_for: Preprocessing that the starting weights expect, except for the settings that the user chose; see
            `models.preparation`.
        fewest_classes: Minimum number of classes in the data: 2 for training, 1 for evaluation.
    """

    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    seed: int = 0
    epochs: int = 1
    class_weights: str = "none"
    eval_crop: float = 0.875
    interpolation: Literal["bilinear", "bicubic"] = "bilinear"
    made_for: tuple[Any, ...] = ()
    fewest_classes: int = 2

    @property
    def root(self) -> Path:
        """The folder for downloaded data sets."""
        return Path(os.path.expanduser(self.data_root))


def data_options(config: TrainConfig) -> DataOptions:
    """Return the data options of a configuration; starting weights, if any, determine what it leaves open."""
    from zerovision.models.preparation import starting_preparations

    made_for = starting_preparations(
        config.model_type, config.ensemble_members.split(","), pretrained=config.pretrained, weights=config.weights
    )
    mean, std = made_for[0][:2] if made_for else (None, None)
    shared = [field.name for field in fields(DataOptions) if hasattr(config, field.name)]
    values: dict[str, Any] = {name: getattr(config, name) for name in shared}
    own = {"interpolation": "interpolation", "eval_crop": "crop", "fit": "fit"}
    for name in own | dict.fromkeys(("image_size", "eval_image_size")):
        if values[name] not in ("auto", 0):
            unasked: dict[str, Any] = {own.get(name, "image_size"): None}
            made_for = [one._replace(**unasked) for one in made_for]
    for name, is_allowed in FROM_WEIGHTS.items():
        if values[name] == "auto":
            found = {getattr(one, own[name]) for one in made_for}
            agreed = found.pop() if len(found) == 1 else None
            values[name] = agreed if is_allowed(agreed) else getattr(DataOptions, name)
    return DataOptions(mean=mean, std=std, made_for=tuple(made_for), **values)


def load_data(options: DataOptions, whole: str = "", images: Images | None = None) -> DatasetPair:
    """Load the training and validation sets that `options` describes, identically on every rank.

    Args:
        options: Options of the data.
        whole: "all" to load all images undivided, or "train", "val" or "test" to load only that part; both sets then
            contain these images, and neither uses a cache. Requires data with `DatasetEntry.has_parts`.
        images: Result of `list_images` for these options; None to list the images now.

    Raises:
        UserError: If an option or the data is invalid; see the module of the data set.
    """
    from zerovision.training.data.datasets import make_file_datasets
    from zerovision.training.data.division import divided, parts_there, undivided

    _check_options(options)
    images = list_images(options) if images is None else images
    if options.folds and not whole and (images is None or "val" in parts_there(images)):
        raise UserError(
            f"--folds {options.folds}: --data {options.data} already has a validation part: leave --folds out, "
            "or use a folder, a table, or tar or Parquet files without one."
        )
    if images is None:
        return importlib.import_module(find_dataset(options.data).module, __name__).load(options)
    if whole:
        return make_file_datasets([undivided(images, whole, options)], replace(options, cache="off"))
    parts, images = divided(images, options), None  # memory may have room for only one table of millions of images
    return make_file_datasets(parts, options)


def list_images(options: DataOptions) -> Images | None:
    """Return the images if the data set lists them one by one, otherwise None.

    Raises:
        UserError: See `load_data`.
    """
    entry = find_dataset(options.data)
    return importlib.import_module(entry.module, __name__).listing(options) if entry.has_parts else None


def bad_image_share(value: str) -> Fraction:
    """Return the share of a set's images that may be unreadable: 0 for "error", 0.001 for "skip", S for "skip:S".

    Raises:
        UserError: If the value is none of these, or the share is not a decimal number above 0 and below 1.
    """
    if value in ("error", "skip"):
        return DEFAULT_BAD_IMAGE_SHARE if value == "skip" else Fraction(0)
    mode, _, share = value.partition(":")
    if mode != "skip" or not re.fullmatch(r"0?\.[0-9]{1,9}", share) or not Fraction(share):
        raise UserError(
            f"--bad-images {value!r}: expected {BAD_IMAGES_USAGE}, such as skip:0.01 for 1 % of the images; "
            "the share is a decimal number above 0 and below 1."
        )
    return Fraction(share)


def find_dataset(data: str) -> DatasetEntry:
    """Return the `DATASETS` entry for a `--data` value: by name or, for a path, by the kind of file or folder."""
    if check_url(data):
        return DATASETS[URL]
    name, colon, _ = data.partition(":")
    entry = DATASETS.get(name)
    if entry and not entry.is_path and entry.takes_name == bool(colon):
        return entry
    path = os.path.expanduser(data)
    if is_folder(path):
        folders = [path, *(f"{path}/{name}" for name in FOLDERS_OF_ARCHIVES)]
        suffix = next(filter(None, map(_suffix_of_all, folders)), "")
        return DATASETS[ARCHIVES.get(suffix, "folder")]
    if data.lower().endswith(TABLE_EXTENSIONS):
        return DATASETS["table"]
    return DATASETS[ARCHIVES.get(os.path.splitext(data)[1], "folder")]


def _suffix_of_all(folder: str) -> str:
    """Return the suffix of a folder's archives, or '' if the folder has no archives or has classes or parts inside."""

    def looked() -> str:
        found = ""
        with os.scandir(folder) as scan:  # stop early: a class may have a million images
            for entry in scan:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir():
                    return ""
                suffix = os.path.splitext(entry.name)[1]
                found = suffix if suffix in ARCHIVES else found
        return found

    with contextlib.suppress(OSError):
        return patiently(looked, folder)
    return ""


def _check_options(options: DataOptions) -> None:
    """Check options passed from Python; command-line options are checked earlier."""
    bad_image_share(options.bad_images)
    for name, hint in get_type_hints(DataOptions).items():
        if get_origin(hint) is Literal:
            check_name(name.replace("_", " "), getattr(options, name), get_args(hint))
    if not 0 < options.val_fraction < 1:
        raise UserError(f"the validation fraction is {options.val_fraction}: use a number above 0 and below 1.")
    if options.folds and not options.fold <= options.folds != 1:
        raise UserError(f"--folds {options.folds}:{options.fold}: expected K or K:N, with K from 2 and N from 1 to K.")
    if options.image_size and any(not MIN_IMAGE_SIZE <= n <= LARGEST_IMAGE_SIZE for n in sides(options.image_size)):
        raise UserError(
            f"--image-size {options.image_size}: use {MIN_IMAGE_SIZE} to {LARGEST_IMAGE_SIZE} pixels, "
            "or 0 for the data set's own size."
        )
