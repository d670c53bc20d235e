"""Exact scores: sums over all ranks in training, sample by sample in evaluation; padding has no weight."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from zerovision.models.ensemble import log_mean_probability
from zerovision.training.data.transfer import to_device
from zerovision.training.tasks.class_counts import ClassCounts
from zerovision.training.world.collectives import copy_from_main, gather_rows, sum_over_ranks
from zerovision.training.world.world import World

if TYPE_CHECKING:
    from zerovision.training.tasks.labels import OneLabel

TOP_K = 5
# Losses are rounded to multiples of this before they are added: float64 sums of such numbers are exact below 2**29, and
# so do not depend on their order, nor on the number of ranks. A float32 from 0.5 on is such a multiple already.
LOSS_UNIT = 2.0**-24
SORTED_AT_ONCE = 2**22  # probabilities


class Areas(NamedTuple):
    """Means over the classes with samples; NaN if there are none, or for non-finite probabilities.

    Attributes:
        auroc: area under the receiver operating characteristic: among pairs of a sample in the class and one outside,
            the share in which the first has the higher probability, ties counting half (Mann and Whitney 1947; Hanley
            and McNeil 1982, https://doi.org/10.1148/radiology.143.1.7063747); for classes that do not have all samples.
        map: mean average precision: averaged over the samples of a class, the share of that class among all samples
            with at least the same probability.
    """

    auroc: float
    map: float


@dataclass(frozen=True)
class SampleScores:
    """Scores of each sample in an evaluation, on the CPU, in the order of their indices.

    Attributes:
        indices: int64 [N], positions in the data set.
        labels: int64 [N], the true classes.
        predictions: int64 [N], the classes with the highest logit.
        losses: float64 [N], cross entropies in nats.
        confidences: float64 [N], the probabilities of the predicted classes.
        is_right: bool [N], whether the class with the highest logit is the true one, or one of them.
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
    """Averages over the samples with weight, and, if known, each sample's scores and the classes' areas.

    With several labels, top-1 and top-5 are the shares of samples that have the class with the highest logit, or one of
    the five highest.

    Attributes:
        counts: counts of the classes, if they are not those of the most probable classes.
        thresholds: float64 [C], the probability from which a class is predicted; None if only the most probable class
            is.
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
    """Sums over batches on the device, exact in any order; nothing is read back before `reduce`.

    Args:
        num_classes: C.
        device: device of the batches.
        sets: float32 [S, C] on that device, the classes of each label; None if it is one class.
    """

    def __init__(self, num_classes: int, device: torch.device, sets: torch.Tensor | None = None) -> None:
        self._sets = sets
        self._sums = torch.zeros(4, dtype=torch.float64, device=device)
        self._top_k = min(TOP_K, num_classes)

    def add(self, losses: torch.Tensor, logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor) -> None:
        """Add one batch.

        Args:
            losses: [B], each sample's loss.
            logits: [B, classes], or [B, classes, members] of an ensemble, whose mean probability counts.
            labels: [B] int64.
            weights: [B], 1 for samples that count, 0 for padding.
        """
        with torch.no_grad():
            if logits.ndim > 2:
                logits = log_mean_probability(logits)
            counted = weights > 0
            best = logits.topk(self._top_k, dim=1).indices
            hits = hits_of(best, labels, self._sets)
            rounded = (losses.detach().double() / LOSS_UNIT).round() * LOSS_UNIT
            # A padded sample may have an infinite loss: it is masked, since 0 * inf is nan.
            self._sums += torch.stack([rounded, hits[:, 0], hits.any(1), counted]).where(counted, 0.0).sum(1)

    def state(self) -> torch.Tensor:
        """Return a copy of the sums: loss, top-1, top-5, samples; float64 [4]."""
        return self._sums.clone()

    def reset(self) -> None:
        """Set all sums to 0."""
        self._sums.zero_()

    def restore(self, state: torch.Tensor) -> None:
        """Set the sums to the result of `state`."""
        self._sums.copy_(state)

    def keep_if(self, applied: bool | torch.Tensor, state: torch.Tensor) -> None:
        """Restore `state` unless the step was applied (a bool, or a bool tensor [] that is not read back)."""
        if applied is True:
            return
        self._sums.copy_(state if applied is False else torch.where(applied, self._sums, state))

    def reduce(self, world: World) -> Scores:
        """Return the averages over all ranks' samples, NaN if there are none; a collective with a device sync."""
        sums = sum_over_ranks(self._sums, world.data)
        copy_from_main([sums], world.replica)  # all decide by the same bits
        loss, top1, top5, count = sums.tolist()
        divisor = count or math.nan
        return Scores(loss / divisor, top1 / divisor, top5 / divisor, int(count))


class SampleRecorder:
    """Keeps the scores of an evaluation, sample by sample, on the device; nothing is read back before `gather`.

    Args:
        task: the task of the evaluation.
        keeps_probabilities: whether to keep the probabilities of all classes, 4 bytes each, for the areas under curves.
    """

    def __init__(self, task: OneLabel, *, keeps_probabilities: bool) -> None:
        self._task, self._top_k = task, min(TOP_K, task.num_classes)
        self._batches: list[torch.Tensor] = []
        self._probabilities: list[torch.Tensor] | None = [] if keeps_probabilities else None

    def add(self, logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor) -> None:
        """Add one batch like `ScoreSums.add`, with the positions of the samples in the data set, int64 [B]."""
        best = logits.topk(self._top_k, dim=1).indices
        hits, probabilities = self._task.hits(best, labels), self._task.probabilities(logits)
        confidences = probabilities.gather(1, best[:, :1])[:, 0]
        own = (labels, best[:, 0], hits.any(dim=1), self._task.sample_losses(logits, labels), confidences, hits[:, 0])
        columns = (weights, to_device(indices, logits.device), *own)
        # float64 holds every position below 2**53 exactly.
        self._batches.append(torch.stack([column.double() for column in columns], dim=1))
        if self._probabilities is not None:
            self._probabilities.append(probabilities)

    def gather(self, world: World) -> Scores:
        """Return the averages and every sample's scores, the same on every rank; a collective with a sync.

        The samples are summed in the order of their indices, so that the number of ranks changes no digit.
        """
        rows = rows_of_all(self._batches, world)
        order = rows[:, 1].argsort()
        order = order[rows[order, 0] > 0]
        _, *columns = (one.contiguous() for one in rows[order].T)
        indices, labels, predictions, in_top5, losses, confidences, is_right = columns
        numbers = (indices.long(), labels.long(), predictions.long())
        details = SampleScores(*numbers, losses, confidences, is_right.bool())
        divisor = max(len(details), 1)
        loss, top1, top5 = (float(column.sum()) / divisor for column in (losses, is_right, in_top5))
        scores = Scores(loss, top1, top5, len(details), details)
        kept = self._probabilities
        return self._task.with_probabilities(scores, kept, order, world) if kept else scores


def rows_of_all(batches: list[torch.Tensor], world: World) -> torch.Tensor:
    """Return the rows [B, n] of all ranks' batches, on the CPU of every rank; a collective."""
    own = torch.cat(batches)
    rows = gather_rows(own.reshape(-1), world.data).view(-1, own.shape[1])
    copy_from_main([rows], world.replica)  # all decide by the same bits
    return rows.cpu()


def mean_areas(
    own: Sequence[torch.Tensor], order: torch.Tensor, has: Callable[[int], np.ndarray], world: World
) -> Areas:
    """Return the areas of an evaluation, the same on any number of ranks; a collective.

    Args:
        own: this rank's batches of probabilities, float32 [B, C].
        order: int64 [N], positions of the counted samples among the rows of all ranks.
        has: returns which samples belong to a class, bool [N].
        world: the ranks.
    """
    found, at_once = [], max(SORTED_AT_ONCE // max(len(order), 1), 1)
    for first in range(0, own[0].shape[1], at_once):  # every rank has room for some classes of all ranks
        block = rows_of_all([batch[:, first : first + at_once] for batch in own], world)[order].numpy()
        if not np.isfinite(block).all():
            return Areas(math.nan, math.nan)
        found += [_areas_of(column, has(first + number)) for number, column in enumerate(block.T)]
    columns = ([area for area in column if area is not None] for column in zip(*found, strict=True))
    return Areas(*(math.fsum(column) / len(column) if column else math.nan for column in columns))


def _areas_of(probabilities: np.ndarray, is_own: np.ndarray) -> tuple[float | None, float | None]:
    """Return AUROC and average precision of a class, each None if undefined; arguments are float32 and bool [N]."""
    own, others = np.sort(probabilities[is_own]), np.sort(probabilities[~is_own])
    if not len(own):
        return None, None
    lower, not_higher = (np.searchsorted(others, own, side) for side in ("left", "right"))
    in_order = int((lower + not_higher).sum())  # each pair that is in order counts 2, each tie 1
    own_at_least = len(own) - np.searchsorted(own, own, "left")
    precision = math.fsum(own_at_least / (own_at_least + len(others) - lower)) / len(own)
    return in_order / (2 * len(own) * len(others)) if len(others) else None, precision


def hits_of(best: torch.Tensor, labels: torch.Tensor, sets: torch.Tensor | None) -> torch.Tensor:
    """Return which of the top classes, int64 [B, k], are the sample's own: bool [B, k]; for sets see `ScoreSums`."""
    return best == labels[:, None] if sets is None else sets[labels].gather(1, best) > 0


def sample_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return each sample's cross entropy [B] in float32, for any training loss."""
    return F.cross_entropy(logits.float(), labels, reduction="none")
