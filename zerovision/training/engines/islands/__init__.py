"""Islands: groups of ranks that train independently, and periodically take an outer step together (DiLoCo)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from zerovision.training.base.errors import AgreedError
from zerovision.training.base.settings import Values, option
from zerovision.training.base.units import plural
from zerovision.training.engines.ways import OF_CLASSES, OUR_ENGINE, Way

if TYPE_CHECKING:
    from zerovision.training.base.points import Loggers
    from zerovision.training.engines.engine import Engine, EngineSetup
    from zerovision.training.engines.islands.engine import OuterSteps
    from zerovision.training.world.world import World


@dataclasses.dataclass(frozen=True)
class IslandSettings:
    """The settings for local steps."""

    local_steps: int = option(
        1,
        "Steps that each island of ranks trains on its own before all islands take an outer step together (DiLoCo, for "
        "slow links); 1: off, gradients are summed over all ranks in every step. Needs --strategy ddp.",
        low=1,
        high=100_000,
    )
    islands: int = option(0, "Equal groups of ranks; 0: one per machine.", low=0, high=100_000, part_of="local_steps")
    outer_learning_rate: float = option(0.7, "Outer learning rate.", above=0, high=10, part_of="local_steps")
    outer_momentum: float = option(0.9, "Outer Nesterov momentum.", low=0, high=0.9999, part_of="local_steps")
    outer_precision: Literal["fp32", "bf16"] = option(
        "fp32", "bf16: half the bytes are sent; the next outer step makes up for rounding.", part_of="local_steps"
    )


class DiLoCo(Way):
    """Groups of ranks that train independently between outer steps."""

    flag = "local_steps"
    independent = True
    # Each island has its own engine, optimizer and statistics; with fp16, each would also have a different loss scale.
    goes_with: ClassVar[Values] = {
        **{"strategy": ("ddp",), "engine": OUR_ENGINE, "precision": ("fp32", "auto", "bf16"), "loss": OF_CLASSES},
        **{"sync_batchnorm": (False,), "ema": (0,), "lookahead": (0,)},  # the outer weights are already an average
    }
    own = ("outer_learning_rate", "outer_momentum", "outer_precision")
    resumable = ("islands",)

    def kept_values(self) -> int:
        return 2 + (self.config.outer_precision == "bf16")

    def divide_ranks(self, names: Iterable[str] | None, world: World) -> tuple[dict[str, Any], int, list[str]]:
        """See `Way.divide_ranks`; by default, there is one island per machine.

        A resumed run keeps its intended number of islands, but trains fewer islands if its ranks cannot be divided into
        that many.
        """
        from zerovision.training.engines.islands.engine import number_of_islands, usable_islands
        from zerovision.training.world.collectives import gather_objects, ranks_per_machine

        flag, size = f"--local-steps {self.config.local_steps}", world.data.size
        meant = self.config.islands or size // ranks_per_machine(world, flag)
        if meant < 2:
            raise AgreedError(
                f"{flag} needs at least 2 islands, not {meant}: start more ranks, or use {flag}:N for N "
                f"islands, where N divides the number of ranks ({size})."
            )
        machines = {*gather_objects(world.local_size, world)}
        islands = usable_islands(meant, size, machines.pop() if len(machines) == 1 else 1)
        if names is None and islands != meant:
            cure = f", or {flag}:{islands}" if islands > 1 else ""
            raise AgreedError(
                f"{flag}:{meant}: {plural(size, 'rank')} cannot be divided into {meant} equal groups, each of "
                f"whole machines or within one machine: use a multiple of {meant} ranks{cure}."
            )
        before = islands if names is None else number_of_islands(names)
        if islands == before:
            return {"islands": meant}, islands, []
        how = "the others' weights are dropped"
        if islands > before:
            how = "new ones begin with the outer weights and island 0's moments"
        note = (
            f"{plural(islands, 'island')} in place of the checkpoint's {before} ({meant} intended): {how}, the "
            "bytes will not be those of the run so far"
        )
        return {"islands": meant}, islands, [note]

    def build_engine(self, setup: EngineSetup) -> Engine:
        from zerovision.training.engines.islands.engine import IslandEngine

        return IslandEngine(setup)

    def averages(self, engine: Engine, total_steps: int, loggers: Loggers) -> OuterSteps:
        from zerovision.training.engines.islands.engine import IslandEngine, OuterSteps

        assert isinstance(engine, IslandEngine)
        return OuterSteps(engine, self.config, total_steps, loggers)
