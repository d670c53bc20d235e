"""Finds labels that are probably wrong, and outliers, from the images' embeddings or pixels."""

from __future__ import annotations

import warnings
from typing import NamedTuple

import numpy as np
from sklearn.decomposition import PCA
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold
from sklearn.neighbors import KNeighborsClassifier, NearestNeighbors
from sklearn.preprocessing import StandardScaler

FOLDS, NEIGHBOURS, MOST_FEATURES = 5, 10, 96
ITERATIONS = 30  # to estimate how labels are confused
UNSURE = 0.005  # minimum probability that a classifier is wrong
TEMPERATURES = (1.0, 0.8, 0.6)  # the mean of two classifiers trained on partly wrong labels is underconfident
POWERS, LEAST = (0.85, 0.5), 1e-9  # of two predictions whose product is used; see `doubt_labels`
CLEAN_PRIOR = 5.0  # number of correct labels per class assumed in advance
SUSPECTED = 0.5  # probability of being wrong from which a label is suspected
OUTLIER_RANK, OUTLIER_TIMES = 5, 2.5  # times the distance within which 99 % of images have their 5th nearest image


class LabelDoubts(NamedTuple):
    """A classifier's doubts about labels that it was not trained on."""

    probability: np.ndarray  # float64 [N], that the given label is wrong; 0 for an image that was left out
    suggested: np.ndarray  # int64 [N], the most probable other label
    certainty: np.ndarray  # float64 [N], the probability of `suggested`
    accuracy: float  # share of the given labels that the classifier predicts


def doubt_labels(features: np.ndarray, labels: np.ndarray, num_classes: int, learned: np.ndarray) -> LabelDoubts | None:
    """Return the probability that each label is wrong; None unless two or more classes have `FOLDS` images each.

    Images of smaller classes are left out. `features` are float32 [N, F], and `labels` int64 [N]. `learned`, float64
    [N, num_classes], are a network's predictions for its own training images, NaN for others; see `mean_probabilities`.
    """
    used = np.flatnonzero(np.bincount(labels, minlength=num_classes)[labels] >= FOLDS)
    classes = np.unique(labels[used])
    if len(classes) < 2:
        return None
    numbers = np.searchsorted(classes, labels[used])
    out_of_sample = out_of_sample_probabilities(features[used], numbers)
    # A network learns wrong labels later than right ones (Pleiss et al. 2020, https://arxiv.org/abs/2001.10528), and
    # its mistakes differ from those of classifiers that were not trained on the image. Powers of 1 would assume
    # independent errors.
    own = learned[np.ix_(used, classes)]
    both = np.maximum(out_of_sample, LEAST) ** POWERS[0] * np.maximum(own, LEAST) ** POWERS[1]
    judged_by = np.where(np.isnan(own), out_of_sample, both / both.sum(1, keepdims=True))
    wrong, best, certainty = wrong_label_probabilities(judged_by, numbers)
    doubts = LabelDoubts(
        np.zeros(len(labels)),
        labels.copy(),
        np.zeros(len(labels)),
        float((out_of_sample.argmax(1) == numbers).mean()),
    )
    doubts.probability[used], doubts.suggested[used], doubts.certainty[used] = wrong, classes[best], certainty
    return doubts


def _scaled(features: np.ndarray) -> np.ndarray:
    """Return features with mean 0 and standard deviation 1, reduced to at most `MOST_FEATURES` principal components."""
    scaled = StandardScaler().fit_transform(features)
    return PCA(MOST_FEATURES, random_state=0).fit_transform(scaled) if min(scaled.shape) > MOST_FEATURES else scaled


def out_of_sample_probabilities(features: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """Return, for each image, the mean prediction of two classifiers that were not trained on it, float64 [N, K].

    Logistic regression and nearest neighbors are each trained on four fifths of the images. `features` are float32
    [N, F], and `labels` int64 [N], 0 to K - 1, each at least `FOLDS` times.
    """
    features = _scaled(features)
    probabilities = np.zeros((len(labels), int(labels.max()) + 1))
    for seen, unseen in StratifiedKFold(FOLDS, shuffle=True, random_state=0).split(features, labels):
        linear = LogisticRegression(C=0.1, max_iter=100)
        near = KNeighborsClassifier(min(NEIGHBOURS, len(seen)), weights="distance")
        with warnings.catch_warnings(action="ignore", category=ConvergenceWarning):
            for classifier in (linear, near):
                classifier.fit(features[seen], labels[seen])
                probabilities[unseen] += classifier.predict_proba(features[unseen]) / 2
    return probabilities


def wrong_label_probabilities(
    probabilities: np.ndarray, labels: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the probability that each label is wrong, the most probable other label, and its probability, each [N].

    The given label g of an image of the true class k is modeled as drawn from row k of a matrix Q, which is estimated
    together with the true classes by expectation maximization (Dawid & Skene 1979, https://doi.org/10.2307/2346806,
    with one observer): P(k | image, g) is proportional to P(k | image) Q[k, g]. A class whose labels are seldom wrong
    needs more evidence than a class that is often confused. The temperature is the value in `TEMPERATURES` that makes
    the given labels most likely.

    `probabilities` are P(k | image), float64 [N, K], from a classifier that was not trained on the image; `labels` are
    int64 [N].
    """
    count, classes = probabilities.shape
    given = np.eye(classes)[labels]
    prior = CLEAN_PRIOR * np.eye(classes) + 1 / classes
    most_likely, posterior = -np.inf, given
    for temperature in TEMPERATURES:
        sharp = probabilities ** (1 / temperature)
        sharp = (1 - UNSURE) * sharp / sharp.sum(1, keepdims=True) + UNSURE / classes
        found = given
        for _ in range(ITERATIONS):  # expectation maximization; `found` is P(k | image, g)
            rates = found.T @ given + prior
            rates /= rates.sum(1, keepdims=True)
            joint = sharp * rates[:, labels].T
            evidence = joint.sum(1, keepdims=True)
            found = joint / evidence
        likelihood = float(np.log(evidence).sum())
        if likelihood > most_likely:
            most_likely, posterior = likelihood, found
    others = np.where(given > 0, -1.0, posterior)
    return 1 - posterior[np.arange(count), labels], others.argmax(1), others.max(1)


def outliers(features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the positions of images far from all others, and each distance in multiples of the limit, farthest first.

    `features` are float32 [N, F].
    """
    if len(features) <= OUTLIER_RANK + 1:
        return np.empty(0, dtype=np.int64), np.empty(0)
    distances = NearestNeighbors(n_neighbors=OUTLIER_RANK + 1).fit(_scaled(features)).kneighbors()[0][:, -1]
    usual = max(float(np.quantile(distances, 0.99)), 1e-9)
    far = np.flatnonzero(distances > OUTLIER_TIMES * usual)
    order = far[np.argsort(-distances[far])]
    return order, distances[order] / usual / OUTLIER_TIMES
