"""The flags of how a training runs on its devices: precision, memory, engine."""

from __future__ import annotations

import dataclasses
from typing import Literal

from training.fields import option


@dataclasses.dataclass(frozen=True)
class ParallelFields:
    """Precision and memory."""

    precision: Literal["auto", "bf16", "fp16", "fp32"] = option(
        "auto", "Arithmetic; auto: bf16 on GPUs that have it, fp16 on older GPUs, fp32 on CPU."
    )
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
