"""A run's memory as the planner predicts it: for sizes that it tries, and to stand beside what was measured."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from zerovision.models.activations import BLOCKED_COPIES, LARGEST_KEPT_BYTES
from zerovision.planning.machines import CPU, Gpu, Machine
from zerovision.planning.memory import FLOAT32_BYTES, MemoryPlan
from zerovision.planning.run_workload import Workload
from zerovision.planning.search import PlannedJob, memory_of
from zerovision.training.base.atomic_write import write_json
from zerovision.training.base.run_folder import PREDICTION
from zerovision.training.config import TrainConfig
from zerovision.training.engines.activation_checkpointing import repeated_blocks
from zerovision.training.engines.strategies import STRATEGIES
from zerovision.training.observe.environment import RunFacts

# Of a rank's process on a CPU, fitted to trainings of some models there, see docs/memory.md: code and tables that are
# loaded after the engine's choice (kernels, FSDP2, DeepSpeed itself), and what the heap grows by in the first steps
# because batches lie between a step's pieces; and of the activations, what the C library keeps of freed memory.
LOADED_LATER_BYTES = {"torch": 66_000_000, "deepspeed": 156_000_000}
ALLOCATOR_SLACK = 0.17
# Of FSDP2, besides: its code, less what the heap grows by, which is part of what follows; how often a step of stage 3
# makes and frees a copy of a whole block (what is gathered, in forward and in backward; what is sent and received of
# the gradients), and of each parameter (laid out, as often; the gradient); and which share of these pieces malloc keeps
# beside those in use, as measured under both stages: memalign of glibc before 2.38 takes no freed piece of the very
# size that it is asked for (https://sourceware.org/bugzilla/show_bug.cgi?id=14581).
FSDP2_BYTES = -14_000_000
FSDP2_COPIES = (4, 3)
FSDP2_SLACK = 0.45


def plan_memory(facts: RunFacts, configs: Sequence[TrainConfig]) -> list[int]:
    """Predict the bytes of a rank's tensors at most, for each of several configurations of a run.

    Args:
        facts: of the run, whose `config` says what network and update rule it has.
        configs: as they differ in batch size, strategy, offload and activation checkpointing.

    Raises:
        UserError: if the network cannot be counted, or the engine does not do what is asked for.
    """
    job = job_of(facts)
    return [memory_of(job, config)[2].tensors for config in configs]


def write_prediction(facts: RunFacts) -> None:
    """Write `predict_run` into the run's folder, as `PREDICTION`; whatever fails, a run goes on without."""
    with contextlib.suppress(Exception):
        write_json(Path(facts.folder) / PREDICTION, predict_run(facts))


def predict_run(facts: RunFacts) -> dict[str, Any]:
    """Return the bytes of a rank by part, for JSON: on a GPU of its tensors, on a CPU of its whole process.

    Raises:
        UserError: if the network cannot be counted.
    """
    job = job_of(facts)
    engine, _, memory = memory_of(job, job.config)
    process = 0 if facts.gpu_name else _process_bytes(facts, engine, memory, job.workload)
    saving = 0 if facts.gpu_name else _saving_bytes(facts, memory, job.workload)
    parts = dataclasses.asdict(memory) | {"process": process, "saving": saving}
    return {"memory_bytes": parts | {"peak": memory.tensors + process + saving}}


def job_of(facts: RunFacts) -> PlannedJob:
    """Return a run as the planner sees it, with the engine and the precision that were resolved."""
    machine = Machine(Gpu(facts.gpu_name or CPU, memory_bytes=0), facts.ranks_per_machine)
    config = TrainConfig(**facts.config | {"engine": facts.engine, "precision": facts.precision})
    return PlannedJob(config, machine, facts.ranks, facts.classes, facts.image_size, images=0)


def _process_bytes(facts: RunFacts, engine: str, memory: MemoryPlan, workload: Workload) -> int:
    """Return the bytes of a CPU rank's process beside what the plan counts.

    The process as it was before the engine was built, without the model, which the plan counts; what it loads later;
    what its allocator keeps; pages that it shares with other ranks, of which the plan charges it a part and the kernel
    counts all: the weights, and the others' sums of its part of the gradients.
    """
    sizes = workload.sizes
    whole = FLOAT32_BYTES * sizes.parameters
    is_whole = STRATEGIES[facts.config["strategy"]].zero_stage == 1
    loaded = LOADED_LATER_BYTES[engine] + (FSDP2_BYTES if engine == "torch" and not is_whole else 0)
    shared = 2 * whole * (1 - 1 / _data_ranks(facts)) if engine == "torch" and is_whole else 0
    slack = ALLOCATOR_SLACK * memory.activations
    if engine == "torch" and not is_whole and _data_ranks(facts) > 1:
        slack += FSDP2_SLACK * _copied_bytes(workload.network, *FSDP2_COPIES)
    return round(facts.process_bytes - whole - sizes.buffer_bytes + loaded + slack + shared)


def _copied_bytes(network: nn.Module, of_blocks: int, of_parameters: int) -> int:
    """Return the bytes of so many copies of each block and of each parameter, in pieces that malloc keeps.

    With oneDNN's own of what spatial convolutions have, depthwise ones left out, see `zerovision.models.activations`.
    """
    blocks = [sum(parameter.nbytes for parameter in block.parameters()) for block in repeated_blocks(network)]
    parameters = [parameter.nbytes for parameter in network.parameters()]
    layers = [layer for layer in network.modules() if isinstance(layer, nn.Conv2d) and layer.groups == 1]
    convolutions = [layer.weight.nbytes for layer in layers if layer.weight[0, 0].numel() > 1]
    every = ((of_blocks, blocks), (of_parameters, parameters), (BLOCKED_COPIES + 1, convolutions))
    return sum(copies * size for copies, sizes in every for size in sizes if size <= LARGEST_KEPT_BYTES)


def _data_ranks(facts: RunFacts) -> int:
    return facts.ranks // (facts.config["tensor_parallel"] * facts.config["pipeline_parallel"])


def _saving_bytes(facts: RunFacts, memory: MemoryPlan, workload: Workload) -> int:
    """Return the bytes of rank 0's process that saving, and the evaluation in full at the end, add to the peak.

    A checkpoint is written from a copy of the rank's part of the state, which stays, and the best weights from a whole
    one, both while the next epoch begins. After the last epoch the activations are gone, except what malloc keeps: the
    weights find room there, the copy of the state has pages of its own. The evaluation loads the weights once more,
    when the whole ones of the saving are gone.
    """
    sizes, epochs, every = workload.sizes, facts.config["epochs"], facts.config["save_every_steps"]
    state = FLOAT32_BYTES * sizes.trained * (1 + workload.optimizer_values) / _data_ranks(facts) + sizes.buffer_bytes
    weights = FLOAT32_BYTES * sizes.parameters + sizes.buffer_bytes
    if epochs > 1:
        return round(state + weights)
    at_the_end = memory.held + max(memory.heap, weights) + state - memory.tensors
    return round(max(at_the_end + weights, state if every else 0, 0))
