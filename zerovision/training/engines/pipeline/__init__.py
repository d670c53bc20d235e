"""Pipelines: consecutive layers, or members of an ensemble, on separate ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, ClassVar, Literal

from zerovision.models import model_spec
from zerovision.training.base.errors import UserError
from zerovision.training.base.settings import Values, option
from zerovision.training.base.units import plural
from zerovision.training.engines.ways import NOT_COMPILED, OF_CLASSES, OUR_ENGINE, Way

if TYPE_CHECKING:
    from torch import nn

    from zerovision.training.engines.engine import Engine, EngineSetup, Loss, Step
    from zerovision.training.world.world import World


@dataclass(frozen=True)
class PipelineSettings:
    """The settings for pipelines."""

    pipeline_parallel: int = option(
        1,
        "Number of stages to split the model into, each a group of consecutive layers. For an ensemble: "
        "number of ranks to distribute the members over (ddp, --engine torch).",
        low=1,
        high=1024,
    )
    pipeline_schedule: Literal["1f1b", "interleaved"] = option(
        "1f1b",
        "Order of the micro-batches in a stage; 1f1b: stores the activations of as many micro-batches as there "
        "are stages; interleaved: runs two stages per rank, which halves the idle time.",
        part_of="pipeline_parallel",
    )
    pipeline_split: str = option(
        "auto",
        "First block of each stage but the first, comma-separated, such as blocks.3,blocks.6; auto: "
        "stages that take equally long.",
        part_of="pipeline_parallel",
    )


class Pipeline(Way):
    """Consecutive layers, or members of an ensemble, on separate ranks."""

    flag = "pipeline_parallel"
    division = "each rank has consecutive layers, or members of an ensemble"
    goes_with: ClassVar[Values] = {
        **{"strategy": ("ddp",), "engine": OUR_ENGINE, "loss": OF_CLASSES, "compile": NOT_COMPILED},
        **{"sync_batchnorm": (False,), "features": ("computed",)},
    }
    own = ("pipeline_schedule", "pipeline_split")
    resumable = ("pipeline_parallel", "pipeline_schedule", "pipeline_split")

    def uses_own(self) -> bool:
        return self.is_asked() and not model_spec(self.config.model_type).takes_members

    def keeps_images(self) -> bool:
        return not self.uses_own()  # the first stage has the images, the last one computes the loss

    def mistakes(self, label_of: Mapping[str, str]) -> Iterator[str]:
        if not self.is_asked():
            return
        flag = f"{label_of['pipeline_parallel']} {self.config.pipeline_parallel}"
        for name in ("batch_size", "learning_rate"):
            if getattr(self.config, name) == "auto":
                yield f"{flag} cannot be combined with {label_of[name]} auto: use a number for {label_of[name]}."
        if self.uses_own() and not self.config.global_batch:
            self.check_micro_batches()
        members = self.config.ensemble_members.count(",") + 1
        if not self.uses_own() and members < self.config.pipeline_parallel:
            yield (
                f"{flag}: an ensemble of {plural(members, 'member')} fills at most {plural(members, 'rank')}: use "
                f"{label_of['pipeline_parallel']} {members} or less, or more members."
            )

    def check_micro_batches(self) -> None:
        """Raise a UserError if the schedule cannot run a step's micro-batches through the stages."""
        stages, micro_batches = self.config.pipeline_parallel, self.config.gradient_accumulation_steps
        flag = f"--pipeline-parallel {stages}:{self.config.pipeline_schedule}"
        if micro_batches < stages:
            raise UserError(
                f"{flag}: {stages} ranks need at least {stages} micro-batches per step, not {micro_batches}: "
                f"use --gradient-accumulation-steps {stages} or more, with a smaller batch size."
            )
        rounds = micro_batches // stages
        if self.config.pipeline_schedule == "interleaved" and micro_batches % rounds:
            raise UserError(
                f"{flag}: {micro_batches} micro-batches cannot be divided into rounds of {stages}, one per rank: use "
                f"--gradient-accumulation-steps {rounds * stages} or {(rounds + 1) * stages}, or 1f1b."
            )

    def waits(self) -> float:
        """Return the share of a step that a rank spends waiting, if all stages take equally long.

        The formula is from Narayanan et al. 2021 (https://arxiv.org/abs/2104.04473), section 2.2.
        """
        others, rounds = self.config.pipeline_parallel - 1, stages_per_rank(self.config.pipeline_schedule)
        return others / (self.config.gradient_accumulation_steps * rounds + others) if self.uses_own() else 0.0

    def prepare(self, module: nn.Module, world: World) -> None:
        from zerovision.training.world.collectives import agreed

        if self.uses_own():
            agreed(self.check_micro_batches, world)

    def build_engine(self, setup: EngineSetup) -> Engine:
        from zerovision.models.ensemble import Ensemble
        from zerovision.training.engines.pipeline.engine import PipelineEngine
        from zerovision.training.engines.pipeline.members import MembersEngine

        return (MembersEngine if isinstance(setup.module, Ensemble) else PipelineEngine)(setup, self.config)

    def step(self, loss: Loss) -> Step | None:
        from zerovision.training.engines.pipeline.engine import train_in_stages

        return partial(train_in_stages, loss) if self.uses_own() else None


def stages_per_rank(schedule: str) -> int:
    """Return the number of stages per rank: 2 for the interleaved schedule, otherwise 1."""
    return 2 if schedule == "interleaved" else 1
