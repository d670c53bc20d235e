"""The memory that the planner predicts for sizes which a run tries."""

from __future__ import annotations

from collections.abc import Sequence

from zerovision.planning.machines import CPU, Gpu, Machine
from zerovision.planning.search import PlannedJob, memory_of
from zerovision.training.config import TrainConfig
from zerovision.training.prepare import RunFacts


def plan_memory(facts: RunFacts, configs: Sequence[TrainConfig]) -> list[int]:
    """Predict the bytes of a rank's tensors at most, for each of several configurations of a run.

    Args:
        facts: of the run, whose `config` says what network and update rule it has.
        configs: as they differ in batch size, strategy, offload and activation checkpointing.

    Raises:
        UserError: if the network cannot be counted, or the engine does not do what is asked for.
    """
    machine = Machine(Gpu("gpu" if facts.has_gpus else CPU, memory_bytes=0), facts.ranks_per_machine)
    job = PlannedJob(facts.config, machine, facts.ranks, facts.classes, facts.image_size, images=0)
    return [memory_of(job, config)[2].tensors for config in configs]
