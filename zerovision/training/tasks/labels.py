"""One label per image: probabilities, scores, and each sample's training loss for hard or soft targets."""

from __future__ import annotations

import math
import pkgutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from zerovision.models.ensemble import mean_over_members
from zerovision.training.base.errors import UserError
from zerovision.training.data.datasets import DatasetPair
from zerovision.training.data.reader import Batch
from zerovision.training.data.settings import TaskName
from zerovision.training.engines.engine import Loss
from zerovision.training.tasks.class_weights import class_weights
from zerovision.training.tasks.scores import SampleRecorder, Scores, hits_of, mean_areas, sample_losses
from zerovision.training.tasks.settings import LOSSES, TASKS, TaskSettings
from zerovision.training.world.world import World

Weighted = Iterable[tuple[float, torch.Tensor]]
"""The weight and logits [B, C] of each view of images."""

THRESHOLDS = "thresholds"  # key of `OneLabel.thresholds` in the metadata of weights


class OneLabel:
    """The task in which each image has one class; other tasks are subclasses.

    Args:
        classes: number of classes, C.
        thresholds: float64 [C], the lowest probability at which each class is predicted; None if only the most probable
            class is predicted.
        sets: float32 [S, C], the set of classes that each label stands for; None if a label is one class.

    Attributes:
        name: value of `--task`.
        output: description of how logits are converted to probabilities.
    """

    name: TaskName = "multiclass"
    output = "softmax over the classes"

    def __init__(self, classes: int, thresholds: np.ndarray | None = None, sets: torch.Tensor | None = None) -> None:
        self.num_classes, self.thresholds, self.sets = classes, thresholds, sets

    def of_data(self, data: DatasetPair, numbers: torch.Tensor) -> tuple[OneLabel, torch.Tensor]:
        """Return the task for evaluating data, and a map from the labels of the data to those of the model, int64.

        Args:
            data: the data to evaluate.
            numbers: int64, the model's class index for each class of the data.
        """
        return self, numbers

    def to(self, device: torch.device) -> OneLabel:
        """Return the task for batches on a device."""
        return self

    def check_use(self, flags: str, why: str) -> None:
        """Raise a UserError if flags do not apply to this task."""

    def hits(self, best: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return which of the top classes, int64 [B, k], are true for the sample, bool [B, k]."""
        return hits_of(best, labels, self.sets)

    def sample_losses(self, logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the loss of each sample of an evaluation, float32 [B]."""
        return sample_losses(logits, labels)

    def probabilities(self, logits: torch.Tensor) -> torch.Tensor:
        """Return float32 probabilities for logits [B, C]."""
        return logits.float().softmax(1)

    def mean_probabilities(self, weighted: Weighted, temperature: float | None) -> torch.Tensor:
        """Return the mean probabilities of images, float32 [B, C], from the weight and logits [B, C] of each view."""
        logarithms = mean_log_probabilities(weighted)
        if temperature is not None:
            logarithms = (logarithms / temperature).log_softmax(1)
        return logarithms.exp()

    def chosen(self, probabilities: np.ndarray) -> list[int] | None:
        """Return the classes predicted from an image's probabilities [C], or None to predict only the most probable."""
        return None

    def recorder(self, *, keeps_probabilities: bool = False) -> SampleRecorder:
        """Return a recorder for the scores of an evaluation; with `sets`, it always keeps all probabilities."""
        return SampleRecorder(self, keeps_probabilities=keeps_probabilities or self.sets is not None)

    def with_probabilities(self, scores: Scores, own: list[torch.Tensor], order: torch.Tensor, world: World) -> Scores:
        """Return `scores` plus those that need all probabilities (`own`, `order`: see `mean_areas`); a collective."""
        assert scores.details is not None
        return replace(scores, areas=mean_areas(own, order, scores.details.labels.numpy().__eq__, world))


def task_of(metadata: Mapping[str, Any]) -> OneLabel:
    """Return the task for which weights were trained.

    Args:
        metadata: the result of `zerovision.training.checkpoint.weights.read_metadata`.
    """
    thresholds = metadata["extra"].get(THRESHOLDS)
    path = next(task.labels for task in TASKS if task.has_thresholds == (thresholds is not None))
    kind: type[OneLabel] = pkgutil.resolve_name(path)
    return kind(len(metadata["class_names"]), None if thresholds is None else np.array(thresholds, dtype=np.float64))


def mean_log_probabilities(weighted: Weighted) -> torch.Tensor:
    """Return the logarithm of the weighted mean of probabilities, float32 [B, C], from weights and logits [B, C]."""
    return torch.stack([logits.float().log_softmax(1) + math.log(weight) for weight, logits in weighted]).logsumexp(0)


def build_loss(
    config: TaskSettings,
    class_names: Sequence[str],
    counts: Sequence[int],
    device: torch.device,
    *,
    build: Callable[[TaskSettings, torch.Tensor | None], Loss] | None = None,
    around: Callable[[Loss], Loss] | None = None,
) -> Loss:
    """Build the loss of a run, which depends only on the micro-batch, or raise a UserError.

    `build` replaces the function in `LOSSES`. `around` extends a loss of logits [B, C] to an ensemble's logits
    [B, C, members], over which the loss is otherwise averaged.
    """
    threshold, smoothing, classes = config.bce_target_threshold, config.label_smoothing, len(class_names)
    if threshold:
        low, high = smoothing / classes, 1 - smoothing + smoothing / classes
        if not low < threshold < high:
            raise UserError(
                f"--loss bce:{threshold:g} makes all targets equal: with --label-smoothing {smoothing:g} and "
                f"{classes} classes, the smoothed targets are {low:.4g} and {high:.4g}: use a value between them."
            )
    weights = class_weights(config.class_weights, class_names, counts)
    named = LOSSES[config.loss]
    named = pkgutil.resolve_name(named) if isinstance(named, str) else named
    loss = (build or named)(config, None if weights is None else torch.tensor(weights, device=device))

    def of_members(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        return mean_over_members(lambda member: loss(member, batch), logits)

    whole = of_members if around is None else around(loss)

    def losses(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        own = whole(logits, batch)
        return own if batch.loss_weights is None else own * batch.loss_weights

    return losses


def cross_entropy(config: TaskSettings, weights: torch.Tensor | None) -> Loss:
    """Build PyTorch's cross-entropy, multiplied by the weight of the target's class.

    PyTorch's own class weights also apply to the smoothed targets of other classes. With two classes, one 20
    times as frequent as the other, a network would then learn to predict the rare class for images of the frequent one.
    """
    smoothing = config.label_smoothing

    def loss(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        targets = batch.labels if batch.targets is None else batch.targets
        if weights is None:
            return F.cross_entropy(logits.float(), targets, label_smoothing=smoothing, reduction="none")
        own = F.cross_entropy(logits.float(), targets, weights, reduction="none")
        to_all = -F.log_softmax(logits.float(), dim=1).mean(dim=1) * _sample_weights(batch, weights)
        return (1 - smoothing) * own + smoothing * to_all

    return loss


def binary_cross_entropy(config: TaskSettings, weights: torch.Tensor | None) -> Loss:
    """Build a loss like timm's `BinaryCrossEntropy` (Wightman et al. 2021, arXiv:2110.00476, section 2.2)."""
    smoothing, threshold = config.label_smoothing, config.bce_target_threshold

    def loss(logits: torch.Tensor, batch: Batch) -> torch.Tensor:
        classes = logits.shape[1]
        targets = F.one_hot(batch.labels, classes).float() if batch.targets is None else batch.targets
        smoothed = targets * (1 - smoothing) + smoothing / classes
        if threshold:
            smoothed = (smoothed > threshold).float()
        losses = F.binary_cross_entropy_with_logits(logits.float(), smoothed, reduction="none").mean(1)
        return losses if weights is None else losses * _sample_weights(batch, weights)

    return loss


def _sample_weights(batch: Batch, weights: torch.Tensor) -> torch.Tensor:
    """Return the weight of each sample's class, float32 [B]; for a mixed sample, the mean over its classes."""
    return weights[batch.labels] if batch.targets is None else batch.targets @ weights


# The loss of a network that predicts a probability of 1 / classes for every class of every image.
GUESSES: dict[str, Callable[[int], float]] = {
    "cross_entropy": math.log,
    "bce": lambda classes: (math.log(classes) - (classes - 1) * math.log1p(-1 / classes)) / classes,
}
