"""The settings of the engines: sharding, memory, compilation."""

from __future__ import annotations

import dataclasses
from typing import Literal

from zerovision.models import model_spec
from zerovision.training.base.settings import option
from zerovision.training.data.settings import DataSettings
from zerovision.training.engines.strategies import STRATEGIES


@dataclasses.dataclass(frozen=True)
class EngineSettings(DataSettings):
    """How the training state is sharded."""

    strategy: str = option("ddp", f"How training state is sharded: {', '.join(STRATEGIES)}.")
    offload: Literal["none", "optimizer", "all"] = option(
        "none", "Keep optimizer state (stages 2, 3) or parameters too (all: stage 3) in CPU memory; about 30 % slower."
    )
    engine: Literal["auto", "deepspeed", "torch"] = option(
        "auto",
        "What shards the training state; auto: torch, whose bytes do not depend on the number of ranks, or deepspeed "
        "for what it alone does.",
    )
    tensor_parallel: int = option(
        1,
        "Ranks that compute every layer together, each with a part of its weights (engine torch; vision transformers, "
        "ConvNeXt, MLP-Mixer, VGG); neighbours on one machine.",
        low=1,
        high=1024,
    )
    replicate_across: Literal["none", "nodes"] = option(
        "none", "nodes: shard inside each machine and replicate over machines (stages 2, 3; not --engine deepspeed)."
    )
    local_steps: int = option(
        1,
        "Steps that each island of ranks trains by itself before all take an outer step together (DiLoCo, for slow "
        "links between them); 1: none do, gradients are summed over all ranks in every step. --strategy ddp.",
        low=1,
        high=100_000,
    )
    islands: int = option(
        0, "--local-steps: equal groups that the ranks are divided into; 0: one per machine.", low=0, high=100_000
    )
    outer_learning_rate: float = option(0.7, "--local-steps: learning rate of the outer step.", above=0, high=10)
    outer_momentum: float = option(0.9, "--local-steps: Nesterov momentum of the outer step.", low=0, high=0.9999)
    outer_precision: Literal["fp32", "bf16"] = option(
        "fp32",
        "--local-steps: in what the weights' differences cross the links; bf16: half of the bytes. "
        "What rounding leaves out goes with the next outer step.",
    )
    pipeline_parallel: int = option(
        1,
        "Cut the model into so many stages of consecutive layers, each on ranks of its own; micro-batches go through "
        "them. An ensemble: deal its members out to so many ranks (ddp, not --engine deepspeed).",
        low=1,
        high=1024,
    )
    pipeline_schedule: Literal["1f1b", "interleaved"] = option(
        "1f1b",
        "When a stage computes which micro-batch; 1f1b: keeps as many as there are stages, interleaved: two stages on "
        "each rank, which waits half as long.",
    )
    pipeline_split: str = option(
        "auto",
        "Where stages begin: names of blocks with commas between them, such as blocks.3,blocks.6; auto: where all take "
        "as long.",
    )
    compile: Literal["auto", "on", "off"] = option(
        "auto",
        "Run the model through torch.compile (a minute or two at the first start); auto: in long CPU runs of models "
        "that were measured to be faster. On GPUs auto replays the model's kernels as CUDA graphs; off: neither.",
    )
    threads_per_rank: int = option(
        0,
        "CPU threads of each rank; 0: as the checkpoint, else cores / ranks. Another number changes the last bits.",
        low=0,
        high=1024,
    )
    deepspeed_config: str = option("", "Use this DeepSpeed JSON in place of the strategy's own.")
    deterministic: bool = option(False, "Use PyTorch's deterministic algorithms, so that a GPU run can be repeated.")

    @property
    def has_islands(self) -> bool:
        """Whether groups of ranks train by themselves between outer steps."""
        return self.local_steps > 1

    @property
    def has_stages(self) -> bool:
        """Whether ranks have consecutive layers of the model; those of an ensemble have members of it."""
        return self.pipeline_parallel > 1 and not model_spec(self.model_type).takes_members

    @property
    def ranks_per_replica(self) -> int:
        """Ranks that share one copy of the model's layers, and so the same images."""
        return self.pipeline_parallel * self.tensor_parallel
