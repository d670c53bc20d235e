"""Calibrates a trained model's probabilities, and finds the threshold below which an image is rejected.

Temperature scaling divides the logits by the number that minimizes the loss on validation images (Guo et al. 2017,
arXiv:1706.04599, section 4.2). This changes the confidence of predictions, but never the predicted class.
"""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch

from zerovision.delivery.calibration import (
    HIGHEST_TEMPERATURE,
    LOWEST_TEMPERATURE,
    Calibration,
    Views,
    calibration_file,
)
from zerovision.training.base.errors import UserError, shown
from zerovision.training.base.files import errors_of_writing, sha256_of, write_json
from zerovision.training.observe.evaluation import calibration_bins, expected_calibration_error
from zerovision.training.tasks.labels import OneLabel
from zerovision.training.tasks.scores import LOSS_UNIT, MOST_PROBABILITY_BYTES, SampleScores, Scores
from zerovision.training.world.collectives import agreed, sum_over_ranks
from zerovision.training.world.world import World

TOLERANCE = 1e-6  # of the logarithm of the temperature


def read_reject(given: str) -> tuple[float, bool]:
    """Return the number in a value of `--reject`, and whether it is a threshold rather than an accuracy.

    A UserError is raised if it is neither.
    """
    found = re.fullmatch(r"(below:)?(0?\.[0-9]{1,9})", given)
    if not found or not float(found[2]):
        raise UserError(
            f"--reject {shown(given)}: expected the accuracy of the accepted images, such as 0.95, or a "
            "threshold, such as below:0.7; either must be above 0 and below 1."
        )
    return float(found[2]), bool(found[1])


class Calibrator:
    """Collects the logits of an evaluation to fit a new calibration by `reject`, or to apply the `known` one."""

    def __init__(self, weights: Path, reject: str, views: Views, known: Calibration | None) -> None:
        self._weights, self._reject, self._views, self._known = weights, reject, views, known
        self._digest = known.facts["weights_sha256"] if known else sha256_of(weights)
        self._batches: list[tuple[torch.Tensor, ...]] = []

    def add(self, logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor) -> None:
        """Add one batch as in `SampleRecorder.add`, or raise a UserError for more logits than a rank may keep.

        `weights` [2, B] are those for scores of unseen images, then those for scores of training images.
        """
        self._batches.append((logits.float(), labels, weights, indices))
        if 4 * logits.numel() * len(self._batches) > MOST_PROBABILITY_BYTES:
            file = calibration_file(self._weights)
            raise UserError(f"--reject and '{file}' keep all images' logits, which are too many here: use more ranks.")

    def finish(self, before: Scores, about: dict[str, Any], world: World, *, are_seen: bool) -> dict[str, Any]:
        """Write the calibration if it is new, and return its `rejection_scores`; a collective operation.

        `before` are the scores of the uncalibrated probabilities, and `about` has the `data` and its `split`. A
        UserError is raised on all ranks if a new calibration would be fitted to training images (`are_seen`), or if no
        threshold reaches the requested accuracy.
        """
        known, recorder = self._known, OneLabel(self._batches[0][0].shape[1]).recorder()
        batches = [(*outputs, weights[int(are_seen)], indices) for *outputs, weights, indices in self._batches]
        temperature = known.temperature if known else _fit_temperature(batches, world)
        for logits, labels, *others in batches:
            recorder.add(logits / temperature, labels, *others)
        scores = recorder.gather(world)

        def conclude() -> dict[str, Any]:
            assert scores.details is not None
            assert before.details is not None
            if known is None and are_seen:
                raise UserError("--reject: the model was trained on all of these images: use --data to choose others.")
            threshold = known.threshold if known else threshold_of(scores.details, self._reject)
            facts = {"ece_before": expected_calibration_error(calibration_bins(before.details))}
            facts |= rejection_scores(scores, temperature, threshold)
            if known is None and world.is_main:
                own = {"samples": scores.samples, "weights_sha256": self._digest, "reject": self._reject}
                with errors_of_writing(file := calibration_file(self._weights)):
                    write_json(file, about | self._views._asdict() | own | facts)
            return facts

        return agreed(conclude, world)


def _fit_temperature(batches: list[tuple[torch.Tensor, ...]], world: World) -> float:
    """Return the temperature with the smallest loss; a collective with the same result for any number of ranks.

    The loss is convex in 1 / temperature, so it has one minimum. A network that is worse than chance gets the highest
    temperature.
    """

    def slope(logarithm: float) -> float:
        """Return the derivative of the summed loss with respect to 1 / temperature; a collective operation.

        For each image, this is the expected logit minus the logit of the true class.
        """
        inverse = math.exp(-logarithm)
        total = torch.zeros(1, dtype=torch.float64, device=world.device)
        for logits, labels, weights, _ in batches:
            exact = logits.double()
            expected = ((exact * inverse).softmax(1) * exact).sum(1)
            gaps = torch.where(weights > 0, expected - exact.gather(1, labels[:, None])[:, 0], 0.0)
            total += ((gaps / LOSS_UNIT).round() * LOSS_UNIT).sum()  # so the sum is exact in any order
        return float(sum_over_ranks(total, world.data))

    from scipy.optimize import brentq  # imported late: only a new calibration needs it

    low, high = math.log(LOWEST_TEMPERATURE), math.log(HIGHEST_TEMPERATURE)
    if slope(low) <= 0:  # all images are classified correctly
        return 1.0
    return HIGHEST_TEMPERATURE if slope(high) >= 0 else math.exp(brentq(slope, low, high, xtol=TOLERANCE))


def threshold_of(details: SampleScores, reject: str) -> float:
    """Return `--reject`'s threshold, or the lowest that reaches its accuracy, or raise a UserError if none does."""
    wanted, is_threshold = read_reject(reject)
    if is_threshold:
        return wanted
    order = np.argsort(-details.confidences.numpy(), kind="stable")
    confidences, is_right = details.confidences.numpy()[order], details.is_right.numpy()[order]
    accuracies = is_right.cumsum() / np.arange(1, len(order) + 1)
    ends = np.append(confidences[:-1] > confidences[1:], True)  # images of equal confidence are accepted together
    enough = np.flatnonzero(ends & (accuracies >= wanted))
    if not len(enough):
        best = accuracies[ends].max(initial=0.0)
        raise UserError(f"--reject {reject}: no threshold reaches this accuracy (best: {best:.4f}): use a lower one.")
    last = enough[-1]
    # The threshold is halfway between the confidences of the last accepted and the first rejected image.
    return 0.0 if last + 1 == len(order) else float(confidences[last : last + 2].mean())


def rejection_scores(scores: Scores, temperature: float, threshold: float) -> dict[str, Any]:
    """Return the scores of calibrated probabilities with a threshold, as shares in 0..1, and the loss in nats."""
    assert scores.details is not None
    is_kept = scores.details.confidences >= threshold
    kept, right = int(is_kept.sum()), int(scores.details.is_right[is_kept].sum())
    return {
        "temperature": temperature,
        "threshold": threshold,
        "loss": scores.loss,
        "ece": expected_calibration_error(calibration_bins(scores.details)),
        "coverage": kept / max(scores.samples, 1),  # share of images that are accepted
        "accuracy": right / kept if kept else None,  # of the accepted images
    }
