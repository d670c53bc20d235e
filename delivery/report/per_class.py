"""What the best epoch's evaluation says: of each class, of which classes are confused, of how sure the model is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from delivery.report.curves import Chart, Line, draw
from delivery.report.formatting import clip, number, percent

MOST_CLASSES_LISTED = 200
CLASSES_LISTED_OF_MANY = 100
LARGEST_MATRIX = 40  # classes
MOST_PAIRS = 20
SHADES = 10
AVERAGES = {"macro": "mean of the classes", "weighted": "mean, weighted by images"}


@dataclass(frozen=True)
class ClassTable:
    """Per-class scores: rows of (name, images, called so, precision, recall, f1), and the means."""

    rows: list[tuple[str, int, int, float, float, float]]
    averages: list[tuple[str, float, float, float]]
    left_out: int


@dataclass(frozen=True)
class Cell:
    """A pair of true and predicted class: how many images, and which shade of 0 to `SHADES`."""

    samples: int
    shade: int
    is_right: bool


@dataclass(frozen=True)
class Confusion:
    """Which classes are taken for which.

    Attributes:
        names: of the classes; empty where there are too many for a matrix.
        matrix: a row for each true class, a cell for each predicted one.
        pairs: (true, predicted, images, share of the true class), the most frequent mistakes.
        pairs_left_out: how many more kinds of mistake there are.
    """

    names: list[str]
    matrix: list[list[Cell]]
    pairs: list[tuple[str, str, int, str]]
    pairs_left_out: int


def class_table(scores: Mapping[str, Any]) -> ClassTable:
    """Return the scores of the classes; of many classes, those with the lowest F1."""
    keys = ("support", "predicted", "precision", "recall", "f1")
    rows = [(clip(str(one["name"])), *(one[key] for key in keys)) for one in scores["classes"]]
    left_out = 0
    if len(rows) > MOST_CLASSES_LISTED:
        left_out = len(rows) - CLASSES_LISTED_OF_MANY
        rows = sorted(rows, key=lambda row: row[-1])[:CLASSES_LISTED_OF_MANY]
    averages = [
        (words, *(float(scores[name][key]) for key in ("precision", "recall", "f1")))
        for name, words in AVERAGES.items()
    ]
    return ClassTable(rows, averages, left_out)  # type: ignore[arg-type]


def confusion(scores: Mapping[str, Any], *, with_matrix: bool = True) -> Confusion:
    """Return the confusion matrix where it is small enough, and the mistakes that are made most often."""
    names = [clip(str(one["name"])) for one in scores["classes"]]
    support = [one["support"] for one in scores["classes"]]
    cells = {(true, said): samples for true, said, samples in scores["confusion"]}
    mistakes = sorted(
        ((pair, samples) for pair, samples in cells.items() if pair[0] != pair[1]), key=lambda one: -one[1]
    )
    pairs = [
        (names[true], names[said], samples, percent(samples / support[true]))
        for (true, said), samples in mistakes[:MOST_PAIRS]
    ]
    matrix = []
    if with_matrix and len(names) <= LARGEST_MATRIX:
        for true in range(len(names)):
            row = [_cell(true, said, cells.get((true, said), 0), support[true]) for said in range(len(names))]
            matrix.append(row)
    return Confusion(names if matrix else [], matrix, pairs, len(mistakes) - len(pairs))


def calibration_chart(key: str, scores: Mapping[str, Any]) -> Chart | None:
    """Draw accuracy over confidence, bin by bin; None where no bin is filled."""
    filled = [one for one in scores["calibration"] if one["samples"]]
    lines = [
        Line("perfect", 8, [0.0, 1.0], [0.0, 1.0], "perfect", faint=True),
        Line(
            "this model",
            1,
            [one["confidence"] for one in filled],
            [one["accuracy"] for one in filled],
            "model",
            dotted=True,
        ),
    ]
    if not filled:
        return None
    surest = max(filled, key=lambda one: one["samples"])
    caption = (
        f"How often the model is right, by how sure it is. Of {surest['samples']} images it was "
        f"{percent(surest['confidence'])} sure on average, and right on {percent(surest['accuracy'])}. "
        f"Below the diagonal it is too sure, above it not sure enough; the mean distance (ECE) is "
        f"{percent(scores['ece'], 2)}."
    )
    return draw(
        key,
        "Accuracy by confidence",
        lines,
        caption=caption,
        x_name="confidence",
        from_zero=True,
        highest=1.0,
        write=number,
    )


def _cell(true: int, said: int, samples: int, support: int) -> Cell:
    shade = max(1, round(SHADES * samples / support)) if samples else 0
    return Cell(samples, shade, true == said)
