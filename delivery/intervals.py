"""How sure the scores of an evaluation are: intervals of 95 % from the counts in scores.json, seeded and cheap."""

from __future__ import annotations

import math
from collections.abc import Mapping
from statistics import NormalDist
from typing import Any

import numpy as np

from training.observe.class_counts import ClassCounts

CONFIDENCE = 0.95
RESAMPLES = 1000
OF_CLASSES = ("macro_f1", "balanced_accuracy")

Interval = tuple[float, float]


def interval_of(scores: Mapping[str, Any], name: str) -> Interval | None:
    """Return the interval of one of `training.base.points.SCORE_NAMES`, None of one that has none.

    Shares of images have Wilson's, scores of classes the bootstrap's, and the loss that of the normal distribution.

    Args:
        scores: the content of scores.json.
        name: of the score.
    """
    samples = scores["samples"]
    if name in ("top1", "top5"):
        return wilson(round(scores[name] * samples), samples)
    if name in OF_CLASSES and "task" not in scores:  # whose images are cells of the confusion matrix
        return bootstrap(scores)[name]
    if name == "loss" and "loss_standard_error" in scores:
        reach = NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * scores["loss_standard_error"]
        return max(scores["loss"] - reach, 0.0), scores["loss"] + reach
    return None


def wilson(hits: int, samples: int) -> Interval | None:
    """Return the interval of a share, None of no samples.

    Wilson's score interval, as Brown, Cai and DasGupta 2001 (https://doi.org/10.1214/ss/1009213286) recommend: it holds
    for few images and near 100 %, where that of the normal distribution does not.
    """
    if not samples:
        return None
    return _lowest(hits, samples), 1 - _lowest(samples - hits, samples)


def _lowest(hits: int, samples: int) -> float:
    reach = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)
    radius = reach * math.sqrt(reach**2 + 4 * hits * (1 - hits / samples))
    return max((2 * hits + reach**2 - radius) / (2 * (samples + reach**2)), 0.0)


def bootstrap(scores: Mapping[str, Any]) -> dict[str, Interval | None]:
    """Return the intervals of `OF_CLASSES`: percentiles over evaluations of as many images, drawn with replacement.

    Efron and Tibshirani 1993, An Introduction to the Bootstrap, section 13.3. To draw images is to draw cells of the
    confusion matrix, by their counts; the seed is fixed.
    """
    if not scores["samples"]:
        return dict.fromkeys(OF_CLASSES)
    true, predicted, counts = np.array(scores["confusion"], dtype=np.int64).T
    classes, samples, is_right = len(scores["classes"]), int(counts.sum()), true == predicted
    generator, found = np.random.default_rng(0), []
    for _ in range(RESAMPLES):
        drawn = generator.multinomial(samples, counts / samples)
        sums = [
            np.bincount(numbers, weights, classes)
            for numbers, weights in ((true, drawn * is_right), (true, drawn), (predicted, drawn))
        ]
        one = ClassCounts(*sums)
        found.append((one.f1.mean(), one.balanced_accuracy))
    ends = np.quantile(found, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2], axis=0)
    return {name: (float(low), float(high)) for name, (low, high) in zip(OF_CLASSES, ends.T, strict=True)}
