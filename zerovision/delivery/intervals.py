"""Computes 95 % confidence intervals of an evaluation's scores from the counts in scores.json."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from statistics import NormalDist
from typing import Any

import numpy as np

from zerovision.training.tasks.class_counts import ClassCounts

CONFIDENCE = 0.95
REACH = NormalDist().inv_cdf((1 + CONFIDENCE) / 2)  # in standard errors
TINY, HALVINGS = 1e-12, 50
OF_CLASSES = ("macro_f1", "balanced_accuracy")

Interval = tuple[float, float]


def interval_of(scores: Mapping[str, Any], name: str) -> Interval | None:
    """Return the confidence interval of a score, or None.

    The result is Wilson's interval for a share of images, Wilson's interval with an effective number of images for a
    mean over classes, and a normal interval for the loss.

    Args:
        scores: the contents of scores.json.
        name: name of the score, one of `zerovision.training.base.points.SCORE_NAMES`.
    """
    samples = scores["samples"]
    if name in ("top1", "top5"):
        return wilson(round(scores[name] * samples), samples)
    if name in OF_CLASSES and samples and "task" not in scores:  # these scores need a confusion matrix
        return of_classes(scores)[name]
    if name == "loss" and "loss_standard_error" in scores:
        reach = REACH * scores["loss_standard_error"]
        return max(scores["loss"] - reach, 0.0), scores["loss"] + reach
    return None


def wilson(hits: int, samples: int) -> Interval | None:
    """Return the confidence interval of a share of images; None if there are no images.

    This is Wilson's score interval, as recommended by Brown, Cai and DasGupta 2001
    (https://doi.org/10.1214/ss/1009213286): it is valid for few images and near 100 %, unlike the normal interval.
    """
    return _wilson(hits, samples - hits) if samples else None


def _wilson(hits: float, misses: float) -> Interval:
    samples = hits + misses
    radius = REACH * math.sqrt(REACH**2 + 4 * hits * misses / samples)
    # The upper end is computed from the misses, so that both ends are equally exact.
    low, above = (max((2 * one + REACH**2 - radius) / (2 * (samples + REACH**2)), 0.0) for one in (hits, misses))
    return low, 1 - above


def of_difference(alone: int, other_alone: int, images: int) -> Interval:
    """Return the confidence interval of the difference between two shares of the same images, first minus second.

    `alone` is the number of images that only the first share counts, and `other_alone` that of the second; `images` is
    at least 1. Tango's score interval (1998,
    https://doi.org/10.1002/(SICI)1097-0258(19980430)17:8<891::AID-SIM780>3.0.CO;2-B) is valid for few images, even if
    the two shares are equal.
    """

    def score(difference: float) -> float:
        """Return the number of standard errors between the observed difference and `difference`."""
        half = (2 * images - alone + other_alone) * difference - alone - other_alone
        root = math.sqrt(max(half**2 + 8 * images * other_alone * difference * (1 - difference), 0.0))
        variance = images * ((root - half) / (2 * images) + difference * (1 - difference))
        return (alone - other_alone - images * difference) / math.sqrt(max(variance, TINY))

    found = (alone - other_alone) / images
    return _root(lambda at: score(at) - REACH, -1.0, found), _root(lambda at: score(at) + REACH, found, 1.0)


def _root(falling: Callable[[float], float], low: float, high: float) -> float:
    """Return the zero of a decreasing function, by bisection."""
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if falling(middle) > 0 else (low, middle)
    return middle


def of_classes(scores: Mapping[str, Any]) -> dict[str, Interval]:
    """Return the confidence intervals of the scores in `OF_CLASSES`, for means over many images of the same kind.

    As for shares in surveys (Franco et al. 2019, https://pmc.ncbi.nlm.nih.gov/articles/PMC6690503), each interval is
    Wilson's for the effective number of images: the number at which a share has the same variance as the mean. The
    variance comes from the delta method (Takahashi et al. 2022, https://doi.org/10.1007/s10489-021-02635-5) with two
    additional images in each class, one right and one wrong, because a class without mistakes would otherwise have no
    variance. Because F1 is a ratio, it is too low on average for few images; the interval is for the F1 of many images.
    """
    true, predicted, images = np.array(scores["confusion"], dtype=np.int64).T
    classes, wrong = len(scores["classes"]), true != predicted
    support, said, right = (
        np.bincount(of, weights, classes)
        for of, weights in ((true, images), (predicted, images), (true, images * ~wrong))
    )
    plain = ClassCounts(right, support, said)
    # Each class is scaled back to its number of images; its additional wrong image is divided among the other classes.
    scale, others = support / (support + 2), max(int(plain.occurs.sum()) - 1, 1)
    cells = (images * scale[true])[wrong]
    hits = scale * (right + 1)
    come = np.bincount(predicted[wrong], cells, classes) + (scale.sum() - scale) / others
    smooth = ClassCounts(hits, support, hits + come)
    union = support + smooth.predicted  # counts correctly classified images twice
    per_image = np.divide(1.0, union, out=np.zeros(classes), where=union > 0)
    loss = smooth.f1 * per_image  # amount by which a wrong image lowers the F1 of its own and of the predicted class
    own = hits * (2 * per_image - 2 * loss) ** 2 + (union - 2 * hits) * loss**2
    both = (cells * loss[true[wrong]] * loss[predicted[wrong]]).sum()
    both += (scale * loss * (loss.sum() - loss)).sum() / others
    occurs, has_images = plain.occurs, support > 0
    recall = smooth.recall[has_images]
    of_f1 = smooth.f1[occurs], own[occurs], support[occurs]
    of_recall = recall, recall * (1 - recall) / support[has_images], support[has_images]
    unbiased = float((plain.f1 + _bias(plain))[occurs].mean())
    return {
        "macro_f1": _of_mean(plain.macro_f1, unbiased, *of_f1, shared=2 * both),
        "balanced_accuracy": _of_mean(plain.balanced_accuracy, plain.balanced_accuracy, *of_recall),
    }


def _bias(counts: ClassCounts) -> np.ndarray:
    """Return how much each class's F1 is underestimated on average, to second order in the delta method.

    F1 is 2 J / (1 + J), where J is the share of images with label and prediction in a class among those with either.
    """
    either = counts.support + counts.predicted - counts.right
    variance = counts.right * (either - counts.right) / np.maximum(either**2 * (either - 1), 1)
    return 2 * variance / (1 + counts.right / np.maximum(either, 1)) ** 3


def _of_mean(
    mean: float, center: float, values: np.ndarray, variances: np.ndarray, images: np.ndarray, shared: float = 0.0
) -> Interval:
    """Return the confidence interval of a mean over k classes, extended to contain the mean itself.

    With few images, the estimate of the variance is poor, so Student's t-distribution replaces the normal distribution,
    with the degrees of freedom of Satterthwaite 1946 (https://doi.org/10.2307/3002019). `center` is the mean corrected
    for bias, `shared` is the sum of the covariances, and the arrays, [k], have a value for each class.
    """
    from scipy.special import stdtrit  # imported late, because most programs that import this module do not need it

    freedom = variances.sum() ** 2 / (variances**2 / np.maximum(images - 1, 1)).sum()
    variance = (variances.sum() + shared) / len(values) ** 2
    effective = values.mean() * (1 - values.mean()) / variance * (REACH / stdtrit(freedom, (1 + CONFIDENCE) / 2)) ** 2
    share = min(center, 1.0)
    low, high = _wilson(share * effective, (1 - share) * effective)
    return float(min(low, mean)), float(max(high, mean))
