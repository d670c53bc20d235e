"""The best epoch's evaluation: scores per class, confused classes, calibration, and misclassified images."""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from zerovision.delivery.pages import clip, data_uri, percent
from zerovision.delivery.report.charts import Chart, Frame, Line, draw
from zerovision.training.base.run_folder import EVALUATION, WHY, WORST
from zerovision.training.data.reading.files import ImageError, read_file

MOST_CLASSES_LISTED = 200
CLASSES_LISTED_OF_MANY = 100
LARGEST_MATRIX = 40  # classes
MOST_PAIRS = 20
SHADES = 10
MOST_IMAGES = 24
LARGEST_PNG_BYTES = 6_000  # larger files are converted to JPEG
IMAGE_PIXELS = 128
JPEG_QUALITY = 80


def class_table(scores: Mapping[str, Any]) -> dict[str, Any]:
    """Return the scores per class; with more than `MOST_CLASSES_LISTED` classes, only the classes with the lowest F1.

    `rows` are (name, images, predictions, precision, recall, F1), and `averages` are (name, precision, recall, F1).
    """
    keys = ("support", "predicted", "precision", "recall", "f1")
    rows = [(clip(str(one["name"])), *(one[key] for key in keys)) for one in scores["classes"]]
    many = len(rows) > MOST_CLASSES_LISTED
    shown = sorted(rows, key=lambda row: row[-1])[:CLASSES_LISTED_OF_MANY] if many else rows
    averages = [
        (name, *(float(scores[average][key]) for key in keys[2:]))
        for average, name in (("macro", "mean of the classes"), ("weighted", "mean, weighted by images"))
    ]
    return {"rows": shown, "averages": averages, "left_out": len(rows) - len(shown)}


def confusion(scores: Mapping[str, Any], *, with_matrix: bool = True) -> dict[str, Any]:
    """Return the most frequent mistakes, and the confusion matrix if it is requested and small enough.

    `pairs` are (true class, predicted class, images, share of the true class). `matrix` is empty or has a row for each
    true class with (images, shade from 0 to `SHADES`) for each predicted class; `misclassified` is a number of images.
    """
    names = [clip(str(one["name"])) for one in scores["classes"]]
    support = [one["support"] for one in scores["classes"]]
    cells = {(label, prediction): samples for label, prediction, samples in scores["confusion"]}
    mistakes = [(label, prediction, samples) for (label, prediction), samples in cells.items() if label != prediction]
    mistakes.sort(key=lambda mistake: -mistake[-1])
    pairs = [
        (names[label], names[prediction], samples, percent(samples / support[label]))
        for label, prediction, samples in mistakes[:MOST_PAIRS]
    ]
    matrix = []
    if with_matrix and len(names) <= LARGEST_MATRIX:
        for label, total in enumerate(support):
            row = [cells.get((label, prediction), 0) for prediction in range(len(names))]
            matrix.append([(samples, samples and max(1, round(SHADES * samples / total))) for samples in row])
    misclassified = sum(samples for _, _, samples in mistakes)
    left_out = len(mistakes) - len(pairs)
    return {"names": names, "matrix": matrix, "pairs": pairs, "left_out": left_out, "misclassified": misclassified}


def calibration_chart(key: str, scores: Mapping[str, Any]) -> Chart | None:
    """Return the chart of accuracy by confidence; None if every bin is empty."""
    bins = [one for one in scores["calibration"] if one["samples"]]
    if not bins:
        return None
    largest = max(bins, key=lambda one: one["samples"])
    caption = (
        f"Of {largest['samples']} predictions with a mean confidence of {percent(largest['confidence'])}, "
        f"{percent(largest['accuracy'])} are correct. Below the diagonal the model is overconfident, above it "
        f"underconfident; the mean distance (ECE) is {percent(scores['ece'], 2)}."
    )
    confidence, accuracy = (np.array([float(one[name]) for one in bins]) for name in ("confidence", "accuracy"))
    diagonal = np.array([0.0, 1.0])
    lines = [
        Line("perfect", 8, diagonal, diagonal, "perfect", is_faint=True),
        Line("this model", 1, confidence, accuracy, "model"),
    ]
    title = "Accuracy by confidence"
    return draw(key, title, lines, Frame(caption, "confidence", from_zero=True, is_percent=True))


def sample_images(run: Path, scores: Mapping[str, Any], kind: str, most: int) -> list[dict[str, str]]:
    """Return sample images of a run's evaluation: only misclassified images for `WORST`, and all images for `TYPICAL`.

    `data_uri` is empty if the image cannot be read; `why` is empty if no picture explains the prediction.
    """
    names = [clip(str(one["name"])) for one in scores["classes"]]
    chosen = [
        (run / EVALUATION / kind / f"{number:03d}", one)
        for number, one in enumerate(scores.get(kind, []))
        if kind != WORST or one["label"] != one["prediction"]
    ]
    return [
        {
            "name": clip(str(one["name"])),
            "label": names[one["label"]],
            "prediction": names[one["prediction"]],
            "confidence": percent(one["confidence"], 0),
            "data_uri": _data_uri(path.with_name(f"{path.name}.png")),
            "why": _data_uri(path.with_name(f"{path.name}{WHY}.png")),
        }
        for path, one in chosen[:most]
    ]


def _data_uri(path: Path) -> str:
    """Return a PNG file as a data URI, converted to JPEG if it is large; '' if it cannot be read."""
    try:
        content = read_file(path)
        with Image.open(io.BytesIO(content), formats=["PNG"]) as image:
            if len(content) <= LARGEST_PNG_BYTES:
                image.verify()
                return data_uri(content, "png")
            small = image.convert("RGB")
            small.thumbnail((IMAGE_PIXELS, IMAGE_PIXELS))
            return data_uri(small, "jpeg", quality=JPEG_QUALITY)
    except (OSError, ImageError, ValueError, SyntaxError, Image.DecompressionBombError):
        return ""
