"""The settings of the task: the loss, a teacher, and the score that chooses the best epoch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

from zerovision.training.base.settings import LARGEST_BATCH, RunSettings, option, path_option
from zerovision.training.tasks.class_weights import USAGE as CLASS_WEIGHTS_USAGE
from zerovision.training.tasks.contrast import Contrastive
from zerovision.training.tasks.multilabel import Multilabel
from zerovision.training.tasks.task import Task
from zerovision.training.tasks.teacher import Distillation

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
EMBEDDING_SIZE = 128  # outputs of the projection, as in Khosla et al.


@dataclasses.dataclass(frozen=True)
class TaskSettings(RunSettings):
    """Settings for the loss, a teacher, and the score that chooses the best epoch."""

    loss: str = option(
        "cross_entropy",
        f"Training loss, one of {', '.join(LOSSES)}. bce: binary cross-entropy of each class, averaged over the "
        "classes; supcon: supervised contrastive loss, which trains features for a head to train afterwards.",
    )
    temperature: float = option(0.1, "Divisor of the cosine similarities.", low=0.001, high=100, part_of="loss:supcon")
    gradient_cache: int = option(
        0,
        "Images to pass through the network at a time; the loss still compares all images of a step; 0: --batch-size.",
        low=0,
        high=LARGEST_BATCH,
        part_of="loss:supcon",
    )
    distill: str = option(
        "",
        "kl:T[:ALPHA] trains on the outputs of --teacher: the KL divergence at temperature T, times T squared, "
        "has weight ALPHA (1 by default), and --loss has weight 1 - ALPHA.",
    )
    teacher: str = path_option(
        "", "Teacher for --distill: a run's name or folder, a safetensors file, or timm:NAME with published weights."
    )
    teacher_classes: str = path_option(
        "", "File with the class name of each output of --teacher, one per line; default: the teacher's own names."
    )
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
        return EMBEDDING_SIZE if self.loss == "supcon" else 0


def asked_task(config: Any) -> Task:
    """Return the task that a run's settings choose."""
    return next(task for task in (kind(config) for kind in TASKS) if task.is_asked())
