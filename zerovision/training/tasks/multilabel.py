"""Scores of an evaluation in which each class is a yes or no of its own: losses, thresholds, counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from zerovision.training.tasks.class_counts import ClassCounts

THRESHOLDS = "thresholds"  # of the classes, in the metadata of weights


@dataclass(frozen=True)
class MultilabelScores:
    """What is known of all samples of an evaluation: on the CPU, in the order of their indices.

    Attributes:
        targets: bool [N, K], whether a sample has a class.
        probabilities: float32 [N, K].
        thresholds: float64 [K], the probability from which on a class is predicted.
    """

    targets: np.ndarray
    probabilities: np.ndarray
    thresholds: np.ndarray

    def counts(self) -> ClassCounts:
        """Count the samples of each class by the thresholds."""
        predicted = self.probabilities >= self.thresholds
        return ClassCounts(*(column.sum(0) for column in (predicted & self.targets, self.targets, predicted)))

    def has(self, number: int) -> np.ndarray:
        """Return whether each sample has a class, bool [N]."""
        return self.targets[:, number]


def best_thresholds(targets: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
    """Return for each class the threshold of the highest F1, half-way to the next lower probability: float64 [K].

    Of equal ones the highest; 0.5 for a class without samples. Arguments are those of `MultilabelScores`.
    """
    found = np.full(targets.shape[1], 0.5)
    for number, (own, values) in enumerate(zip(targets.T, probabilities.T.astype(np.float64), strict=True)):
        order = np.argsort(-values, kind="stable")
        ordered = np.append(values[order], 0.0)
        f1 = 2 * own[order].cumsum() / (np.arange(1, len(order) + 1) + own.sum())
        f1[ordered[:-1] == ordered[1:]] = -1  # samples of one probability go together
        if own.any():
            best = int(f1.argmax())
            found[number] = ordered[best : best + 2].mean()
    return found


def thresholds_of(metadata: Mapping[str, Any]) -> np.ndarray | None:
    """Return the thresholds of weights that tell several labels, float64 [K]; None of others.

    Args:
        metadata: what `zerovision.training.checkpoint.weights.read_metadata` returned.
    """
    found = metadata["extra"].get(THRESHOLDS)
    return None if found is None else np.array(found, dtype=np.float64)


def multilabel_losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean binary cross-entropy of each image over its classes: float32 [B, K] each, to [B]."""
    return F.binary_cross_entropy_with_logits(logits.float(), targets.float(), reduction="none").mean(1)
