"""The table of strategies, each as a plan in numbers: what is sharded, over how many ranks, in how many copies.

Engines are built from a plan, and nothing else reads one. This module imports neither torch nor deepspeed.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from zerovision.training.base.errors import UserError


@dataclass(frozen=True)
class ParallelPlan:
    """How the state of a training is distributed over replicas x shards x tensor_parallel x pipeline_parallel ranks.

    Attributes:
        zero_stage: what the shards divide: 1 the optimizer's state, 2 the gradients too, 3 the weights too.
        shards: ranks over which one copy of that state is divided.
        replicas: copies of it.
        offload: what is kept in CPU memory: 'none', 'optimizer' (its state) or 'all' (the weights too).
        bucket_elements: most gradient elements of one message.
        tensor_parallel: ranks that share the arithmetic of every layer.
        pipeline_parallel: ranks that have consecutive layers.
    """

    zero_stage: int
    shards: int = 1
    replicas: int = 1
    offload: str = "none"
    bucket_elements: int = 50_000_000
    tensor_parallel: int = 1
    pipeline_parallel: int = 1

    @property
    def releases_weights(self) -> bool:
        """Whether a rank frees the other shards' weights when it does not compute with them."""
        return self.zero_stage == 3

    @property
    def neighbours(self) -> int:
        """Ranks among which gradients are divided: 1 at stage 1, where each rank keeps whole ones.

        Copies on one rank each would be whole ones: FSDP2 divides these all the same.
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


def plan_of(
    strategy: str,
    ranks: int,
    offload: str = "none",
    shards: int = 0,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
) -> ParallelPlan:
    """Return the plan of a strategy, a key of `STRATEGIES`.

    Args:
        strategy: its name.
        ranks: on all machines, those that read different images.
        offload: as in `ParallelPlan`.
        shards: ranks over which one copy of the training state is divided, a divisor of `ranks`; 0 for all of them.
        tensor_parallel: as in `ParallelPlan`.
        pipeline_parallel: as in `ParallelPlan`.
    """
    shards = shards or ranks
    return dataclasses.replace(
        STRATEGIES[strategy],
        shards=shards,
        replicas=ranks // shards,
        offload=offload,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
    )


def stages_per_rank(schedule: str) -> int:
    """Return the stages of each rank of a pipeline: an interleaved schedule goes round twice."""
    return 2 if schedule == "interleaved" else 1


def bubble(ranks: int, schedule: str, micro_batches: int) -> float:
    """Return the share of a step in which a rank of a pipeline waits, if all stages take equally long.

    Narayanan et al. 2021 (https://arxiv.org/abs/2104.04473), section 2.2; arguments as of `check_micro_batches`.
    """
    return (ranks - 1) / (micro_batches * stages_per_rank(schedule) + ranks - 1)


def check_micro_batches(schedule: str, stages: int, micro_batches: int) -> None:
    """Check that a schedule can pass a step's micro-batches through a pipeline.

    Args:
        schedule: of `EngineSettings.pipeline_schedule`.
        stages: ranks of the pipeline.
        micro_batches: of each of its steps.

    Raises:
        UserError: with what to type.
    """
    flag = f"--pipeline-schedule {schedule}"
    if micro_batches < stages:
        raise UserError(
            f"{flag}: {stages} ranks need {stages} micro-batches or more in a step, which has {micro_batches}: use "
            f"--gradient-accumulation-steps {stages}, or more, with a smaller batch size."
        )
    rounds = micro_batches // stages
    if schedule == "interleaved" and micro_batches % rounds:
        raise UserError(
            f"{flag}: {micro_batches} micro-batches do not fill whole rounds of {stages} ranks: use "
            f"--gradient-accumulation-steps {rounds * stages} or {(rounds + 1) * stages}, or 1f1b."
        )
