"""The best epoch's evaluation: scores of each class, confused classes, calibration, misclassified images."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, UnidentifiedImageError

from delivery.report.charts import Chart, Line, draw
from delivery.report.formatting import clip, percent
from delivery.report.run_files import RunFiles
from training.data.reading.images import ImageError, read_file

MOST_CLASSES_LISTED = 200
CLASSES_LISTED_OF_MANY = 100
LARGEST_MATRIX = 40  # classes
MOST_PAIRS = 20
SHADES = 10
AVERAGES = {"macro": "mean of the classes", "weighted": "mean, weighted by images"}
MOST_IMAGES = 24
LARGEST_PNG_BYTES = 6_000  # larger files are converted to JPEG
IMAGE_PIXELS = 128
JPEG_QUALITY = 80


class ClassTable(NamedTuple):
    """Rows of (name, images, predictions, precision, recall, F1), averages of (name, precision, recall, F1)."""

    rows: list[tuple[Any, ...]]
    averages: list[tuple[Any, ...]]
    left_out: int


class Cell(NamedTuple):
    """A cell of the confusion matrix: its images, and its shade from 0 to `SHADES`."""

    samples: int
    shade: int
    is_correct: bool


class Confusion(NamedTuple):
    """Confused classes.

    Attributes:
        names: of the classes; empty if they are too many for a matrix.
        matrix: a row for each true class, a cell for each predicted one.
        pairs: (true class, predicted class, images, share of the true class) of the most frequent mistakes.
        pairs_left_out: the number of other pairs.
        misclassified: the number of all misclassified images.
    """

    names: list[str]
    matrix: list[list[Cell]]
    pairs: list[tuple[str, str, int, str]]
    pairs_left_out: int
    misclassified: int


class Sample(NamedTuple):
    """A misclassified image; `data_uri` is empty if the file cannot be read."""

    name: str
    label: str
    prediction: str
    confidence: str
    data_uri: str


def class_table(scores: Mapping[str, Any]) -> ClassTable:
    """Return the scores of the classes; of more than `MOST_CLASSES_LISTED`, those with the lowest F1."""
    keys = ("support", "predicted", "precision", "recall", "f1")
    rows = [(clip(str(one["name"])), *(one[key] for key in keys)) for one in scores["classes"]]
    shown = rows
    if len(rows) > MOST_CLASSES_LISTED:
        shown = sorted(rows, key=lambda row: row[-1])[:CLASSES_LISTED_OF_MANY]
    averages = [(name, *(float(scores[key][score]) for score in keys[2:])) for key, name in AVERAGES.items()]
    return ClassTable(shown, averages, len(rows) - len(shown))


def confusion(scores: Mapping[str, Any], *, with_matrix: bool = True) -> Confusion:
    """Return the most frequent mistakes, and the confusion matrix if it is wanted and small enough."""
    names = [clip(str(one["name"])) for one in scores["classes"]]
    support = [one["support"] for one in scores["classes"]]
    cells = {(label, prediction): samples for label, prediction, samples in scores["confusion"]}
    mistakes = sorted((pair for pair in cells if pair[0] != pair[1]), key=lambda pair: -cells[pair])
    pairs = [
        (names[label], names[prediction], samples, percent(samples / support[label]))
        for label, prediction in mistakes[:MOST_PAIRS]
        for samples in (cells[label, prediction],)
    ]
    matrix = []
    if with_matrix and len(names) <= LARGEST_MATRIX:
        for label, total in enumerate(support):
            row = [(prediction, cells.get((label, prediction), 0)) for prediction in range(len(names))]
            shades = [max(1, round(SHADES * samples / total)) if samples else 0 for _, samples in row]
            matrix.append([Cell(n, shade, to == label) for (to, n), shade in zip(row, shades, strict=True)])
    total_mistakes = sum(cells[pair] for pair in mistakes)
    return Confusion(names if matrix else [], matrix, pairs, len(mistakes) - len(pairs), total_mistakes)


def calibration_chart(key: str, scores: Mapping[str, Any]) -> Chart | None:
    """Return the chart of accuracy by confidence; None if every bin is empty."""
    bins = [one for one in scores["calibration"] if one["samples"]]
    if not bins:
        return None
    confidence, accuracy = (np.array([one[name] for one in bins], dtype=float) for name in ("confidence", "accuracy"))
    diagonal = np.array([0.0, 1.0])
    largest = max(bins, key=lambda one: one["samples"])
    caption = (
        f"Of {largest['samples']} predictions with a mean confidence of {percent(largest['confidence'])}, "
        f"{percent(largest['accuracy'])} are correct. Below the diagonal the model is overconfident, above it "
        f"underconfident; the mean distance (ECE) is {percent(scores['ece'], 2)}."
    )
    lines = [
        Line("perfect", 8, diagonal, diagonal, "perfect", faint=True),
        Line("this model", 1, confidence, accuracy, "model", dotted=True),
    ]
    title = "Accuracy by confidence"
    return draw(key, title, lines, caption=caption, x_name="confidence", from_zero=True, is_percent=True)


def misclassified_images(run: RunFiles, most: int = MOST_IMAGES) -> list[Sample]:
    """Return the misclassified images with the largest loss."""
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
            _data_uri(run.worst_images / f"{number:03d}.png"),
        )
        for number, one in wrong[:most]
    ]


def _data_uri(path: Path) -> str:
    """Return a PNG file as a data URI, as JPEG if it is large; empty if it cannot be read."""
    kind = "png"
    try:
        content = read_file(path)
        with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
            if len(content) <= LARGEST_PNG_BYTES:
                image.verify()
            else:
                small, jpeg, kind = image.convert("RGB"), io.BytesIO(), "jpeg"
                small.thumbnail((IMAGE_PIXELS, IMAGE_PIXELS))
                small.save(jpeg, "JPEG", quality=JPEG_QUALITY)
                content = jpeg.getvalue()
    except (OSError, ImageError, UnidentifiedImageError, ValueError, SyntaxError, Image.DecompressionBombError):
        return ""
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
