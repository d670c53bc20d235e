"""Classification with several labels per image."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from zerovision.models import model_spec
from zerovision.training.base.settings import Values
from zerovision.training.data.settings import MULTILABEL
from zerovision.training.tasks.task import Task

if TYPE_CHECKING:
    from zerovision.training.base.leaves import Leaves
    from zerovision.training.engines.engine import Loss, Step


class Multilabel(Task):
    """Learns to predict any number of classes per image."""

    flag = "task"
    goes_with: ClassVar[Values] = {
        **{"loss": ("bce",), "bce_target_threshold": (0,), "class_weights": ("none",), "sampling": ("uniform",)},
        **{"features": ("computed",), "best_by": ("map", "macro_f1", "auroc", "loss")},
    }
    usual: ClassVar[dict[str, Any]] = {"loss": "bce", "best_by": "map"}
    has_thresholds = True
    labels = "zerovision.training.tasks.multilabel.labels:SeveralLabels"

    def is_asked(self) -> bool:
        return self.config.reads_lists

    def mistakes(self, label_of: Mapping[str, str]) -> Iterator[str]:
        if self.is_asked() and model_spec(self.config.model_type).takes_members:
            yield f"{label_of['task']} {MULTILABEL} cannot train ensembles, which pick one class: use another model."

    def step(self, leaves: Leaves, of_losses: Callable[[Loss], Step]) -> Step:
        from zerovision.training.tasks.multilabel.labels import several_loss

        return of_losses(self._build_loss(build=several_loss))
