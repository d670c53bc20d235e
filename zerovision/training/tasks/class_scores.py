"""Per-class scores of an evaluation, and the score by which a run chooses its best epoch."""

from __future__ import annotations

import numpy as np

from zerovision.training.base.errors import UserError
from zerovision.training.base.units import format_bytes, plural
from zerovision.training.data.datasets import DatasetPair
from zerovision.training.data.sampler import EvaluationPlan
from zerovision.training.tasks.class_counts import ClassCounts
from zerovision.training.tasks.scores import Scores

AREAS = ("auroc", "map")  # scores that need the probabilities of all classes for all samples
MOST_PROBABILITY_BYTES = 4 * 2**30  # on one rank


def count_classes(scores: Scores, num_classes: int) -> ClassCounts:
    """Count the samples of each class in an evaluation with details."""
    if scores.counts is not None:
        return scores.counts
    details = scores.details
    assert details is not None
    columns = (details.labels[details.is_right], details.labels, details.predictions)
    return ClassCounts(*(np.bincount(column.numpy(), minlength=num_classes) for column in columns))


def score_of(scores: Scores, name: str, num_classes: int) -> float:
    """Return one of `points.SCORE_NAMES` for an evaluation with details; scores in `AREAS` also need `scores.areas`."""
    if name in AREAS:
        return getattr(scores.areas, name)
    if name in ("macro_f1", "balanced_accuracy"):
        return getattr(count_classes(scores, num_classes), name)
    return getattr(scores, name)


def keeps_probabilities(score: str, samples: int, num_classes: int, batch_size: int, ranks: int) -> bool:
    """Return whether a score requires all probabilities of an evaluation, and whether these are few enough to keep."""
    return score in AREAS and _probability_bytes(samples, num_classes, batch_size, ranks) <= MOST_PROBABILITY_BYTES


def check_best_by(score: str, data: DatasetPair, batch_size: int, ranks: int) -> bool:
    """Return whether a run's evaluations keep all probabilities.

    Raises:
        UserError: if there are too many probabilities to keep, or if the score is undefined or constant on the
            validation images.
    """
    has_both = any(0 < count < len(data.val) for count in data.val_counts)  # images with and without a class
    if not has_both and score != "loss" and (score in AREAS or data.sets is not None):
        raise UserError(
            f"--best-by {score} needs images with and without each class, but each class has all "
            f"{len(data.val)} validation images or none: use --best-by "
            f"{'top1' if data.sets is None else 'loss'}, or other validation images."
        )
    samples, num_classes = max(map(len, (data.val, data.test or ()))), len(data.class_names)
    if data.sets is not None:
        score, ranks = "map", 1  # all probabilities are finally gathered on every rank
    keeps = keeps_probabilities(score, samples, num_classes, batch_size, ranks)
    if score in AREAS and not keeps:
        cure = "validate on fewer" if data.sets else "use more ranks, or --best-by macro_f1 or balanced_accuracy"
        needed = _probability_bytes(samples, num_classes, batch_size, ranks)
        raise UserError(
            f"--best-by {score} keeps the probability of every class for every image: {samples} images x "
            f"{num_classes} classes take {format_bytes(needed)} on each of {plural(ranks, 'rank')}, more than "
            f"{format_bytes(MOST_PROBABILITY_BYTES)}: {cure}."
        )
    return keeps


def _probability_bytes(samples: int, num_classes: int, batch_size: int, ranks: int) -> int:
    return 4 * num_classes * batch_size * EvaluationPlan(samples, batch_size, ranks).batches_per_rank
