"""The tables of data sets and decoders, and the bounds of their options, for the command line and for `load_data`.

Importing this module imports neither torch nor Pillow, so that `--help` prints the tables at once; the module of a data
set is imported on demand. A new data set is one module with `load(options)` and one line in `DATASETS`.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction


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
