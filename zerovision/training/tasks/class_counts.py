"""Counts of samples by true and predicted class, and scores computed from them.

This module does not import torch, because reports use it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np


class ClassCounts(NamedTuple):
    """Numbers of samples per class; each field is int64 [C].

    Attributes:
        right: samples of the class that are predicted correctly.
        support: samples of the class.
        predicted: samples predicted as the class.
    """

    right: np.ndarray
    support: np.ndarray
    predicted: np.ndarray

    @property
    def precision(self) -> np.ndarray:
        """The share of samples predicted as a class that belong to the class, float64 [C]; 0 without such samples."""
        return _divide(self.right, self.predicted)

    @property
    def recall(self) -> np.ndarray:
        """The share of a class's samples that are predicted correctly, float64 [C]; 0 if the class has no samples."""
        return _divide(self.right, self.support)

    @property
    def f1(self) -> np.ndarray:
        """2 right / (support + predicted), float64 [C]; 0 if the denominator is 0."""
        return _divide(2 * self.right, self.support + self.predicted)

    @property
    def occurs(self) -> np.ndarray:
        """Whether a class has samples or is predicted, bool [C].

        The precision, recall and F1 of any other class are undefined.
        """
        return self.support + self.predicted > 0

    @property
    def macro_f1(self) -> float:
        """The mean F1 of the classes that occur or are predicted, as in scikit-learn; NaN without such classes."""
        return float(self.f1[self.occurs].mean()) if self.occurs.any() else math.nan

    @property
    def balanced_accuracy(self) -> float:
        """The mean recall of the classes that have samples."""
        return float(self.recall[self.support > 0].mean()) if self.support.any() else 0.0

    @property
    def lowest_recall(self) -> tuple[int, float]:
        """The first class with the lowest recall among those with samples, and its recall."""
        number = int(np.where(self.support > 0, self.recall, np.inf).argmin())
        return number, float(self.recall[number])


def _divide(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """Divide counts elementwise; where the denominator is 0, the result is 0."""
    return np.divide(numerator, denominator, out=np.zeros(len(numerator)), where=denominator > 0)
