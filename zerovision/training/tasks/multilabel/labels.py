"""Several labels per image: each class is predicted separately, with its own threshold."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F

from zerovision.training.base.errors import UserError
from zerovision.training.data.datasets import DatasetPair
from zerovision.training.data.reader import Batch
from zerovision.training.data.settings import MULTILABEL
from zerovision.training.tasks.class_counts import ClassCounts
from zerovision.training.tasks.labels import Loss, OneLabel, Weighted
from zerovision.training.tasks.scores import Scores, mean_areas, rows_of_all
from zerovision.training.tasks.settings import TaskSettings
from zerovision.training.world.world import World


def several_loss(config: TaskSettings, _: torch.Tensor | None) -> Loss:
    """Build the binary cross-entropy averaged over the classes, with targets smoothed toward 0.5, as in Keras."""
    smoothing = config.label_smoothing

    def loss(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        targets = torch.zeros_like(logits) if batch.targets is None else batch.targets  # None if images were lost
        return multilabel_losses(logits, targets * (1 - smoothing) + smoothing / 2)

    return loss


def multilabel_losses(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return each image's binary cross-entropy averaged over the classes, [B]; both arguments are float32 [B, K]."""
    return F.binary_cross_entropy_with_logits(logits.float(), targets.float(), reduction="none").mean(1)


class SeveralLabels(OneLabel):
    """The task in which each image has any number of classes; for its arguments, see `OneLabel`.

    Without `thresholds`, an evaluation uses those with the best F1; `sets` are needed only to evaluate images.
    """

    name = MULTILABEL
    output = "sigmoid of each class"
    sets: torch.Tensor

    def __init__(self, classes: int, thresholds: np.ndarray | None = None, sets: torch.Tensor | None = None) -> None:
        super().__init__(classes, thresholds, torch.empty(0, classes) if sets is None else sets)

    def of_data(self, data: DatasetPair, numbers: torch.Tensor) -> tuple[OneLabel, torch.Tensor]:
        """See `OneLabel`; labels stay the same, but the sets that they stand for use the model's class indices."""
        assert data.sets is not None
        targets = data.sets.targets
        sets = torch.zeros(len(targets), self.num_classes).index_copy_(1, numbers, targets)
        return SeveralLabels(self.num_classes, self.thresholds, sets), torch.arange(len(targets))

    def to(self, device: torch.device) -> OneLabel:
        """See `OneLabel`."""
        return SeveralLabels(self.num_classes, self.thresholds, self.sets.to(device))

    def check_use(self, flags: str, why: str) -> None:
        """See `OneLabel`."""
        raise UserError(f"{flags} for one label: {why}.")

    def sample_losses(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """See `OneLabel`."""
        return multilabel_losses(logits, self.sets[labels])

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """See `OneLabel`."""
        return logits.float().sigmoid()

    def mean_probabilities(self, weighted: Weighted, temperature: float | None) -> torch.Tensor:
        """See `OneLabel`; there is only one view, the plain image, because the thresholds apply to plain images."""
        ((_, logits),) = weighted
        return self.probabilities(logits)

    def chosen(self, probabilities: np.ndarray) -> list[int] | None:
        """See `OneLabel`."""
        return np.flatnonzero(probabilities >= self.thresholds).tolist()

    def with_probabilities(self, scores: Scores, own: list[torch.Tensor], order: torch.Tensor, world: World) -> Scores:
        """See `OneLabel`."""
        assert scores.details is not None
        targets = self.sets.cpu()[scores.details.labels].numpy() > 0
        probabilities = rows_of_all(own, world)[order].numpy()
        thresholds = best_thresholds(targets, probabilities) if self.thresholds is None else self.thresholds
        predicted = probabilities >= thresholds
        counts = ClassCounts(*(column.sum(0) for column in (predicted & targets, targets, predicted)))
        areas = mean_areas(own, order, lambda number: targets[:, number], world)
        return replace(scores, areas=areas, counts=counts, thresholds=thresholds, task=self.name)


def best_thresholds(targets: np.ndarray, probabilities: np.ndarray) -> np.ndarray:
    """Return the threshold with the highest F1 of each class, float64 [K].

    A threshold is halfway between the lowest accepted probability and the next lower one. In a tie, the highest
    threshold is returned; for a class without samples, the result is 0.5. The targets are bool [N, K], and the
    probabilities float32 [N, K].
    """
    found = np.full(targets.shape[1], 0.5)
    for number, (own, values) in enumerate(zip(targets.T, probabilities.T.astype(np.float64), strict=True)):
        order = np.argsort(-values, kind="stable")
        ordered = np.append(values[order], 0.0)
        f1 = 2 * own[order].cumsum() / (np.arange(1, len(order) + 1) + own.sum())
        f1[ordered[:-1] == ordered[1:]] = -1  # samples with the same probability cannot be separated
        if own.any():
            best = int(f1.argmax())
            found[number] = ordered[best : best + 2].mean()
    return found
