"""The interface of ways to share the work of training among ranks, and the table of ways to shard its state.

`settings.WAYS` is the table of ways; a new way needs a folder here and a line in that table.

Engines are built from the plan of a strategy, which the sampler, the planner and the checks also read. This module does
not import torch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from zerovision.training.base.settings import Mode

if TYPE_CHECKING:
    from torch import nn

    from zerovision.training.base.points import Loggers
    from zerovision.training.engines.engine import Averages, Engine, EngineSetup, Loss, Step
    from zerovision.training.engines.parameter_shards import ModelPart
    from zerovision.training.world.world import World

OUR_ENGINE, NOT_COMPILED, OF_CLASSES = ("torch", "auto"), ("off", "auto"), ("cross_entropy", "bce")


class Way(Mode):
    """A way to share the work of training among ranks.

    Attributes:
        division: phrase for messages that says how the ranks of a group share one copy of the model; '' if ranks share
            no copy.
        divides_layers: whether each rank has a part of every layer.
        independent: whether groups of ranks train independently, for the number of steps that `flag` sets.
        engine: the value of `--engine` that selects this way; '' for a way of PyTorch's engine.
    """

    division: ClassVar[str] = ""
    divides_layers: ClassVar[bool] = False
    independent: ClassVar[bool] = False
    engine: ClassVar[str] = ""

    # Methods that need only the settings.

    def check_files(self) -> None:
        """Raise a UserError if a file in this way's settings is unusable."""

    def ranks(self) -> int:
        """Return the number of ranks that share one copy of the model in this way."""
        return getattr(self.config, self.flag) if self.division else 1

    def keeps_images(self) -> bool:
        """Return whether the rank that computes the loss of an image also has the image."""
        return True

    def check_machine(self, ranks: int) -> None:
        """Raise a UserError if this way cannot be used on machines with this many ranks."""

    def kept_values(self) -> int:
        """Return the number of additional values that this way keeps per trained weight."""
        return 0

    def alone_knows(self) -> list[str]:
        """Return the names of the settings that only the engine of this `Way` supports."""
        return []

    def reasons(self, plan: ParallelPlan, module: nn.Module) -> list[str]:
        """Return the reasons why `--engine auto` chooses this way's engine; [] if it does not."""
        return []

    # Methods that a run calls.

    def divide_ranks(self, names: Iterable[str] | None, world: World) -> tuple[dict[str, Any], int, list[str]]:
        """Return the number of independent groups of ranks; a collective.

        Args:
            names: parameter names in the checkpoint to resume from; None for a fresh start.
            world: the ranks.

        Returns:
            The settings that a resumed run keeps, the current number of groups, and notes for the log.

        Raises:
            UserError: on all ranks, if the ranks cannot be divided into these groups.
        """
        return {}, 1, []

    def prepare(self, module: nn.Module, world: World) -> ModelPart | None:
        """Reduce a model that has no optimizer yet to this rank's part; a collective.

        Returns:
            This rank's part; None if it is still the whole model.

        Raises:
            UserError: on all ranks, if the model cannot be trained in this way.
        """
        return None

    def take_largest_part(self, module: nn.Module) -> None:
        """Reduce a model without data to the largest part that `prepare` leaves on a rank."""

    def files(self, setup: EngineSetup) -> dict[str, dict[str, Any]]:
        """Return the configuration of this way's engine, as JSON files for the run's folder."""
        return {}

    def build_engine(self, setup: EngineSetup) -> Engine | None:
        """Return the engine if this way needs an engine of its own; a collective."""
        return None

    def step(self, loss: Loss) -> Step | None:
        """Return the function that trains a step on image losses, unless plain gradient accumulation is used."""
        return None

    def averages(self, engine: Engine, total_steps: int, loggers: Loggers) -> Averages | None:
        """Return the object that stores the weights to evaluate, if these differ from the trained weights."""
        return None


@dataclass(frozen=True)
class ParallelPlan:
    """The distribution of the training state over replicas x shards ranks, which read different images.

    Attributes:
        zero_stage: what is sharded: the optimizer state (1), also the gradients (2), or also the weights (3); PyTorch's
            engine shards the weights between steps at stage 2, too.
        shards: number of ranks over which one copy of the training state is divided.
        replicas: number of copies of the training state.
        offload: what is kept in CPU memory: 'none', 'optimizer' (the optimizer state) or 'all' (also the weights).
        bucket_elements: largest number of gradient elements in one message.
    """

    zero_stage: int
    shards: int = 1
    replicas: int = 1
    offload: str = "none"
    bucket_elements: int = 50_000_000

    @property
    def releases_weights(self) -> bool:
        """Whether a rank frees the weights of other shards during a step, when it does not need them."""
        return self.zero_stage == 3

    @property
    def gradient_shards(self) -> int:
        """The number of ranks over which gradients are divided: 1 at stage 1, where each rank keeps whole gradients.

        If each copy of the state has only one rank, FSDP2 divides the gradients over the replicas instead.
        """
        if self.zero_stage == 1:
            return 1
        return self.shards if self.shards > 1 else self.replicas

    @property
    def offloadable(self) -> tuple[str, ...]:
        """The allowed values of `offload`: only sharded state can be moved to CPU memory."""
        return ("none", "optimizer", "all")[: self.zero_stage]


STRATEGIES: dict[str, ParallelPlan] = {
    "ddp": ParallelPlan(zero_stage=1),  # for models that fit on one GPU
    "fsdp_stage2": ParallelPlan(zero_stage=2),
    "fsdp_stage3": ParallelPlan(zero_stage=3),
}


def plan_of(strategy: str, ranks: int, offload: str = "none", shards: int = 0) -> ParallelPlan:
    """Return the plan of a strategy, a key of `STRATEGIES`.

    Args:
        strategy: name of the strategy.
        ranks: number of ranks that read different images, on all machines.
        offload: see `ParallelPlan`.
        shards: number of ranks over which one copy of the training state is divided, a divisor of `ranks`; 0 for all.
    """
    shards = shards or ranks
    return dataclasses.replace(STRATEGIES[strategy], shards=shards, replicas=ranks // shards, offload=offload)
