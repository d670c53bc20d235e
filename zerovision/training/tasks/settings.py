"""The settings of the task: the loss, and the score that chooses the best epoch; and the table of tasks."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from zerovision.training.base.settings import RunSettings, option, path_option
from zerovision.training.tasks.class_weights import USAGE as CLASS_WEIGHTS_USAGE
from zerovision.training.tasks.contrast import Contrastive, ContrastSettings
from zerovision.training.tasks.multilabel import Multilabel
from zerovision.training.tasks.task import Task
from zerovision.training.tasks.teacher import Distillation, TeacherSettings

if TYPE_CHECKING:
    import torch

    from zerovision.training.engines.engine import Loss

TASKS: tuple[type[Task], ...] = (Contrastive, Multilabel, Distillation, Task)  # the first task turned on is used

# Functions, or their import paths, that build the loss per image from the settings and the class weights (or None).
LOSSES: dict[str, str | Callable[[Any, torch.Tensor | None], Loss]] = {
    "cross_entropy": "zerovision.training.tasks.labels:cross_entropy",
    "bce": "zerovision.training.tasks.labels:binary_cross_entropy",
    "supcon": "",  # a task of its own
}


@dataclasses.dataclass(frozen=True)
class LossSettings(RunSettings):
    """The setting that names the loss."""

    loss: str = option(
        "cross_entropy",
        f"Training loss, one of {', '.join(LOSSES)}. bce: binary cross-entropy of each class, averaged over the "
        "classes; supcon: supervised contrastive loss, which trains features for a head to train afterwards.",
    )


@dataclasses.dataclass(frozen=True)
class TaskSettings(TeacherSettings, ContrastSettings, LossSettings):
    """Settings for what a network learns, and the score that chooses the best epoch."""

    label_smoothing: float = option(0.1, "Share of each target that is spread over all classes.", low=0, high=0.99)
    bce_target_threshold: float = option(
        0.0, "Targets above this value become 1, all others 0; 0: no change.", low=0, high=0.99, part_of="loss:bce"
    )
    class_weights: str = path_option("none", f"Weight of each class in the training loss: {CLASS_WEIGHTS_USAGE}.")
    best_by: Literal["top1", "top5", "loss", "macro_f1", "balanced_accuracy", "auroc", "map"] = option(
        "top1", "Validation score that chooses the epoch whose weights are kept."
    )

    @property
    def embedding(self) -> int:
        """Size of the embedding of each image, which replaces the class scores; 0 for a classifier."""
        return asked_task(self).embedding


def asked_task(config: Any) -> Task:
    """Return the task that a run's settings choose."""
    return next(task for task in (kind(config) for kind in TASKS) if task.is_asked())
