"""Calibrates a trained model's probabilities, and finds the one below which an image is of none of its classes.

Temperature scaling: the logits are divided by one number that gives validation images the smallest loss (Guo et al.
2017, arXiv:1706.04599, section 4.2). It changes no prediction, only how sure the model is of it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.optimize import brentq

from delivery.calibration import (
    HIGHEST_TEMPERATURE,
    LOWEST_TEMPERATURE,
    Calibration,
    digest_of,
    read_calibration,
    write_calibration,
)
from delivery.intervals import wilson
from delivery.views import Views
from training.base.errors import UserError, shown
from training.base.units import format_bytes
from training.observe.class_scores import MOST_PROBABILITY_BYTES
from training.observe.evaluation import calibration_bins, expected_calibration_error
from training.observe.scores import LOSS_UNIT, SampleRecorder, SampleScores, Scores, sample_losses
from training.world.collectives import agreed, sum_over_ranks
from training.world.world import World

MEASURED = ("temperature", "threshold", "ece_before", "ece", "coverage", "accuracy")
TOLERANCE = 1e-6  # of the logarithm of the temperature


def read_reject(given: str) -> tuple[float, bool]:
    """Return the number of a value of `--reject`, and whether it is a threshold in place of an accuracy.

    Raises:
        UserError: if it is neither.
    """
    found = re.fullmatch(r"(below:)?(0?\.[0-9]{1,9})", given)
    if not found or not float(found[2]):
        raise UserError(
            f"--reject {shown(given)}: expected the accuracy that the other images shall have, such as 0.95, or a "
            "threshold, such as below:0.7; both above 0 and below 1."
        )
    return float(found[2]), bool(found[1])


class CalibratedRecorder:
    """Records the scores of calibrated probabilities; to fit a temperature it keeps the logits.

    Attributes:
        known: the calibration that is used; None to make one.
        weights: the file that it is of.
        digest: of that file.
        reject: what the user asked for.
        views: what is averaged of each image.
    """

    def __init__(self, num_classes: int, weights: Path, reject: str, views: Views, known: Calibration | None) -> None:
        self.weights, self.reject, self.views, self.known = weights, reject, views, known
        self.digest = known.weights_sha256 if known else digest_of(weights)
        self._recorder = SampleRecorder(num_classes)
        self._kept: list[tuple[torch.Tensor, ...]] = []
        self._bytes = 0

    def add(self, logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor) -> None:
        """Add one batch: as `SampleRecorder.add`.

        Raises:
            UserError: if the logits are more than a rank may keep.
        """
        if self.known is not None:
            self._record(self.known.temperature, logits, labels, weights, indices)
            return
        self._kept.append((logits.float(), labels, weights, indices))
        self._bytes += 4 * logits.numel()
        if self._bytes > MOST_PROBABILITY_BYTES:
            limit = format_bytes(MOST_PROBABILITY_BYTES)
            raise UserError(f"--reject keeps the logits of all images, more than {limit} on a rank: give more ranks.")

    def gather(self, world: World) -> tuple[float, Scores]:
        """Return the temperature, fitted if it is not known, and the calibrated scores; a collective."""
        temperature = self.known.temperature if self.known else _fit_temperature(self._kept, world)
        for batch in self._kept:
            self._record(temperature, *batch)
        return temperature, self._recorder.gather(world)

    def _record(self, temperature: float, logits: torch.Tensor, labels: torch.Tensor, *others: torch.Tensor) -> None:
        scaled = logits.float() / temperature
        self._recorder.add(sample_losses(scaled, labels), scaled, labels, *others)


def start_calibration(weights: Path, reject: str, views: Views, num_classes: int) -> CalibratedRecorder | None:
    """Return what records an evaluation for a new calibration, or by the one that there is; None without either."""
    known = None if reject else read_calibration(weights)
    if not reject and (known is None or known.views != views):
        return None
    return CalibratedRecorder(num_classes, weights, reject, views, known)


def finish_calibration(
    recorder: CalibratedRecorder, before: Scores, data: str, split: str, world: World
) -> dict[str, Any]:
    """Write a new calibration, and return what scores.json says of it, see `rejection_scores`; a collective.

    Args:
        recorder: of all images.
        before: the scores of the probabilities as they are.
        data: what the images are.
        split: the part of them.
        world: the ranks.

    Raises:
        UserError: on all ranks, if there are no images, or no threshold gives the accuracy.
    """
    temperature, scores = recorder.gather(world)

    def conclude() -> dict[str, Any]:
        assert scores.details is not None
        assert before.details is not None
        if recorder.known is not None:
            return rejection_scores(scores, temperature, recorder.known.threshold)
        if not scores.samples:
            raise UserError("--reject: the model was trained on all of these images: give others with --data.")
        facts = rejection_scores(scores, temperature, threshold_of(scores.details, recorder.reject))
        facts["ece_before"] = expected_calibration_error(calibration_bins(before.details))
        if world.is_main:
            content = {name: facts[name] for name in MEASURED} | recorder.views._asdict()
            content |= {"weights_sha256": recorder.digest, "reject": recorder.reject}
            content |= {"data": data, "split": split, "samples": scores.samples}
            write_calibration(recorder.weights, Calibration(**content))
        return facts

    return agreed(conclude, world)


def _fit_temperature(batches: list[tuple[torch.Tensor, ...]], world: World) -> float:
    """Return the temperature of the smallest loss, the same on any number of ranks; 1 if no image is wrong.

    The loss is convex in 1 / temperature, so there is one minimum; a network that is worse than chance has the highest.
    """

    def slope(logarithm: float) -> float:
        """Return the derivative of the summed loss by 1 / temperature: expected logit less that of the true class."""
        inverse = math.exp(-logarithm)
        total = torch.zeros(1, dtype=torch.float64, device=world.device)
        for logits, labels, weights, _ in batches:
            exact = logits.double()
            expected = ((exact * inverse).softmax(1) * exact).sum(1)
            gaps = torch.where(weights > 0, expected - exact.gather(1, labels[:, None])[:, 0], 0.0)
            total += ((gaps / LOSS_UNIT).round() * LOSS_UNIT).sum()  # exact in any order
        return float(sum_over_ranks(total, world.data))

    low, high = math.log(LOWEST_TEMPERATURE), math.log(HIGHEST_TEMPERATURE)
    if slope(low) <= 0:
        return 1.0
    return HIGHEST_TEMPERATURE if slope(high) >= 0 else math.exp(brentq(slope, low, high, xtol=TOLERANCE))


def threshold_of(details: SampleScores, reject: str) -> float:
    """Return the threshold that a value of `--reject` gives: the lowest with the accuracy, half-way to what it rejects.

    Raises:
        UserError: if no threshold has that accuracy.
    """
    wanted, is_threshold = read_reject(reject)
    if is_threshold:
        return wanted
    order = np.argsort(-details.confidences.numpy(), kind="stable")
    confidences, is_right = details.confidences.numpy()[order], details.is_right.numpy()[order]
    accuracies = is_right.cumsum() / np.arange(1, len(order) + 1)
    ends = np.append(confidences[:-1] > confidences[1:], True)  # images of one confidence go together
    enough = np.flatnonzero(ends & (accuracies >= wanted))
    if not len(enough):
        best = accuracies[ends].max(initial=0.0)
        raise UserError(f"--reject {reject}: at no threshold are so many right, at most {best:.4f}: give less.")
    last = enough[-1]
    return 0.0 if last + 1 == len(order) else float(confidences[last : last + 2].mean())


def rejection_scores(scores: Scores, temperature: float, threshold: float) -> dict[str, Any]:
    """Return what scores.json says about calibrated probabilities and a threshold: shares in 0..1, the loss in nats.

    Returns:
        temperature, threshold, loss, ece, coverage (the share of the images that are not rejected), kept (how many),
        right (how many of them), and accuracy (their share); None of none.
    """
    assert scores.details is not None
    is_kept = scores.details.confidences >= threshold
    kept, right = int(is_kept.sum()), int(scores.details.is_right[is_kept].sum())
    return {
        "temperature": temperature,
        "threshold": threshold,
        "loss": scores.loss,
        "ece": expected_calibration_error(calibration_bins(scores.details)),
        "coverage": kept / max(scores.samples, 1),
        "kept": kept,
        "right": right,
        "accuracy": right / kept if kept else None,
    }


def describe_rejection(facts: Mapping[str, Any]) -> str:
    """Return a line on what `rejection_scores` returned."""
    before = f", {facts['ece_before']:.4f} without" if "ece_before" in facts else ""
    interval = wilson(facts["right"], facts["kept"])
    accuracy = f"; {facts['accuracy']:.4f} of them right [{interval[0]:.4f}, {interval[1]:.4f}]" if interval else ""
    return (
        f"temperature {facts['temperature']:.4g}  ECE {facts['ece']:.4f}{before}  threshold {facts['threshold']:.4f}: "
        f"{facts['coverage']:.4f} of the images are not rejected{accuracy}"
    )
