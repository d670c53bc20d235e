"""The pictures that the model gets wrong, small enough to stand in the page."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from pathlib import Path

from PIL import Image, UnidentifiedImageError

from delivery.report.formatting import clip, percent
from delivery.report.run_files import RunFiles
from training.data.reading.images import ImageError, read_file

MOST_PICTURES = 24
LARGEST_PNG_BYTES = 6_000  # more is written as JPEG
PICTURE_PIXELS = 128
JPEG_QUALITY = 80


@dataclass(frozen=True)
class Sample:
    """An image that was told wrong; `picture` is a data URI, empty where the picture cannot be read."""

    name: str
    true: str
    predicted: str
    confidence: str
    picture: str


def wrong_samples(run: RunFiles, most: int = MOST_PICTURES) -> list[Sample]:
    """Return the images with the largest loss among those that were told wrong."""
    if run.scores is None:
        return []
    names = [clip(str(one["name"])) for one in run.scores["classes"]]
    wrong = [(number, one) for number, one in enumerate(run.scores["worst"]) if one["label"] != one["prediction"]]
    return [
        Sample(
            clip(str(one["name"])),
            names[one["label"]],
            names[one["prediction"]],
            percent(one["confidence"], 0),
            _data_uri(run.worst_pictures / f"{number:03d}.png"),
        )
        for number, one in wrong[:most]
    ]


def _data_uri(path: Path) -> str:
    try:
        content = read_file(path)
        with Image.open(io.BytesIO(content), formats=["PNG"]) as picture:
            if len(content) <= LARGEST_PNG_BYTES:
                picture.verify()
                return _as_uri("png", content)
            small = picture.convert("RGB")
    except (OSError, ImageError, UnidentifiedImageError, ValueError, SyntaxError, Image.DecompressionBombError):
        return ""
    small.thumbnail((PICTURE_PIXELS, PICTURE_PIXELS))
    jpeg = io.BytesIO()
    small.save(jpeg, "JPEG", quality=JPEG_QUALITY)
    return _as_uri("jpeg", jpeg.getvalue())


def _as_uri(kind: str, content: bytes) -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
