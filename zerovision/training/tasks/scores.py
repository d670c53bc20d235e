"""Exact scores: of training as sums over all ranks, of evaluation sample by sample; padding has no weight."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F

from zerovision.models.ensemble import log_mean_probability
from zerovision.training.data.transfer import to_device
from zerovision.training.tasks.multilabel import MultilabelScores, best_thresholds, multilabel_losses
from zerovision.training.world.collectives import copy_from_main, gather_rows, sum_over_ranks
from zerovision.training.world.world import World

TOP_K = 5
# Losses are rounded to multiples of this before they are added: float64 sums of such numbers are exact below 2**29, and
# so do not depend on their order, nor on the number of ranks. A float32 from 0.5 on is such a multiple already.
LOSS_UNIT = 2.0**-24
SORTED_AT_ONCE = 2**22  # probabilities


class Areas(NamedTuple):
    """Means over the classes that have samples; NaN of none, or of probabilities that are not finite.

    Attributes:
        auroc: area under the receiver operating characteristic: the share of pairs of a sample of the class and
            another one in which the first has the higher probability, ties counting half (Mann and Whitney 1947;
            Hanley and McNeil 1982, https://doi.org/10.1148/radiology.143.1.7063747); of classes that do not have all
            samples.
        map: mean average precision: of the samples of a class, the mean share of that class among all samples with
            at least the same probability.
    """

    auroc: float
    map: float


@dataclass(frozen=True)
class SampleScores:
    """Scores of each sample of an evaluation: on the CPU, in the order of their indices.

    Attributes:
        indices: int64 [N], positions in the data set.
        labels: int64 [N], the true classes.
        predictions: int64 [N], the classes with the highest logit.
        in_top5: bool [N], whether the true class is among the five highest.
        losses: float64 [N], cross entropies in nats.
        confidences: float64 [N], the probabilities of the predicted classes.
        has_first: bool [N], of several labels, whether the class with the highest logit is among them.
    """

    indices: torch.Tensor
    labels: torch.Tensor
    predictions: torch.Tensor
    in_top5: torch.Tensor
    losses: torch.Tensor
    confidences: torch.Tensor
    has_first: torch.Tensor | None = None

    def __len__(self) -> int:
        return len(self.indices)

    @property
    def is_right(self) -> torch.Tensor:
        """Whether the predicted class is the true one, or one of them: bool [N]."""
        return self.predictions == self.labels if self.has_first is None else self.has_first

    def confusion(self, num_classes: int) -> torch.Tensor:
        """Count the samples of each true class (row) by predicted class (column): int64 [classes, classes]."""
        cells = self.labels * num_classes + self.predictions
        return torch.bincount(cells, minlength=num_classes**2).view(num_classes, num_classes)


@dataclass(frozen=True)
class Scores:
    """Averages over the samples with weight, and each sample's scores and the classes' areas if they are known.

    Of several labels, top-1 and top-5 are the shares of the samples that have the class, or one of those, with the
    highest logits, and `multilabel` has the rest.
    """

    loss: float
    top1: float
    top5: float
    samples: int
    details: SampleScores | None = None
    areas: Areas | None = None
    multilabel: MultilabelScores | None = None


class ScoreSums:
    """Sums over batches on the device, exact in any order; nothing is read back before `reduce`.

    Args:
        num_classes: C.
        device: of the batches.
        label_sets: float32 [S, C] there, the classes of each label; None if it is one.
    """

    def __init__(self, num_classes: int, device: torch.device, label_sets: torch.Tensor | None = None) -> None:
        self._label_sets = label_sets
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
            hits = _hits(best, labels, self._label_sets)
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
        """Set the sums to what `state` returned."""
        self._sums.copy_(state)

    def keep_if(self, applied: bool | torch.Tensor, state: torch.Tensor) -> None:
        """Restore `state` unless the step was applied (a bool, or a bool tensor [] that is not read back)."""
        if applied is True:
            return
        self._sums.copy_(state if applied is False else torch.where(applied, self._sums, state))

    def reduce(self, world: World) -> Scores:
        """Return the averages over all ranks' samples, NaN of none; a collective, and a sync with the device."""
        sums = sum_over_ranks(self._sums, world.data)
        copy_from_main([sums], world.tensor)  # all decide by the same bits
        loss, top1, top5, count = sums.tolist()
        divisor = count or math.nan
        return Scores(loss / divisor, top1 / divisor, top5 / divisor, int(count))


class SampleRecorder:
    """Keeps the scores of an evaluation, sample by sample, on the device; nothing is read back before `gather`.

    Args:
        num_classes: C.
        keeps_probabilities: whether to keep those of all classes, 4 bytes each, for the areas under curves.
        label_sets: as of `ScoreSums`; then all probabilities are kept, and in the end on every rank.
        thresholds: float64 [C], from which on classes are predicted; None for those of the best F1 on these samples.
    """

    def __init__(
        self,
        num_classes: int,
        *,
        keeps_probabilities: bool = False,
        label_sets: torch.Tensor | None = None,
        thresholds: np.ndarray | None = None,
    ) -> None:
        keeps_probabilities |= label_sets is not None
        self._label_sets, self._thresholds = label_sets, thresholds
        self._batches: list[torch.Tensor] = []
        self._probabilities: list[torch.Tensor] | None = [] if keeps_probabilities else None
        self._top_k = min(TOP_K, num_classes)

    def add(
        self,
        losses: torch.Tensor,
        logits: torch.Tensor,
        labels: torch.Tensor,
        weights: torch.Tensor,
        indices: torch.Tensor,
    ) -> None:
        """Add one batch: as `ScoreSums.add`, with the positions of the samples in the data set, int64 [B]."""
        best = logits.topk(self._top_k, dim=1).indices
        hits = _hits(best, labels, self._label_sets)
        if self._label_sets is None:
            probabilities = logits.float().softmax(dim=1)
            true = probabilities.gather(1, labels[:, None])[:, 0]
        else:
            probabilities, true = logits.float().sigmoid(), hits[:, 0]
        confidences = probabilities.gather(1, best[:, :1])[:, 0]
        own = (labels, best[:, 0], hits.any(dim=1), losses, confidences, true)
        columns = (weights, to_device(indices, logits.device), *own)
        # float64 holds every position below 2**53 exactly.
        self._batches.append(torch.stack([column.double() for column in columns], dim=1))
        if self._probabilities is not None:
            self._probabilities.append(probabilities.masked_fill(weights[:, None] == 0, -1.0))  # below all others

    def gather(self, world: World) -> Scores:
        """Return the averages and every sample's scores, the same on every rank; a collective, and a sync.

        The samples are summed in the order of their indices, so that the number of ranks changes no digit.
        """
        rows = rows_of_all(self._batches, world)
        order = rows[:, 1].argsort()
        order = order[rows[order, 0] > 0]
        rows = rows[order]
        _, indices, labels, predictions, in_top5, losses, confidences, true = (one.contiguous() for one in rows.T)
        details = SampleScores(indices.long(), labels.long(), predictions.long(), in_top5.bool(), losses, confidences)
        divisor = max(len(details), 1)
        top1, top5 = (int(hits.sum()) / divisor for hits in (details.is_right, details.in_top5))
        kept = self._probabilities
        if self._label_sets is not None and kept is not None:
            probabilities = rows_of_all(kept, world)[order].numpy()
            several = self._multilabel(probabilities, details.labels)
            loss, is_right = float(losses.sum()) / divisor, true > 0
            details, areas = replace(details, has_first=is_right), mean_areas(kept, order, several.has, world)
            return Scores(loss, int(is_right.sum()) / divisor, top5, len(details), details, areas, several)
        areas = mean_areas(kept, order, details.labels.numpy().__eq__, world) if kept else None
        return Scores(float(losses.sum()) / divisor, top1, top5, len(details), details, areas)

    def _multilabel(self, probabilities: np.ndarray, labels: torch.Tensor) -> MultilabelScores:
        assert self._label_sets is not None
        targets = self._label_sets.cpu()[labels].numpy() > 0
        chosen = self._thresholds
        return MultilabelScores(
            targets, probabilities, best_thresholds(targets, probabilities) if chosen is None else chosen
        )


def rows_of_all(batches: list[torch.Tensor], world: World) -> torch.Tensor:
    """Return the rows [B, n] of all ranks' batches, on the CPU of every rank; a collective."""
    own = torch.cat(batches)
    rows = gather_rows(own.reshape(-1), world.data).view(-1, own.shape[1])
    copy_from_main([rows], world.tensor)  # all decide by the same bits
    return rows.cpu()


def mean_areas(
    own: Sequence[torch.Tensor], order: torch.Tensor, has: Callable[[int], np.ndarray], world: World
) -> Areas:
    """Return the areas of an evaluation, the same on any number of ranks; a collective.

    Args:
        own: this rank's batches of probabilities, float32 [B, C].
        order: int64 [N], of the samples that count among the rows of all ranks.
        has: from a class to whether each of them is of it, bool [N].
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
    """Return AUROC and average precision of a class, each None if it is not defined; float32 and bool [N]."""
    own, others = np.sort(probabilities[is_own]), np.sort(probabilities[~is_own])
    if not len(own):
        return None, None
    lower, not_higher = (np.searchsorted(others, own, side) for side in ("left", "right"))
    in_order = int((lower + not_higher).sum())  # each pair that is in order counts 2, each tie 1
    own_at_least = len(own) - np.searchsorted(own, own, "left")
    precision = math.fsum(own_at_least / (own_at_least + len(others) - lower)) / len(own)
    return in_order / (2 * len(own) * len(others)) if len(others) else None, precision


def _hits(best: torch.Tensor, labels: torch.Tensor, label_sets: torch.Tensor | None) -> torch.Tensor:
    """Return which of the best classes, int64 [B, k], are a sample's own: bool [B, k]."""
    return best == labels[:, None] if label_sets is None else label_sets[labels].gather(1, best) > 0


def sample_losses(logits: torch.Tensor, labels: torch.Tensor, label_sets: torch.Tensor | None = None) -> torch.Tensor:
    """Return each sample's cross entropy [B] in float32, whatever the training loss is; of sets the binary one."""
    if label_sets is not None:
        return multilabel_losses(logits, label_sets[labels])
    return F.cross_entropy(logits.float(), labels, reduction="none")
