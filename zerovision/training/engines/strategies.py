"""The table of strategies, each as a plan in numbers: what is sharded, over how many ranks, in how many copies.

Engines are built from a plan; the sampler's order, the planner and the checks read it, too. This module does not
import torch.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True)
class ParallelPlan:
    """How the state of a training is distributed over replicas x shards ranks, those that read different images.

    Attributes:
        zero_stage: what the shards divide: 1 the optimizer's state, 2 the gradients too, 3 the weights too.
        shards: ranks over which one copy of that state is divided.
        replicas: copies of it.
        offload: what is kept in CPU memory: 'none', 'optimizer' (its state) or 'all' (the weights too).
        bucket_elements: most gradient elements of one message.
    """

    zero_stage: int
    shards: int = 1
    replicas: int = 1
    offload: str = "none"
    bucket_elements: int = 50_000_000

    @property
    def releases_weights(self) -> bool:
        """Whether a rank frees the other shards' weights when it does not compute with them."""
        return self.zero_stage == 3

    @property
    def neighbours(self) -> int:
        """Ranks among which gradients are divided: 1 at stage 1, where each rank keeps whole ones.

        With one rank per copy nothing would be divided: FSDP2 then divides over the replicas.
        """
        if self.zero_stage == 1:
            return 1
        return self.shards if self.shards > 1 else self.replicas

    @property
    def offloadable(self) -> tuple[str, ...]:
        """The values that `offload` may have: only what is sharded leaves the GPU."""
        return ("none", "optimizer", "all")[: self.zero_stage]


STRATEGIES: dict[str, ParallelPlan] = {
    "ddp": ParallelPlan(zero_stage=1),  # for models that fit
    "fsdp_stage2": ParallelPlan(zero_stage=2),
    "fsdp_stage3": ParallelPlan(zero_stage=3),
}


def plan_of(strategy: str, ranks: int, offload: str = "none", shards: int = 0) -> ParallelPlan:
    """Return the plan of a strategy, a key of `STRATEGIES`.

    Args:
        strategy: its name.
        ranks: on all machines, those that read different images.
        offload: as in `ParallelPlan`.
        shards: ranks over which one copy of the training state is divided, a divisor of `ranks`; 0 for all of them.
    """
    shards = shards or ranks
    return dataclasses.replace(STRATEGIES[strategy], shards=shards, replicas=ranks // shards, offload=offload)
