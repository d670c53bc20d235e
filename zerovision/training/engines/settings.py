"""The engines' settings for sharding, memory and compilation, and the table of ways to share work among ranks."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

from zerovision.training.base.errors import check_installed
from zerovision.training.base.settings import Values, option
from zerovision.training.data.settings import DataSettings
from zerovision.training.engines.deepspeed import DeepSpeed, DeepSpeedSettings
from zerovision.training.engines.islands import DiLoCo, IslandSettings
from zerovision.training.engines.pipeline import Pipeline, PipelineSettings
from zerovision.training.engines.tensor import Tensor, TensorSettings
from zerovision.training.engines.ways import STRATEGIES, Way

TORCH = "torch"  # the engine of all ways that have no engine of their own
WAYS: tuple[type[Way], ...] = (DiLoCo, Pipeline, Tensor, DeepSpeed)  # in a mesh, the innermost dimension is last
TOGETHER: Values = {way.flag: (1,) for way in WAYS if way.independent}  # with these, all ranks take every step together

LEFT_OPEN = {"threads_per_rank": 0, "islands": 0}  # values that let the run decide; 'auto' for other settings


@dataclasses.dataclass(frozen=True)
class ShardingSettings(DataSettings):
    """How the training state is sharded, and how ranks run their computations."""

    strategy: str = option("ddp", f"How to shard the training state, one of {', '.join(STRATEGIES)}.")
    offload: Literal["none", "optimizer", "all"] = option(
        "none", "Keep optimizer state (stages 2, 3) or also parameters (all: stage 3) in CPU memory; about 30 % slower."
    )
    engine: Literal["auto", "deepspeed", "torch"] = option(
        "auto",
        "Engine that shards the training state; auto: torch, with bit-identical results on any number of ranks, "
        "or deepspeed for settings that only DeepSpeed supports.",
    )
    replicate_across: Literal["none", "nodes"] = option(
        "none", "nodes: shard within machines, replicate across machines (stages 2, 3; not with --engine deepspeed)."
    )
    compile: Literal["auto", "on", "off"] = option(
        "auto",
        "Compile the model with torch.compile (a minute or two at the first start); auto: only in long CPU runs, "
        "for models that were measured to run faster. On GPUs, auto replays the model's kernels as CUDA graphs; "
        "off: neither.",
    )
    threads_per_rank: int = option(
        0,
        "CPU threads per rank; 0: as in the checkpoint, or cores / ranks. Changing it alters results slightly.",
        low=0,
        high=1024,
    )
    deterministic: bool = option(False, "Use PyTorch's deterministic algorithms, so that GPU runs are reproducible.")


@dataclasses.dataclass(frozen=True)
class EngineSettings(DeepSpeedSettings, PipelineSettings, IslandSettings, TensorSettings, ShardingSettings):
    """How the ranks share the work of training."""

    @property
    def mesh(self) -> dict[str, int]:
        """The mesh dimensions: flag of a way -> number of ranks that share one copy of the model in this way."""
        return {way.flag: ranks for way in WAYS if (ranks := way(self).ranks()) > 1}

    @property
    def ranks_per_replica(self) -> int:
        """The number of ranks that share one copy of the model, and therefore read the same images."""
        return math.prod(self.mesh.values())

    @property
    def ranks_per_layer(self) -> int:
        """The number of ranks among which a replica divides each layer."""
        return math.prod(way(self).ranks() for way in WAYS if way.divides_layers)

    @property
    def steps_alone(self) -> int:
        """The number of steps that groups of ranks train independently; 1 if all ranks take every step together."""
        return max(getattr(self, name) for name in TOGETHER)


def ways_of(config: Any, engine: str) -> list[Way]:
    """Return a run's ways to share work: its engine's own ways, and the enabled ways of PyTorch's engine."""
    ways = (way(config) for way in WAYS)
    return [way for way in ways if (way.engine == engine if way.engine else way.is_asked())]


def check_files(config: Any) -> None:
    """Raise a UserError if a file in the settings is unusable, or a library is missing."""
    check_installed("rich", "jinja2", "scipy", *["tensorboard"] * ("tensorboard" in config.destinations))
    for way in WAYS:
        way(config).check_files()


def check_machine(config: Any, ranks: int) -> None:
    """Raise a UserError if ranks that share a copy of the model do not fit on machines with this many ranks."""
    for way in WAYS:
        way(config).check_machine(ranks)
