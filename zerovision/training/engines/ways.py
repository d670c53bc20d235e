"""What a way to share the work of a training among ranks may do; each way has a folder of its own here.

`settings.WAYS` is the table of ways; a new one is a folder and a line there.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar

from zerovision.training.base.modes import Mode

if TYPE_CHECKING:
    from torch import nn

    from zerovision.training.base.run_logger import Loggers
    from zerovision.training.engines.engine import Averages, Engine, EngineSetup, Loss, Step
    from zerovision.training.engines.parameter_shards import ModelPart
    from zerovision.training.engines.strategies import ParallelPlan
    from zerovision.training.world.world import World

OUR_ENGINE, NOT_COMPILED, OF_CLASSES = ("torch", "auto"), ("off", "auto"), ("cross_entropy", "bce")


class Way(Mode):
    """A way to share the work of a training among ranks.

    Attributes:
        division: in words, how as many ranks as `flag` says have one copy of the model together; '' if they do
            not.
        divides_layers: whether each of its ranks has a part of every layer.
        engine: the value of `--engine` that asks for it; '' for a way of PyTorch's engine.
    """

    division: ClassVar[str] = ""
    divides_layers: ClassVar[bool] = False
    engine: ClassVar[str] = ""

    # Of settings.

    def check_files(self) -> None:
        """Raise a UserError for a file that its settings name and that it cannot use."""

    def ranks(self) -> int:
        """Return how many ranks share one copy of the model by it."""
        return getattr(self.config, self.flag) if self.division else 1

    def check_machine(self, ranks: int) -> None:
        """Raise a UserError if its ranks cannot be placed on machines of so many."""

    def waits(self) -> float:
        """Return the share of a step in which a rank waits for others."""
        return 0.0

    def kept_values(self) -> int:
        """Return how many values it keeps for each trained weight."""
        return 0

    def alone_knows(self) -> list[str]:
        """Return the names of what its engine alone follows in the settings."""
        return []

    def reasons(self, plan: ParallelPlan, module: nn.Module) -> list[str]:
        """Return the reasons for which `--engine auto` chooses this way's engine; empty if it does not."""
        return []

    # Of a run.

    def divide_ranks(self, names: Iterable[str] | None, world: World) -> tuple[dict[str, Any], int, list[str]]:
        """Return into how many groups that train by themselves the ranks are divided; a collective.

        Args:
            names: of the parameters of the checkpoint that the run goes on from; None for a fresh start.
            world: the ranks.

        Returns:
            What a resumed run keeps of it, as settings, how many groups there are now, and notes for the log.

        Raises:
            UserError: on all ranks, if they cannot be divided so.
        """
        return {}, 1, []

    def prepare(self, module: nn.Module, world: World) -> ModelPart | None:
        """Leave this rank's part in a model, of which there is no optimizer yet; a collective.

        Returns:
            What that is; None if it is the whole model as yet.

        Raises:
            UserError: on all ranks, if the model cannot be trained so.
        """
        return None

    def take_largest_part(self, module: nn.Module) -> None:
        """Leave in a model without data what `prepare` leaves on the rank that has most."""

    def files(self, setup: EngineSetup) -> dict[str, dict[str, Any]]:
        """Return what its engine is given, as JSON files for the folder of the run."""
        return {}

    def build_engine(self, setup: EngineSetup) -> Engine | None:
        """Return the engine if it needs one of its own; a collective."""
        return None

    def step(self, loss: Loss) -> Step | None:
        """Return how a step trains on the losses of images, if not by adding up the gradients of micro-batches."""
        return None

    def averages(self, engine: Engine, total_steps: int, loggers: Loggers) -> Averages | None:
        """Return what keeps the weights that are evaluated, if they are others than those that are trained."""
        return None
