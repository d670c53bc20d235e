"""Computes the numbers in scores.json from the `SampleScores` of an evaluation."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zerovision.training.base.errors import UserError
from zerovision.training.base.files import replacing_folder, write_json
from zerovision.training.base.run_folder import SCORES
from zerovision.training.data.reading.sources import Source
from zerovision.training.tasks.scores import AREAS, SampleScores, Scores, count_classes

CALIBRATION_BINS = 15
WORST_SAMPLES = 24
TYPICAL_SAMPLES = 24


def describe_scores(scores: Scores, class_names: Sequence[str], source: Source) -> dict[str, Any]:
    """Return the contents of scores.json.

    Args:
        scores: the result of `SampleRecorder.gather`, which includes details.
        class_names: names of the C classes.
        source: the images.

    Returns:
        A dict with `samples`, `loss` (nats), `loss_standard_error` (of at least two samples), `top1`, `top5`,
            `balanced_accuracy` and `ece`; `auroc` and `map` if they were computed and are finite; `macro` and
            `weighted`, each with precision, recall and f1; `classes`, each with name, support, predicted,
            precision, recall and f1 (see `ClassCounts`; a ratio with denominator 0 is 0, as in scikit-learn with
            zero_division=0); `calibration` (see `calibration_bins`); `confusion`, `worst` and `typical` (see
            `_of_one_label`); and `judged` (see `judged_images`). Shares are in 0..1. With several labels
            per image, the dict also contains `task`, each class has a `threshold`, and `confusion`, `worst` and
            `typical` are empty.
    """
    details = scores.details
    if details is None:
        raise ValueError("these scores have no details: use those of an evaluation")
    counts = count_classes(scores, len(class_names))
    names = ("support", "predicted", "precision", "recall", "f1")
    columns = {"name": class_names} | {name: getattr(counts, name).tolist() for name in names}
    if scores.thresholds is None:
        selected = _of_one_label(details, len(class_names), source.name)
    else:
        columns["threshold"] = scores.thresholds.tolist()
        selected = {"confusion": [], "worst": [], "typical": []}
    classes = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    occurring = [one["name"] for one in classes if one["support"]]
    bins, losses = calibration_bins(details), details.losses.numpy()
    return {
        **({"task": scores.task} if scores.task else {}),
        "samples": scores.samples,
        "loss": scores.loss,
        **({"loss_standard_error": float(losses.std(ddof=1)) / len(losses) ** 0.5} if len(losses) > 1 else {}),
        "top1": scores.top1,
        "top5": scores.top5,
        "balanced_accuracy": counts.balanced_accuracy,
        **{name: area for name, area in zip(AREAS, scores.areas or (), strict=False) if math.isfinite(area)},
        "ece": expected_calibration_error(bins),
        "macro": _average(classes, counts.occurs.astype(int).tolist()),
        "weighted": _average(classes, [one["support"] for one in classes]),
        "classes": classes,
        "calibration": bins,
        **selected,
        "judged": judged_images(details, source.name, [source.digest, *occurring]),
    }


def read_scores(folder: Path) -> dict[str, Any] | None:
    """Return the contents of a folder's scores.json, or None if the folder has no such file."""
    path = folder / SCORES
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def write_scores(folder: Path, facts: dict[str, Any]) -> None:
    """Write scores.json into a folder, and remove all other files of an earlier evaluation from the folder."""
    check_replaceable(folder)
    with replacing_folder(folder) as new:
        write_json(new / SCORES, facts)


def check_replaceable(
    folder: Path, mark: str = SCORES, kind: str = "evaluation", cure: str = "choose another folder"
) -> None:
    """Check that replacing a folder would remove nothing but an earlier result, which contains the file `mark`.

    Raises:
        UserError: if `folder` is a file, or if it is not empty and does not contain `mark`.
    """
    if folder.exists() and not (folder / mark).is_file() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"'{folder}' exists and contains no {kind}: move it away, or {cure}.")


def _of_one_label(details: SampleScores, num_classes: int, name_of: Callable[[int], str]) -> dict[str, Any]:
    """Return `confusion`, `worst` and `typical` of scores.json, which exist only if each sample has one label.

    `confusion` has a row [true class, predicted class, number of samples] for each pair that occurs, sorted; `worst`,
    up to 24 samples by decreasing loss, misclassified ones first; `typical`, the correctly classified sample with the
    smallest loss of each class that has one, for up to 24 classes.
    """
    cells, counts = torch.unique(details.labels * num_classes + details.predictions, return_counts=True)
    losses, is_right = details.losses.numpy(), details.is_right.numpy()
    right = is_right.nonzero()[0]
    right = right[np.argsort(losses[right], kind="stable")]
    _, firsts = np.unique(details.labels.numpy()[right], return_index=True)

    def described(places: np.ndarray) -> list[dict[str, Any]]:
        return [
            {
                "index": int(details.indices[place]),
                "name": name_of(int(details.indices[place])),
                "label": int(details.labels[place]),
                "prediction": int(details.predictions[place]),
                "confidence": float(details.confidences[place]),
                "loss": float(details.losses[place]),
            }
            for place in places.tolist()
        ]

    return {
        "confusion": [
            [*divmod(cell, num_classes), count] for cell, count in zip(cells.tolist(), counts.tolist(), strict=True)
        ],
        "worst": described(np.lexsort((-losses, is_right))[:WORST_SAMPLES]),
        "typical": described(right[firsts[:TYPICAL_SAMPLES]]),
    }


def dense_confusion(cells: Sequence[Sequence[int]], num_classes: int) -> torch.Tensor:
    """Convert `confusion` in scores.json to a matrix, int64 [true classes, predicted classes]."""
    confusion = torch.zeros(num_classes, num_classes, dtype=torch.int64)
    for true, predicted, count in cells:
        confusion[true, predicted] = count
    return confusion


def calibration_bins(details: SampleScores) -> list[dict[str, Any]]:
    """Return the bounds, number of samples, mean confidence and accuracy of each of 15 equal-width confidence bins.

    Bin m of M contains the confidences in ((m - 1) / M, m / M], as in Guo et al. 2017 (arXiv:1706.04599), section 2.
    The mean confidence and the accuracy of an empty bin are None.
    """
    confidences, is_right = details.confidences.numpy(), details.is_right.numpy()
    edges = np.linspace(0, 1, CALIBRATION_BINS + 1)
    bin_of = np.digitize(confidences, edges[1:-1], right=True)
    bins = []
    for number in range(CALIBRATION_BINS):
        inside = bin_of == number
        count = int(inside.sum())
        bins.append(
            {
                "lower": float(edges[number]),
                "upper": float(edges[number + 1]),
                "samples": count,
                "confidence": float(confidences[inside].mean()) if count else None,
                "accuracy": float(is_right[inside].mean()) if count else None,
            }
        )
    return bins


def expected_calibration_error(bins: Sequence[dict[str, Any]]) -> float:
    """Return the expected calibration error: the mean gap between accuracy and confidence, weighted by bin size.

    Source: Guo et al. 2017 (arXiv:1706.04599), equation 3.
    """
    filled = [one for one in bins if one["samples"]]
    gaps = sum(one["samples"] * abs(one["accuracy"] - one["confidence"]) for one in filled)
    return float(gaps / max(sum(one["samples"] for one in filled), 1))


def judged_images(details: SampleScores, name_of: Callable[[int], str], about: Sequence[str]) -> dict[str, str]:
    """Return the data for comparing two evaluations image by image.

    `images` is a hash of the images' labels, of their paths relative to their common folder, and of `about`: the names
    of their classes, and `Source.digest`. `right` has one digit per image, in order: 1 if its class was predicted
    correctly, otherwise 0.
    """
    names = [name_of(index) for index in details.indices.tolist()]
    # Cut the prefix after a folder; `commonpath` rejects a mix of relative and absolute paths.
    start = os.path.commonprefix(names).rfind(os.sep) + 1  # noqa: RUF071
    lines = (f"{label}\0{name[start:]}" for label, name in zip(details.labels.tolist(), names, strict=True))
    digest = hashlib.sha256("\n".join([*about, *lines]).encode("utf-8", "surrogateescape"))
    return {"images": digest.hexdigest()[:16], "right": "".join(map(str, details.is_right.int().tolist()))}


def _average(classes: Sequence[dict[str, Any]], weights: Sequence[int]) -> dict[str, float]:
    return {
        key: float(np.average([one[key] for one in classes], weights=weights if any(weights) else None))
        for key in ("precision", "recall", "f1")
    }
