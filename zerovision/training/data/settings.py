"""Data flags (data set, sizes, augmentation, reading), and the tables of data sets and decoders.

Importing this module imports neither torch nor Pillow, so `--help` prints the tables without delay; a data set's module
is imported on demand. To add a data set, write a module with `load(options)` or `listing(options)`, and add one entry
to `DATASETS`.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from zerovision.models import LARGEST_IMAGE_SIZE, MOST_IMAGE_CHANNELS
from zerovision.training.base.settings import RunSettings, option, path_option
from zerovision.training.data.augmentations import AUGMENTATIONS, CROP_RATIO, CROP_SCALE, RANDAUGMENT
from zerovision.training.data.augmentations import USAGE as SIZE_USAGE

BAD_IMAGES_USAGE = "error, skip or skip:SHARE"
DATA_ROOT = "~/.cache/zerovision"
URL = "://"
TaskName = Literal["multiclass", "multilabel"]
MULTILABEL: TaskName = "multilabel"
READ_LISTS = f"--task {MULTILABEL}"  # for labels that are lists of classes
LIST_COLUMNS = "zerovision.training.data.label_lists:ListColumns"  # reads them in tables
IMBALANCE = 15  # ratio of the largest class to the smallest from which a run prints a note
MAX_MEGAPIXELS, MOST_MEGAPIXELS = 179, 10_000  # per image: default limit, as in Pillow; largest limit allowed


@dataclasses.dataclass(frozen=True)
class DatasetEntry:
    """One entry of `DATASETS`.

    Attributes:
        usage: Form of the `--data` value, such as "npz:FILE".
        summary: One sentence for `--help`.
        module: Module name, absolute or relative to this package. Its `load(options)` returns a `DatasetPair`;
            with `has_parts`, its `listing(options)` returns an `Images` instead.
        takes_name: Whether the `--data` value contains a colon and a name.
        has_parts: Whether the images are listed one by one and can be divided into parts, as for all local paths.
    """

    usage: str
    summary: str
    module: str
    takes_name: bool = False
    has_parts: bool = False

    @property
    def is_path(self) -> bool:
        """Whether the `--data` value is a local path."""
        return self.has_parts and not self.takes_name


DATASETS: dict[str, DatasetEntry] = {
    "digits": DatasetEntry("digits", "1,797 handwritten digits, included: 1,437 for training, 360 held out", ".arrays"),
    "fake": DatasetEntry(
        "fake", "random patterns of learnable classes, generated in memory for tests and benchmarks", ".arrays"
    ),
    "torchvision": DatasetEntry(
        "torchvision:NAME",
        "a data set of torchvision, such as torchvision:CIFAR10 (--download fetches it)",
        ".torchvision_sets",
        takes_name=True,
    ),
    "npz": DatasetEntry(
        "npz:FILE",
        "arrays x_train, y_train, x_test, y_test in a NumPy file, as Keras stores its data sets",
        ".arrays",
        takes_name=True,
    ),
    "folder": DatasetEntry(
        "DIR",
        "a folder with train/, val/ and test/, or one folder to split; in each, one folder of images per class",
        ".folder",
        has_parts=True,
    ),
    "tar": DatasetEntry(
        "DIR/*.tar",
        "a folder of tar files in WebDataset's layout: train-000000.tar, val-000000.tar, ..., with samples such as "
        "01.jpg and 01.cls or 01.json",
        ".tar_shards",
        has_parts=True,
    ),
    "parquet": DatasetEntry(
        "DIR/*.parquet",
        "a folder of Parquet files that contain images, as on the Hugging Face hub, or one file of images or paths",
        ".parquet",
        has_parts=True,
    ),
    "table": DatasetEntry(
        "LIST.csv",
        "a table of images (or .tsv) with the columns path and label, and optionally split, weight and group",
        ".table",
        has_parts=True,
    ),
    "hf": DatasetEntry(
        "hf:ORG/NAME[:SPLIT]",
        "a data set of Parquet files on the Hugging Face hub (--download fetches it into the hub's cache)",
        ".parquet",
        takes_name=True,
        has_parts=True,
    ),
    URL: DatasetEntry(
        "URL",
        "tar files, Parquet files or a table at http://, https://, s3://, gs:// or hf://, cached on disk",
        ".urls",
        takes_name=True,
        has_parts=True,
    ),
}

NUMBERS = "numbers"
DECODERS: dict[str, str] = {
    "cpu": "shrink JPEG files while decoding, never below twice --image-size",
    "exact": "decode every pixel at full size",
    NUMBERS: "keep the values of .npy files and 16-bit gray images, with any number of channels, in folders and tables",
}


@dataclasses.dataclass(frozen=True)
class DataFields:
    """Data settings."""

    data: str = path_option(
        "digits",
        f"Data set: {', '.join(entry.usage for entry in DATASETS.values())} (DIR: class folders, or train/ and val/).",
    )
    data_root: str = path_option(
        DATA_ROOT, "Folder for torchvision's data sets and caches; if set, paths in a table are also relative to it."
    )
    path_column: str = option(
        "",
        "Table column with the images' paths; default: path, or else image, as in predict's table. In Parquet files: "
        "column of images. In tar files: extension of the images, such as jpg, if a sample has several.",
    )
    label_column: str = option(
        "label",
        "Table column that contains the class names. With --task multilabel: a column of lists, such as cat;dog, "
        "or the columns A,B,..., one per class, which contain 1 or 0.",
    )
    task: Literal["multiclass", "multilabel"] = option(
        "multiclass", "multilabel: each image in a table has any number of classes; each class is predicted separately."
    )
    label_separator: str = option(
        "",
        "Separator of the labels in a cell, such as ','; default: ; or |, or a comma or spaces between known labels.",
        part_of="task:multilabel",
    )
    download: bool = option(False, "Allow data sets to be downloaded from torchvision and the Hugging Face hub.")
    remote_cache_gb: float = option(
        20.0, "Gigabytes of remote data to keep in remote/ under --data-root.", low=0.1, high=10**6
    )
    val_fraction: float = option(
        0.2, "Share of the images to hold out for validation if the data has no validation part.", above=0, high=0.9
    )
    split_seed: int = option(0, "Seed of the split: a different number holds out different images.", low=0, high=2**31)
    folds: int = option(
        0,
        "K-fold cross-validation in place of --val-fraction: each image is held out in one of K runs.",
        low=0,
        high=1000,
    )
    fold: int = option(1, "Fold to hold out, from 1 to K.", low=1, high=1000, part_of="folds")
    val_part: str = option(
        "",
        "Folder in DIR, or split of a table, to validate on, such as Testing. The usual names for train, val and "
        "test are recognized automatically. none: treat all folders as classes.",
    )
    image_size: int | str = option(  # an `ImageSize`, like `eval_image_size`
        0,
        "Side of square images in pixels, or height x width, such as 224x448; 0: the data set's own size.",
        low=0,
        high=LARGEST_IMAGE_SIZE,
    )
    eval_image_size: int | str = option(
        0, "Size of the validation images; 0: as in training.", low=0, high=LARGEST_IMAGE_SIZE, part_of="image_size"
    )
    eval_crop: float | Literal["auto"] = option(
        "auto",
        "Share of a photograph's shorter side that validation keeps; auto: as for the starting weights, or 0.875.",
        low=0.5,
        high=1,
    )
    fit: Literal["auto", "crop", "pad", "squash"] = option(
        "auto",
        "How to fit images to --image-size: crop the center, pad with bars, or squash; auto: crop for photographs, "
        "squash for arrays. With pad and squash, --augmentation auto does not crop.",
    )
    interpolation: Literal["auto", "bilinear", "bicubic"] = option(
        "auto", "Filter for resizing, with antialiasing; auto: the filter of the starting weights, or bilinear."
    )
    image_channels: int = option(
        0,
        "Channels of the images: 1 for gray, 3 for RGB, 4 for RGBA, other numbers for arrays only; 0: as stored "
        "in arrays with 2, 4 or more channels, otherwise 3.",
        low=0,
        high=MOST_IMAGE_CHANNELS,
    )
    progressive_size: str = option(
        "", f"{SIZE_USAGE}: train at LOW pixels through epoch FIRST (from 0), then grow to --image-size by epoch LAST."
    )
    augmentation: str = option("auto", f"Training augmentation, one of {', '.join(('auto', *AUGMENTATIONS))}.")
    randaugment: str = option(
        RANDAUGMENT,
        "RandAugment in timm's format: m is the magnitude, n the number of operations, mstd the standard "
        "deviation of m; inc1 selects operations that become stronger with m.",
        part_of="augmentation:randaugment",
    )
    crop_scale: str = option(CROP_SCALE, "Smallest and largest area of a crop, as fractions of the image's area.")
    crop_ratio: str = option(
        CROP_RATIO, "Range of a crop's width / height (multiplied by W/H with --image-size HxW).", part_of="crop_scale"
    )
    mirror: Literal["auto", "off", "random", "alternate"] = option(
        "auto", "Horizontal flips; random: half the time; alternate: every other epoch; auto: set by --augmentation."
    )
    shift_pixels: int | Literal["auto"] = option(
        "auto", "Largest shift in pixels; 0: no shift; auto: set by --augmentation.", low=0, high=LARGEST_IMAGE_SIZE
    )
    shift_padding: Literal["zeros", "reflect"] = option("zeros", "How to fill shifted edges.", part_of="shift_pixels")
    color_jitter: float = option(
        0.0, "Largest change of brightness, contrast and saturation, as a fraction; 0: no change.", low=0, high=1
    )
    random_erasing: float = option(0.0, "Probability of erasing a rectangle in an image.", low=0, high=1)
    random_erasing_mode: Literal["pixel", "rand", "const"] = option(
        "pixel", "How to fill the rectangle: with noise, one random color, or the mean color.", part_of="random_erasing"
    )
    mixup: float = option(
        0.0, "Alpha of mixup, which blends the images and targets of a micro-batch; 0: off.", low=0, high=100
    )
    cutmix: float = option(0.0, "Alpha of cutmix, which pastes a rectangle of another image; 0: off.", low=0, high=100)
    mixup_probability: float = option(1.0, "Probability of applying mixup or cutmix to a micro-batch.", low=0, high=1)
    mixup_switch_probability: float = option(
        0.5, "Probability of cutmix instead of mixup if both are on.", low=0, high=1, part_of="mixup_probability"
    )
    mixup_off_epochs: int = option(0, "Final epochs without mixing.", low=0, high=100_000, part_of="mixup_probability")
    sampling: Literal["uniform", "balanced"] = option(
        "uniform", "uniform: each sample once per epoch; balanced: the same number of samples, equally many per class."
    )
    order: Literal["random", "shards"] = option(
        "random",
        "Order of the samples in an epoch; shards: shuffle the tar files, or the row groups of Parquet files, and "
        "read them one after another, for data that does not fit into a cache.",
    )
    shuffle_window: int = option(
        4096, "Number of consecutive samples to shuffle together.", low=1, high=10**9, part_of="order:shards"
    )
    repeated_augmentation: int = option(
        1, "Copies of each sample, each augmented differently, from fewer samples.", low=1, high=64, part_of="sampling"
    )
    decode: Literal["cpu", "exact", "numbers"] = option(
        "cpu", f"How to decode image files. {'; '.join(f'{name}: {text}' for name, text in DECODERS.items())}."
    )
    cache: Literal["ram", "disk", "off"] = option("off", "Keep decoded images in memory, or on disk under --data-root.")
    cache_gb: float = option(
        0.0,
        "Size limit of all caches together, in gigabytes; 0: a quarter of the memory, or 50 GB on disk.",
        low=0,
        high=10**6,
        part_of="cache",
    )
    workers: str = option("auto", "Number of loader processes per rank, or auto.")
    max_megapixels: int = option(
        MAX_MEGAPIXELS,
        "Largest image file to read, in millions of pixels; protects against decompression bombs.",
        low=1,
        high=MOST_MEGAPIXELS,
    )
    bad_images: str = option(
        "error", f"What to do with unreadable images: {BAD_IMAGES_USAGE}; skip allows 0.1 %, skip:0.05 allows 5 %."
    )

    @property
    def reads_lists(self) -> bool:
        """Whether the label of an image is a list of classes."""
        return self.task == MULTILABEL


@dataclasses.dataclass(frozen=True)
class DataSettings(DataFields, RunSettings):
    """The settings that loading data needs."""
