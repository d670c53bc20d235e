"""Simulates how often the 95 % intervals of macro F1 and balanced accuracy contain the score that they are about.

    python benchmarks/intervals.py            # minutes on one core

A made-up classifier says how likely each class is taken for each other one. From that 1,000 evaluations of a few images
are drawn, and their intervals are compared with the score of endlessly many images: those of `delivery.intervals`, and
beside them the bootstrap's percentiles (Efron and Tibshirani 1993, section 13.3), which stood there before.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks.report import Section, save, show, versions
from zerovision.delivery.intervals import OF_CLASSES, of_classes
from zerovision.training.observe.class_counts import ClassCounts

RESAMPLES = 400
Intervals = Mapping[str, tuple[float, float]]


class Classifier(NamedTuple):
    """A classifier whose mistakes are spread evenly over the other classes.

    Attributes:
        shares: of the images, by class.
        recalls: of the classes.
        images: of an evaluation.
    """

    name: str
    shares: Sequence[float]
    recalls: Sequence[float]
    images: int

    def chances(self) -> np.ndarray:
        """Return how likely an image is of each class (row) and predicted as each (column)."""
        shares, recalls = np.array(self.shares) / sum(self.shares), np.array(self.recalls)
        cells = np.outer(shares * (1 - recalls) / (len(shares) - 1), np.ones(len(shares)))
        cells[np.diag_indices_from(cells)] = shares * recalls
        return cells


CLASSIFIERS = (
    Classifier("2 classes, 90 % right", [1] * 2, [0.9] * 2, 20),
    Classifier("2 classes, 98 % right", [1] * 2, [0.98] * 2, 50),
    Classifier("2 classes 9 : 1, 90 % right", [9, 1], [0.9] * 2, 100),
    Classifier("2 classes 19 : 1, 95 and 60 % right", [19, 1], [0.95, 0.6], 100),
    Classifier("3 classes, 85 % right", [1] * 3, [0.85] * 3, 30),
    Classifier("3 classes 6 : 3 : 1, 95, 80 and 50 % right", [6, 3, 1], [0.95, 0.8, 0.5], 60),
    Classifier("4 classes, 75 % right", [1] * 4, [0.75] * 4, 16),
    Classifier("5 classes 16 : 8 : 4 : 2 : 1, 80 % right", [16, 8, 4, 2, 1], [0.8] * 5, 100),
    Classifier(
        "7 classes 56 : 9 : 9 : 4 : 2 : 1 : 1", [56, 9, 9, 4, 2, 1, 1], [0.95, 0.7, 0.75, 0.7, 0.6, 0.6, 0.8], 300
    ),
    Classifier("10 classes, 60 % right", [1] * 10, [0.6] * 10, 100),
    Classifier("10 classes, 97 % right", [1] * 10, [0.97] * 10, 200),
    Classifier("10 classes, 50 to 100 % right", [1] * 10, np.linspace(0.5, 1, 10).tolist(), 1000),
    Classifier("30 classes, 80 % right", [1] * 30, [0.8] * 30, 150),
)


def counts_of(cells: np.ndarray) -> ClassCounts:
    """Return the counts of one matrix of images by class (row) and prediction (column), or chances."""
    return ClassCounts(np.diagonal(cells), cells.sum(1), cells.sum(0))


def by_percentiles(cells: np.ndarray, generator: np.random.Generator) -> Intervals:
    """Return the percentiles of evaluations of as many images, drawn with replacement."""
    images = int(cells.sum())
    drawn = generator.multinomial(images, cells.ravel() / images, RESAMPLES).reshape(-1, *cells.shape)
    found = [[getattr(counts_of(one), name) for name in OF_CLASSES] for one in drawn]
    ends = np.quantile(found, [0.025, 0.975], axis=0).T
    return {name: (low, high) for name, (low, high) in zip(OF_CLASSES, ends.tolist(), strict=True)}


def by_images(cells: np.ndarray) -> Intervals:
    """Return the intervals that a report has."""
    confusion = [[*map(int, cell), int(cells[tuple(cell)])] for cell in np.argwhere(cells)]
    return of_classes({"classes": range(len(cells)), "confusion": confusion})


def coverage(classifier: Classifier, evaluations: int) -> dict[str, list[float]]:
    """Return by score, of the percentiles and of ours: the share that contains the true score, and the mean width."""
    generator, chances = np.random.default_rng(0), classifier.chances()
    truth = {name: getattr(counts_of(chances), name) for name in OF_CLASSES}
    sums = {name: np.zeros(4) for name in OF_CLASSES}
    for drawn in generator.multinomial(classifier.images, chances.ravel(), evaluations):
        cells = drawn.reshape(chances.shape)
        for kind, found in enumerate((by_percentiles(cells, generator), by_images(cells))):
            for name, (low, high) in found.items():
                sums[name][2 * kind :][:2] += low <= truth[name] <= high, high - low
    return {name: (values / evaluations).tolist() for name, values in sums.items()}


def main() -> None:
    """Measure all classifiers, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--evaluations", type=int, default=1000)
    evaluations = parser.parse_args().evaluations
    titles = {"macro_f1": "Macro F1", "balanced_accuracy": "Balanced accuracy"}
    rows: dict[str, list[tuple[str, ...]]] = {name: [] for name in OF_CLASSES}
    for classifier in CLASSIFIERS:
        for name, (before, width_before, now, width) in coverage(classifier, evaluations).items():
            shares = (f"{100 * before:.1f} %", f"{100 * now:.1f} %", f"{100 * width_before:.1f}", f"{100 * width:.1f}")
            rows[name].append((classifier.name, str(classifier.images), *shares))
    columns = ("classifier", "images", "percentiles contain it", "ours contain it", "width in points", "ours")
    text = f"Of {evaluations:,} evaluations of a row, whose shares have a standard error of 0.7 points at 95 %."
    sections = [Section(titles[name], text, columns, rows[name]) for name in OF_CLASSES]
    for section in sections:
        show(section)
    facts = f"{versions('numpy', 'scipy')}; {RESAMPLES} resamples for the percentiles"
    save(
        "intervals",
        "How often 95 % intervals contain the true score",
        facts,
        "python benchmarks/intervals.py",
        sections,
    )


if __name__ == "__main__":
    main()
