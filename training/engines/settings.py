"""The settings of the engines: sharding, memory, compilation."""

from __future__ import annotations

import dataclasses
from typing import Literal

from training.base.option import option
from training.data.settings import DataSettings
from training.engines.strategies import STRATEGIES


@dataclasses.dataclass(frozen=True)
class EngineSettings(DataSettings):
    """How the training state is sharded."""

    strategy: str = option("ddp", f"How training state is sharded: {', '.join(STRATEGIES)}.")
    offload: Literal["none", "optimizer", "all"] = option(
        "none", "Keep optimizer state (stages 2, 3) or parameters too (all: stage 3) in CPU memory; about 30 % slower."
    )
    engine: Literal["auto", "deepspeed", "native", "torch"] = option(
        "auto",
        "What shards the training state; auto: torch, whose bytes do not depend on the number of ranks, or deepspeed "
        "for what it alone does. native: an older name of torch.",
    )
    replicate_across: Literal["none", "nodes"] = option(
        "none", "nodes: shard inside each machine and replicate over machines (stages 2, 3; not --engine deepspeed)."
    )
    compile: Literal["auto", "on", "off"] = option(
        "auto",
        "Run the model through torch.compile (a minute or two at the first start); auto: in long runs of models that "
        "were measured to be faster.",
    )
    threads_per_rank: int = option(
        0,
        "CPU threads of each rank; 0: as the checkpoint, else cores / ranks. Another number changes the last bits.",
        low=0,
        high=1024,
    )
    deepspeed_config: str = option("", "Use this DeepSpeed JSON in place of the strategy's own.")
    deterministic: bool = option(False, "Use PyTorch's deterministic algorithms, so that a GPU run can be repeated.")
