"""Exact scores: sums over all ranks in training, scores of samples and classes in evaluation; padding has no weight."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from zerovision.models.ensemble import log_mean_probability
from zerovision.training.base.errors import UserError
from zerovision.training.base.units import format_bytes, plural
from zerovision.training.data.batch_transforms import to_device
from zerovision.training.data.datasets import DatasetPair
from zerovision.training.data.sampler import EvaluationPlan
from zerovision.training.tasks.class_counts import ClassCounts
from zerovision.training.world.collectives import copy_from_main, gather_rows, sum_over_ranks
from zerovision.training.world.world import World

if TYPE_CHECKING:
    from zerovision.training.tasks.labels import OneLabel

TOP_K = 5
# Losses are rounded to multiples of this before they are added. float64 sums of such multiples are exact below 2**29,
# so they depend neither on the order nor on the number of ranks. A float32 of at least 0.5 is already such a multiple.
LOSS_UNIT = 2.0**-24
SORTED_AT_ONCE = 2**22  # probabilities
AREAS = ("auroc", "map")  # scores that need the probabilities of all classes for all samples
MOST_PROBABILITY_BYTES = 4 * 2**30  # on one rank


class Areas(NamedTuple):
    """Areas under curves, averaged over the classes that have samples.

    The areas are NaN if no class has samples, or if a probability is not finite.

    Attributes:
        auroc: area under the receiver operating characteristic curve: the share of pairs of a sample in the class and a
            sample outside it in which the former has the higher probability; a tie counts half (Mann and Whitney 1947;
            Hanley and McNeil 1982, https://doi.org/10.1148/radiology.143.1.7063747). Classes that contain all samples
            are left out.
        map: mean average precision: the share of a class among all samples with at least the same probability as one of
            its samples, averaged over the samples of the class.
    """

    auroc: float
    map: float


@dataclass(frozen=True)
class SampleScores:
    """Scores of each sample in an evaluation, on the CPU, in the order of the samples' indices.

    Attributes:
        indices: int64 [N], positions in the data set.
        labels: int64 [N], the true classes.
        predictions: int64 [N], the classes with the highest logit.
        losses: float64 [N], cross-entropies in nats.
        confidences: float64 [N], the probabilities of the predicted classes.
        is_right: bool [N], whether the class with the highest logit is the true class, or one of the true classes.
    """

    indices: torch.Tensor
    labels: torch.Tensor
    predictions: torch.Tensor
    losses: torch.Tensor
    confidences: torch.Tensor
    is_right: torch.Tensor

    def __len__(self) -> int:
        return len(self.indices)

    def confusion(self, num_classes: int) -> torch.Tensor:
        """Count the samples of each true class (row) by predicted class (column): int64 [classes, classes]."""
        cells = self.labels * num_classes + self.predictions
        return torch.bincount(cells, minlength=num_classes**2).view(num_classes, num_classes)


@dataclass(frozen=True)
class Scores:
    """Averages over the samples with nonzero weight, and, if known, the scores of each sample and areas under curves.

    With several labels per image, top-1 and top-5 are the shares of samples for which the class with the highest logit,
    or one of the five classes with the highest logits, is true.

    Attributes:
        counts: counts of each class if classes are predicted by thresholds, otherwise None.
        thresholds: float64 [C], the lowest probability at which each class is predicted; None if only the most probable
            class is predicted.
        task: the value of `--task` if classes are predicted by thresholds.
    """

    loss: float
    top1: float
    top5: float
    samples: int
    details: SampleScores | None = None
    areas: Areas | None = None
    counts: ClassCounts | None = None
    thresholds: np.ndarray | None = None
    task: str = ""


class ScoreSums:
    """Sums of scores over batches, kept on the device and exact in any order; nothing is read back before `reduce`.

    Args:
        num_classes: number of classes, C.
        device: device of the batches.
        sets: float32 [S, C] on the device, the set of classes that each label stands for; None if a label is one class.
    """

    def __init__(self, num_classes: int, device: torch.device, sets: torch.Tensor | None = None) -> None:
        self._sets = sets
        self._sums = torch.zeros(4, dtype=torch.float64, device=device)
        self._top_k = min(TOP_K, num_classes)

    def add(self, losses: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> None:
        """Add one batch.

        Args:
            losses: [B], each sample's loss.
            logits: [B, classes], or [B, classes, members] for an ensemble, whose mean probability is scored.
            labels: [B] int64.
            weights: [B], 1 for samples that are counted, 0 for padding.
        """
        with torch.no_grad():
            if logits.ndim > 2:
                logits = log_mean_probability(logits)
            counted = weights > 0
            hits = hits_of(logits.topk(self._top_k, dim=1).indices, labels, self._sets)
            rounded = (losses.detach().double() / LOSS_UNIT).round() * LOSS_UNIT
            # A padded sample may have an infinite loss, which is masked because 0 * inf is NaN.
            self._sums += torch.stack([rounded, hits[:, 0], hits.any(1), counted]).where(counted, 0.0).sum(1)

    def state(self) -> torch.Tensor:
        """Return a copy of the sums: loss, top-1, top-5, samples; float64 [4]."""
        return self._sums.clone()

    def reset(self) -> None:
        """Set all sums to 0."""
        self._sums.zero_()

    def restore(self, state: torch.Tensor) -> None:
        """Set the sums to an earlier result of `state`."""
        self._sums.copy_(state)

    def keep_if(self, applied: bool | torch.Tensor, state: torch.Tensor) -> None:
        """Restore `state` unless `applied` is true; `applied` may be a bool tensor [], which is not read back."""
        if applied is True:
            return
        self._sums.copy_(state if applied is False else torch.where(applied, self._sums, state))

    def reduce(self, world: World) -> Scores:
        """Return the averages over all ranks' samples, or NaN if there are none; a collective with a device sync."""
        sums = sum_over_ranks(self._sums, world.data)
        copy_from_main([sums], world.replica)  # so that all ranks base their decisions on the same bits
        loss, top1, top5, count = sums.tolist()
        divisor = count or math.nan
        return Scores(loss / divisor, top1 / divisor, top5 / divisor, int(count))


class SampleRecorder:
    """Keeps the scores of each sample of an evaluation on the device; nothing is read back before `gather`.

    With `keeps_probabilities`, it keeps the probabilities of all classes, 4 bytes each, for the areas under curves.
    """

    def __init__(self, task: OneLabel, *, keeps_probabilities: bool) -> None:
        self._task, self._top_k = task, min(TOP_K, task.num_classes)
        self._batches: list[torch.Tensor] = []
        self._probabilities: list[torch.Tensor] | None = [] if keeps_probabilities else None

    def add(self, logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor) -> None:
        """Add one batch as in `ScoreSums.add`; `indices` are the samples' positions in the data set, int64 [B]."""
        best = logits.topk(self._top_k, dim=1).indices
        hits, probabilities = self._task.hits(best, labels), self._task.probabilities(logits)
        confidences = probabilities.gather(1, best[:, :1])[:, 0]
        own = (labels, best[:, 0], hits.any(dim=1), self._task.sample_losses(logits, labels), confidences, hits[:, 0])
        columns = (weights, to_device(indices, logits.device), *own)
        # float64 represents every position below 2**53 exactly.
        self._batches.append(torch.stack([column.double() for column in columns], dim=1))
        if self._probabilities is not None:
            self._probabilities.append(probabilities)

    def gather(self, world: World) -> Scores:
        """Return the averages and every sample's scores, the same on every rank; a collective with a sync.

        The samples are summed in the order of their indices, so that the sums do not depend on the number of ranks.
        """
        rows = rows_of_all(self._batches, world)
        order = rows[:, 1].argsort()
        order = order[rows[order, 0] > 0]
        _, *columns = (one.contiguous() for one in rows[order].T)
        indices, labels, predictions, in_top5, losses, confidences, is_right = columns
        details = SampleScores(indices.long(), labels.long(), predictions.long(), losses, confidences, is_right.bool())
        loss, top1, top5 = (float(column.sum()) / max(len(details), 1) for column in (losses, is_right, in_top5))
        scores = Scores(loss, top1, top5, len(details), details)
        kept = self._probabilities
        return self._task.with_probabilities(scores, kept, order, world) if kept else scores


def rows_of_all(batches: list[torch.Tensor], world: World) -> torch.Tensor:
    """Return the rows [B, n] of all ranks' batches, on the CPU of every rank; a collective."""
    own = torch.cat(batches)
    rows = gather_rows(own.reshape(-1), world.data).view(-1, own.shape[1])
    copy_from_main([rows], world.replica)  # so that all ranks base their decisions on the same bits
    return rows.cpu()


def mean_areas(
    own: Sequence[torch.Tensor], order: torch.Tensor, has: Callable[[int], np.ndarray], world: World
) -> Areas:
    """Return the areas of an evaluation, the same on any number of ranks; a collective.

    `own` contains this rank's batches of probabilities, float32 [B, C]; `order`, int64 [N], the positions of the
    counted samples among the rows of all ranks. `has` returns which samples belong to a class, bool [N].
    """
    found, at_once = [], max(SORTED_AT_ONCE // max(len(order), 1), 1)
    for first in range(0, own[0].shape[1], at_once):  # a rank has memory for the probabilities of only some classes
        block = rows_of_all([batch[:, first : first + at_once] for batch in own], world)[order].numpy()
        if not np.isfinite(block).all():
            return Areas(math.nan, math.nan)
        found += [_areas_of(column, has(first + number)) for number, column in enumerate(block.T)]
    columns = ([area for area in column if area is not None] for column in zip(*found, strict=True))
    return Areas(*(math.fsum(column) / len(column) if column else math.nan for column in columns))


def _areas_of(probabilities: np.ndarray, is_own: np.ndarray) -> tuple[float | None, float | None]:
    """Return a class's AUROC and average precision, each None if undefined; arguments are float32 [N] and bool [N]."""
    own, others = np.sort(probabilities[is_own]), np.sort(probabilities[~is_own])
    if not len(own):
        return None, None
    lower, not_higher = (np.searchsorted(others, own, side) for side in ("left", "right"))
    own_at_least = len(own) - np.searchsorted(own, own, "left")
    precision = math.fsum(own_at_least / (own_at_least + len(others) - lower)) / len(own)
    # In the sum, each pair that is in order counts 2, each tie 1.
    return int((lower + not_higher).sum()) / (2 * len(own) * len(others)) if len(others) else None, precision


def hits_of(best: torch.Tensor, labels: torch.Tensor, sets: torch.Tensor | None) -> torch.Tensor:
    """Return which of the top classes, int64 [B, k], are true for the sample, bool [B, k]; `sets` as in `ScoreSums`."""
    return best == labels[:, None] if sets is None else sets[labels].gather(1, best) > 0


def sample_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return each sample's cross-entropy, float32 [B], whatever the training loss is."""
    return F.cross_entropy(logits.float(), labels, reduction="none")


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
    """Return whether a run's evaluations keep all probabilities, or raise a UserError if the score cannot be used."""
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
    needed = _probability_bytes(samples, num_classes, batch_size, ranks)
    if score in AREAS and needed > MOST_PROBABILITY_BYTES:
        cure = "validate on fewer" if data.sets else "use more ranks, or --best-by macro_f1 or balanced_accuracy"
        raise UserError(
            f"--best-by {score} keeps the probability of every class for every image: {samples} images x "
            f"{num_classes} classes take {format_bytes(needed)} on each of {plural(ranks, 'rank')}, more than "
            f"{format_bytes(MOST_PROBABILITY_BYTES)}: {cure}."
        )
    return score in AREAS


def _probability_bytes(samples: int, num_classes: int, batch_size: int, ranks: int) -> int:
    return 4 * num_classes * batch_size * EvaluationPlan(samples, batch_size, ranks).batches_per_rank
