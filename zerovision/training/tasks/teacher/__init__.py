"""Distillation: a network learns the outputs of a trained network for the same images."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from zerovision.training.base.errors import UserError, shown
from zerovision.training.base.settings import Values, option, path_option
from zerovision.training.tasks.task import Forward, Task

if TYPE_CHECKING:
    from zerovision.training.base.leaves import Leaves
    from zerovision.training.data.datasets import DatasetPair
    from zerovision.training.data.loader import Loader
    from zerovision.training.engines.engine import Loss, Step
    from zerovision.training.world.world import World

MOST_TEMPERATURE = 100


@dataclass(frozen=True)
class TeacherSettings:
    """The settings for a teacher."""

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


class Distillation(Task):
    """Learns a teacher's outputs in addition to the class of each image."""

    flag = "distill"
    goes_with: ClassVar[Values] = {"features": ("computed",)}
    own = ("teacher_classes",)
    resumable = ("teacher", "teacher_classes")  # a hash identifies the teacher
    needs_images = True

    def is_asked(self) -> bool:
        return bool(self.config.distill)

    def mistakes(self, label_of: Mapping[str, str]) -> Iterator[str]:
        if self.is_asked():
            read_distill(self.config.distill)
        if self.is_asked() != bool(self.config.teacher):
            yield f"{label_of['distill']} and {label_of['teacher']} need each other: use both, or neither."

    def prepare(self, data: DatasetPair, precision: str, world: World) -> None:
        from zerovision.training.tasks.teacher.network import load_teacher

        super().prepare(data, precision, world)
        self._teacher = load_teacher(self.config, data, precision, world)
        self.identity = {"teacher": self._teacher.digest}
        # The divergence at temperature T is that of logits / T, times T squared.
        self.loss_scale = max(1.0, read_distill(self.config.distill)[0]) ** 2

    def step(self, leaves: Leaves, of_losses: Callable[[Loss], Step]) -> Step:
        from zerovision.training.tasks.teacher.network import distilled

        return of_losses(self._build_loss(around=partial(distilled, self._teacher, *read_distill(self.config.distill))))

    def notes(self, weights: str) -> list[str]:
        note = self._teacher.note
        return [f"--teacher {self.config.teacher} was trained on images {note}"] if note else []

    def before_training(self, train: Loader, forward: Forward, say: Callable[[str], None]) -> int:
        return self._teacher.keep_answers(train, self.world.data, forward, say)


def read_distill(word: str) -> tuple[float, float]:
    """Return the temperature and the teacher's share of the loss in `--distill kl:T[:ALPHA]`, or raise a UserError."""
    kind, *numbers = word.split(":")
    if kind == "kl" and 1 <= len(numbers) <= 2 and all(re.fullmatch(r"\d{1,3}(\.\d{1,6})?", one) for one in numbers):
        temperature, share = float(numbers[0]), float((*numbers, "1")[1])
        if 0 < temperature <= MOST_TEMPERATURE and 0 < share <= 1:
            return temperature, share
    raise UserError(
        f"--distill {shown(word)}: expected kl:T or kl:T:ALPHA, with the teacher's share ALPHA, such as kl:4 or "
        f"kl:4:0.9; T is at most {MOST_TEMPERATURE} and ALPHA at most 1, both above 0."
    )
