"""The table of strategies, each of which is a plan: what is sharded, over how many ranks, and in how many copies.

Engines are built from a plan, which the sampler, the planner and the checks also read. This module does not import
torch.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True)
class ParallelPlan:
    """The distribution of the training state over replicas x shards ranks, which read different images.

    Attributes:
        zero_stage: what is sharded: the optimizer state (1), also the gradients (2), or also the weights (3).
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
        """Whether a rank frees the weights of other shards when it does not need them."""
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
