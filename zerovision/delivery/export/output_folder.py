"""The output folder of an export: what is beside the model, and files that get their names once checked."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zerovision.training.base.atomic_write import errors_of_writing, remove_leftovers, sync_to_disk, unfinished
from zerovision.training.base.errors import UserError
from zerovision.training.checkpoint.weights import CLASS_MAP, class_map
from zerovision.training.data.values import BYTES
from zerovision.training.tasks.of_weights import THRESHOLDS, task_of

PREPROCESSING = "preprocessing.json"
INPUT_NAME, OUTPUT_NAME, SHRINK_TO = "images", "logits", "shrink_to"
# By number of channels: their names, and how a file gets them; of other arrays the user knows them.
CHANNELS = {
    1: ("channel grey", "convert to 8-bit grey (ITU-R BT.601), transparent pixels on white"),
    3: ("channels red, green, blue", "convert to 8-bit RGB, transparent pixels on white"),
    4: ("channels as in the training data, of files red, green, blue, alpha", "convert files to 8-bit RGBA"),
}
OTHER_CHANNELS = ("channels as in the training data", "take the channels as 8-bit values")
# By the type of the numbers: what becomes of them, and the range.
VALUES = {
    "uint8": ("divide by 255", "pixels divided by 255, so 0 to 1"),
    "uint16": ("divide by 65535", "uint16 values divided by 65535, so 0 to 1"),
    "int16": ("divide by 32767", "int16 values divided by 32767, so -1 to 1"),
    "float32": ("as they are", "float32 values as they are, 0 to 1"),
}

Publish = Callable[[dict[Path, str]], list[Path]]


@contextmanager
def unfinished_files(output: Path) -> Iterator[tuple[Path, Publish]]:
    """Yield a hidden folder inside the output folder, and the function that gives its files their names there.

    That function takes the name of each file, in order, and returns their new paths. Leaving the block removes the
    hidden folder, and after an error the folders that were made for it.

    Raises:
        UserError: in place of an OSError, such as that of a full disk.
    """
    folder = unfinished(output / "export", "tmp")
    made = [parent for parent in (output, *output.parents) if not parent.exists()]

    def publish(names: dict[Path, str]) -> list[Path]:
        for file, name in names.items():
            sync_to_disk(file)
            os.replace(file, output / name)
        sync_to_disk(output)
        return [output / name for name in names.values()]

    try:
        with errors_of_writing(output):
            output.mkdir(parents=True, exist_ok=True)
            remove_leftovers(output)
            folder.mkdir()
            yield folder, publish
        made = []
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        for parent in made:  # the innermost first; one that is not empty stays
            with contextlib.suppress(OSError):
                parent.rmdir()


def describe_use(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return the content of preprocessing.json.

    Args:
        metadata: what `zerovision.training.checkpoint.weights.read_metadata` returned.
    """
    preprocessing = metadata["preprocessing"]
    height, width = preprocessing.sides
    resize_size, channels = preprocessing.resize_size, preprocessing.channels
    task = task_of(metadata)
    names, conversion = CHANNELS.get(channels, OTHER_CHANNELS)
    values = preprocessing.values
    division, value_range = VALUES[values]
    before = ["turn the image upright by its EXIF orientation", conversion]
    shrink_to = 2 * max(height, width) if not preprocessing.decode else None
    if values != BYTES:
        names, before, shrink_to = OTHER_CHANNELS[0], [f"take the channels as {values} values"], None
    if shrink_to:
        before.append(
            f"shrink files to 1/2, 1/4 or 1/8, as far as the shorter side keeps {shrink_to} pixels: JPEG files by "
            "libjpeg while they are decoded (Pillow's draft), others by the mean of blocks (Pillow's reduce)"
        )
    how = f"({preprocessing.interpolation}, antialiased)"
    longer, shorter = (
        f"the longer side to {height} pixels, the shorter one",
        f"the shorter side to {resize_size} pixels, the longer one",
    )
    whole, size = f"{height} x {width} pixels", str(height)
    if height != width:
        whole, size = f"{whole} (height x width)", "its size"
        longer = f"one side to that of {whole}, into which it fits, the other one"
        shorter = f"one side to that of {resize_size} (height x width), which it covers, the other one"
    if preprocessing.fit == "pad":
        geometry = [
            f"resize {longer} in proportion, rounded {how}",
            f"put it in the middle of {whole} of the colour `mean` (x 255), from (side - {size}) / 2, rounded down",
        ]
    elif resize_size is None:
        geometry = [f"resize to {whole} {how}"]
    else:
        geometry = [
            f"resize {shorter} in proportion, rounded down {how}",
            f"cut out the centre, {whole}, from (side - {size}) / 2, rounded",
        ]
    return {
        **preprocessing.to_dict(),
        SHRINK_TO: shrink_to,
        "class_names": metadata["class_names"],
        "input": {
            "name": INPUT_NAME,
            "dtype": "float32",
            "shape": ["batch", channels, height, width],
            "layout": f"NCHW, {names}",
            "value_range": f"{value_range}, then minus mean and divided by std, per channel",
        },
        "output": {
            "name": OUTPUT_NAME,
            "dtype": "float32",
            "shape": ["batch", len(metadata["class_names"])],
            "meaning": f"{task.output} gives probabilities; their order is that of class_names",
            **({} if task.thresholds is None else {THRESHOLDS: task.thresholds.tolist()}),
        },
        "steps": [
            *before,
            *geometry,
            f"{division}, subtract mean, divide by std, per channel",
            "put the channels first, and images of one size into one batch",
        ],
    }


def check_output(output: Path, facts: Mapping[str, bytes]) -> None:
    """Check that the output is a folder, and that no file about another model would be overwritten.

    Args:
        output: the folder.
        facts: of `files_about`.

    Raises:
        UserError: if not.
    """
    if output.exists() and not output.is_dir():
        raise UserError(f"--output '{output}' is a file: give a folder.")
    for path, content in ((output / name, content) for name, content in facts.items()):
        try:
            is_other = path.is_file() and path.read_bytes() != content
        except OSError as error:
            raise UserError(f"'{path}' cannot be read: {error}.") from None
        if is_other:
            raise UserError(
                f"'{path}' is of a model with other classes or preprocessing: give --output another folder."
            )


def files_about(metadata: dict[str, Any]) -> dict[str, bytes]:
    """Return the content of preprocessing.json, and of class_map.txt if there can be one, by their names."""
    text = json.dumps(describe_use(metadata), indent=1, ensure_ascii=False) + "\n"
    # Names of folders may contain bytes that are no text.
    files = {PREPROCESSING: text.encode("utf-8", "backslashreplace")}
    names = class_map(metadata["class_names"])
    return files if names is None else files | {CLASS_MAP: names}
