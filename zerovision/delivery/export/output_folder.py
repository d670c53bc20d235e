"""The output folder of an export: files next to the model, and the hidden folder of files that are not yet checked."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zerovision.delivery.trained_model import read_json
from zerovision.training.base.errors import UserError
from zerovision.training.base.files import errors_of_writing, remove_leftovers, unfinished
from zerovision.training.checkpoint.weights import CLASS_MAP, class_map
from zerovision.training.data.reading.image_numbers import BYTES
from zerovision.training.tasks.labels import THRESHOLDS, task_of

PREPROCESSING = "preprocessing.json"
INPUT_NAME, OUTPUT_NAME = "images", "logits"
MODES = {1: "L", 3: "RGB", 4: "RGBA"}  # Pillow's, by number of channels; for arrays, only the user knows the channels
DIVISORS = {"uint8": 255, "uint16": 65535, "int16": 32767, "float32": 1}
# This text is the same for every model; its names refer to the values next to it in the JSON file.
READING = (
    "Turn the image upright by its EXIF orientation and convert it to `channels`, transparent pixels on white unless "
    "they are RGBA (null: take the arrays as they are). Unless `shrink_to` is null, shrink files to 1/2, 1/4 or 1/8 as "
    "long as the shorter side keeps that many pixels: JPEG files by libjpeg while they are decoded (Pillow's draft), "
    "others by the mean of blocks (Pillow's reduce)."
)
STEPS = (
    f'{READING} Resize by `interpolation` with antialiasing. With `fit` "pad": in proportion to fit into `image_size`, '
    "rounded; then put it in the middle of that shape in the color `mean`, from (side - resized) / 2 rounded down. "
    "With a `resize_size`: in proportion to cover it, a single number with the shorter side, rounded down; then cut "
    "out the center of `image_size`, from (resized - side) / 2 rounded. Else: to `image_size` itself. Divide by "
    "`divisor`, subtract `mean` and divide by `std`, per channel. Put the channels first, and images into one batch."
)
PICTURE_STEPS = f"{READING} Put pictures of one size into one batch, as bytes."


@contextmanager
def unfinished_files(output: Path) -> Iterator[Path]:
    """Yield a hidden folder inside the output folder, for files that are not yet checked.

    When the block ends, the hidden folder is removed; after an error, so are the folders that were created to contain
    it. An OSError becomes a UserError.
    """
    folder = unfinished(output / "export", "tmp")
    made = [parent for parent in (output, *output.parents) if not parent.exists()]
    try:
        with errors_of_writing(output):
            output.mkdir(parents=True, exist_ok=True)
            remove_leftovers(output)
            folder.mkdir()
            yield folder
        made = []
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for parent in made:  # innermost first; folders that are not empty stay
            with contextlib.suppress(OSError):
                parent.rmdir()


def describe_use(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the contents of preprocessing.json for a model with this metadata."""
    preprocessing, task = metadata["preprocessing"], task_of(metadata)
    is_bytes = preprocessing.values == BYTES
    return {
        **preprocessing.to_dict(),
        "channels": MODES.get(preprocessing.channels) if is_bytes else None,
        "divisor": DIVISORS[preprocessing.values],
        "shrink_to": 2 * max(preprocessing.sides) if is_bytes and not preprocessing.decode else None,
        "class_names": metadata["class_names"],
        "input": {
            "name": INPUT_NAME,
            "dtype": "float32",
            "shape": ["batch", *preprocessing.shape],
            "layout": "NCHW",
        },
        "output": {
            "name": OUTPUT_NAME,
            "dtype": "float32",
            "shape": ["batch", len(metadata["class_names"])],
            "probabilities": task.output,
            **({} if task.thresholds is None else {THRESHOLDS: task.thresholds.tolist()}),
        },
        "steps": STEPS,
    }


def check_output(output: Path, facts: Mapping[str, bytes]) -> None:
    """Check that the output is a folder, and that no file about another model would be overwritten.

    Args:
        output: the folder.
        facts: the result of `files_about`.

    Raises:
        UserError: if `output` is not a folder, or if a file about another model would be overwritten.
    """
    if output.exists() and not output.is_dir():
        raise UserError(f"--output '{output}' is a file: use a folder.")
    for path, content in ((output / name, content) for name, content in facts.items()):
        try:
            is_other = path.is_file() and path.read_bytes() != content
        except OSError as error:
            raise UserError(f"'{path}' cannot be read: {error}.") from None
        if is_other:
            raise UserError(f"'{path}' belongs to a model with other classes or preprocessing: use another --output.")


def check_calibration(path: Path, digest: str) -> None:
    """Raise a UserError if there is a calibration file of weights with another SHA-256 than `digest`."""
    if path.is_file() and read_json(path).get("weights_sha256") != digest:
        raise UserError(f"'{path}' belongs to other weights: use another --output, or remove it.")


def files_about(metadata: dict[str, Any]) -> dict[str, bytes]:
    """Return the contents of preprocessing.json and, if the model has a class map, of class_map.txt, by file name."""
    text = json.dumps(describe_use(metadata), indent=1, ensure_ascii=False) + "\n"
    # Folder names may contain bytes that are not valid text.
    files = {PREPROCESSING: text.encode("utf-8", "backslashreplace")}
    names = class_map(metadata["class_names"])
    return files if names is None else files | {CLASS_MAP: names}
