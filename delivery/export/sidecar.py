"""preprocessing.json: all that a program without zerovision needs to feed an exported model and read its answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from training.errors import UserError

SIDECAR = "preprocessing.json"
INPUT_NAME, OUTPUT_NAME = "images", "logits"


def describe_use(metadata: dict[str, Any]) -> dict[str, Any]:
    """Return what preprocessing.json holds.

    Args:
        metadata: what `training.checkpoint.weights.read_metadata` returned.
    """
    preprocessing = metadata["preprocessing"]
    size, resize_size = preprocessing["image_size"], preprocessing["resize_size"]
    how = f"({preprocessing['interpolation']}, antialiased)"
    geometry = (
        [f"resize to {size} x {size} pixels {how}"]
        if resize_size is None
        else [
            f"resize the shorter side to {resize_size} pixels, the longer one in proportion, rounded down {how}",
            f"cut out the centre, {size} x {size} pixels, from (side - {size}) / 2, rounded",
        ]
    )
    return {
        **{key: preprocessing[key] for key in ("image_size", "resize_size", "mean", "std", "interpolation")},
        "class_names": metadata["class_names"],
        "input": {
            "name": INPUT_NAME,
            "dtype": "float32",
            "shape": ["batch", 3, size, size],
            "layout": "NCHW, channels red, green, blue",
            "value_range": "pixels divided by 255, so 0 to 1, then minus mean and divided by std, per channel",
        },
        "output": {
            "name": OUTPUT_NAME,
            "dtype": "float32",
            "shape": ["batch", len(metadata["class_names"])],
            "meaning": "softmax over the classes gives probabilities; their order is that of class_names",
        },
        "steps": [
            "turn the image upright by its EXIF orientation",
            "convert to 8-bit RGB, transparent pixels on white",
            *geometry,
            "divide by 255, subtract mean, divide by std, per channel",
            "put the channels first, and images of one size into one batch",
        ],
    }


def write_sidecar(path: Path, metadata: dict[str, Any]) -> None:
    """Write preprocessing.json."""
    path.write_text(_text(metadata), encoding="utf-8")


def check_sidecar(output: Path, metadata: dict[str, Any]) -> None:
    """Refuse a folder whose preprocessing.json is that of another model, which would be lost.

    Raises:
        UserError: for such a folder.
    """
    path = output / SIDECAR
    try:
        present = path.read_text(encoding="utf-8") if path.is_file() else None
    except (OSError, ValueError) as error:
        raise UserError(f"'{path}' cannot be read: {error}.") from None
    if present is not None and present != _text(metadata):
        raise UserError(f"'{path}' is of a model with other classes or preprocessing: give --output another folder.")


def _text(metadata: dict[str, Any]) -> str:
    text = json.dumps(describe_use(metadata), indent=1, ensure_ascii=False) + "\n"
    return text.encode("utf-8", "backslashreplace").decode()  # the names of folders may hold bytes that are no text
