"""Predicts the memory of a rank: its training state under a strategy and engine, and the additional memory of a step.

The state follows Rajbhandari et al. 2020 (ZeRO, arXiv:1910.02054, section 3), with 4 bytes per weight and gradient,
which this trainer keeps in fp32 under every precision. For each way of distributing the state, one function returns the
memory that a rank needs, including the temporary buffers of the engine and of the optimizer step.
`benchmarks/memory.py` compares predictions with measurements on CPU ranks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass

from zerovision.models.activations import Activations
from zerovision.training.base.leaves import Leaves
from zerovision.training.engines.summation_tree import StepTree, plan_segment
from zerovision.training.engines.ways import ParallelPlan

FLOAT32_BYTES = 4
# Memory of a GPU process besides its tensors (assumed values, not measured here): the CUDA context with the workspaces
# of cuDNN and NCCL, and fragments that PyTorch's allocator cannot use, as a share of the tensors.
CUDA_CONTEXT_BYTES = 1_500_000_000
# cuBLAS workspaces of the forward and the backward thread, counted by PyTorch's allocator: 32 MiB each on Hopper.
BLAS_BYTES = 2 * 32 << 20
ALLOCATOR_SLACK = 0.08


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a network, in elements; see `zerovision.planning.run_workload.sizes_of`."""

    parameters: int  # whether trained or not
    trained: int
    largest_parameter: int
    largest_block: int = 0  # of the repeated blocks, which FSDP2 gathers as a whole; 0 if there are none
    next_block: int = 0  # the larger neighbor of the largest block
    outside: int = 0  # outside all blocks, which FSDP2 gathers with the root module
    buffer_bytes: int = 0  # of the buffers, such as BatchNorm's statistics


@dataclass(frozen=True)
class RankShare:
    """One rank's part of a network."""

    sizes: ModelSizes  # of the whole network, or of the rank's stages
    activations: Activations  # of all micro-batches that the rank has in flight
    start: int = 0  # bytes needed before the network is divided, including a trial micro-batch on all of it


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that one rank needs, by purpose."""

    weights: int
    optimizer: int
    """The optimizer's copy of the weights, its moments, and running averages of the weights."""
    gradients: int
    buffers: int
    """Buffers, such as BatchNorm's statistics; on a GPU, also cuBLAS's workspace."""
    activations: int
    """Tensors that the forward pass saves for the backward pass."""
    workspace: int
    """Temporary tensors of the backward pass, and copies of a layer's weights while the layer is computed."""
    communication: int
    """Communication buckets, and gathered weights."""
    step: int
    """Temporary tensors at the end of a step, when the activations are freed."""
    later: int = 0
    """Bytes for gradients and communication that the backward pass has not yet allocated at its peak."""
    offloaded: int = 0
    """Bytes that are offloaded to CPU memory; the other fields do not include these bytes."""
    start: int = 0
    """Bytes in use before the network is divided among ranks: the whole weights, and a trial step with the weights."""
    overhead: int = 0
    """GPU overhead: the CUDA context, libraries' workspaces, and memory that the allocator cannot use."""

    @property
    def peak(self) -> int:
        """The peak in bytes, either in the backward pass or at the end of the step, when the activations are freed."""
        return self.tensors + self.overhead

    @property
    def tensors(self) -> int:
        """The peak without overhead, as `torch.cuda.max_memory_allocated` counts it."""
        state = self.weights + self.optimizer + self.buffers + self.gradients
        return max(
            state + max(self.activations + self.communication + self.workspace - self.later, self.step), self.start
        )


def plan_memory(
    share: RankShare,
    plan: ParallelPlan,
    engine: str,
    optimizer_values: float,
    accumulation_steps: int = 1,
    device: str = "cpu",
) -> MemoryPlan:
    """Predict the memory of one rank by plain arithmetic.

    `engine` is 'torch' or 'deepspeed'; `device` is 'cpu', for ranks on one machine, or 'cuda'. `optimizer_values` is
    the number of values kept per trained parameter: 2 for AdamW, plus 1 for each running average of the weights.
    """
    sizes, activations = share.sizes, share.activations
    ranks, accumulates = plan.shards * plan.replicas, accumulation_steps > 1
    if engine == "deepspeed":
        needs = _deepspeed(sizes, plan, ranks, on_cpu=device == "cpu")
    elif plan.zero_stage == 1:
        tree = StepTree(ranks, accumulation_steps)
        needs = _flat_buffers(sizes, plan, ranks, tree, shares_memory=device == "cpu" or ranks == 1)
    else:
        needs = _fsdp2(sizes, plan, Leaves(ranks, accumulation_steps, plan.gradient_shards))

    def missing(done: int, ready: Callable[[int], int]) -> float:
        """Return the bytes that the backward pass has yet to allocate after computing this many gradient elements."""
        left = 0 if accumulates else needs.gradients * (1 - max(ready(done), 0) / max(sizes.trained, 1))
        return left + max(needs.grows - FLOAT32_BYTES * done, 0)

    later = 0.0
    if needs.ready is not None:
        later = activations.workspace - max(taken - missing(done, needs.ready) for taken, done in activations.moments)
    versions = accumulation_steps if engine != "deepspeed" and accumulates else 0  # copies of BatchNorm's statistics
    found = MemoryPlan(
        weights=round(needs.weights + FLOAT32_BYTES * (sizes.parameters - sizes.trained)),
        optimizer=round(needs.copy + optimizer_values * FLOAT32_BYTES * sizes.trained / plan.shards),
        gradients=round(needs.gradients),
        buffers=sizes.buffer_bytes * (1 + versions),
        activations=activations.saved,
        workspace=max(activations.workspace, needs.forward),
        communication=round(needs.communication),
        step=round(needs.step),
        later=round(later),
        start=share.start,
    )
    return found if device == "cpu" else _on_gpu(found, engine, plan.offload)


@dataclass(frozen=True)
class _Needs:
    """Bytes that a rank needs for one way of distributing the training state."""

    weights: float
    gradients: float
    copy: float = 0
    """Bytes of the optimizer's copy of the weights."""
    ready: Callable[[int], int] | None = None
    """Function that returns how many computed gradient elements are in their final place; None if gradients keep their
    memory between steps."""
    communication: float = 0
    """Bytes of communication buffers at the peak of the backward pass."""
    grows: float = 0
    """Bytes of communication buffers that are allocated during the backward pass."""
    forward: int = 0
    """Bytes of temporary copies while the forward pass gathers weights."""
    step: float = 0
    """Bytes of temporary tensors at the end of a step."""


def _flat_buffers(sizes: ModelSizes, plan: ParallelPlan, ranks: int, tree: StepTree, *, shares_memory: bool) -> _Needs:
    """Return the bytes for stage 1 of PyTorch's engine, where gradients and their sums keep their memory between steps.

    Ranks that share memory share one copy of the weights, a part of which is attributed to each rank; other ranks
    receive the sums of all ranks for their own part.
    """
    whole, part = _whole_and_part(sizes, plan)
    # Full-size gradients: the running sum, and the sums that the tree sets aside.
    rows = max(tree.rows_sent, 1 + max(segment.most_parked for segment in tree.segments))
    sums = part if ranks > 1 else 0
    received = 0 if shares_memory else whole
    return _Needs(part if shares_memory else whole, rows * whole + sums + received)


def _fsdp2(sizes: ModelSizes, plan: ParallelPlan, leaves: Leaves) -> _Needs:
    """Return the bytes for stages 2 and 3 of PyTorch's engine; a single rank has plain parameters.

    Besides its own part, a rank keeps all weights at stage 2. At stage 3, it keeps the weights outside all blocks and
    those of a neighbor of the largest block, because the next block is gathered while one block's gradients are sent.
    The largest block's gradients are copied and sent as a whole; those outside all blocks are sent at the end of the
    backward pass.
    """
    whole, part = _whole_and_part(sizes, plan)
    # The largest number of partial gradient sums that a rank keeps from one micro-step to the next.
    total, ends = leaves.ranks * leaves.per_rank, range(1, leaves.per_rank)
    kept = max((len(plan_segment(0, end * leaves.in_turn, total).nodes) for end in ends), default=0)
    if leaves.ranks == 1:
        return _Needs(whole, (1 + kept) * whole, ready=lambda done: done)
    gathered = sizes.trained if plan.zero_stage == 2 else sizes.next_block + sizes.outside
    sent = FLOAT32_BYTES * (2 * sizes.largest_block + sizes.outside)
    most = FLOAT32_BYTES * gathered + sent
    return _Needs(
        part,
        max(1, kept) * part,  # in the last micro-step, the data to send takes the place of the sums
        ready=lambda done: done - sizes.outside,
        communication=most,
        grows=sent,
        step=most + FLOAT32_BYTES * sizes.outside,
    )


def _deepspeed(sizes: ModelSizes, plan: ParallelPlan, ranks: int, *, on_cpu: bool) -> _Needs:
    """Return the bytes for DeepSpeed, which keeps a copy of the weights for the optimizer at every stage.

    A bucket's gradients are copied into one tensor for sending, and their norm is computed in fp64. On a CPU, only the
    part of a bucket that is written is allocated. Stage 3 keeps gradients between steps, and its CPU ranks copy the
    weights that they gather, up to one bucket at a time.
    """
    whole, part = _whole_and_part(sizes, plan)
    shards_gradients, shards_weights = plan.zero_stage > 1, plan.zero_stage > 2
    bucket, largest = plan.bucket_elements, sizes.largest_parameter
    alone = largest if largest > bucket else 0  # sent without a bucket
    buckets = (0, 2, 1)[plan.zero_stage - 1] * bucket
    filled = FLOAT32_BYTES * (min(buckets, sizes.trained - alone) if on_cpu else buckets)
    sent = FLOAT32_BYTES * max(min(bucket, sizes.trained), alone)
    norm = 2 * FLOAT32_BYTES * min(largest, sizes.trained / plan.shards)
    gathers = shards_weights and ranks > 1
    return _Needs(
        part if shards_weights else whole,
        part if shards_gradients else whole,
        copy=part,
        ready=None if shards_weights else lambda done: done - (done % bucket if buckets else 0),
        communication=filled + gathers * whole,
        grows=filled if on_cpu and not shards_weights else 0,
        forward=sent if gathers and on_cpu else 0,
        step=max(part, filled + sent, filled * shards_weights + norm),
    )


def _whole_and_part(sizes: ModelSizes, plan: ParallelPlan) -> tuple[float, float]:
    """Return the bytes of one fp32 value per trained parameter, and the bytes of this rank's part of these values."""
    return FLOAT32_BYTES * sizes.trained, FLOAT32_BYTES * sizes.trained / plan.shards


def _on_gpu(found: MemoryPlan, engine: str, offload: str) -> MemoryPlan:
    """Add the GPU's overhead, and move offloaded state to CPU memory."""
    moved: tuple[str, ...] = ("optimizer", "gradients") if offload != "none" else ()
    if offload == "all" or (moved and engine == "torch"):
        moved += ("weights",)
    left = dataclasses.replace(
        found,
        buffers=found.buffers + BLAS_BYTES,
        offloaded=sum(getattr(found, name) for name in moved),
        **dict.fromkeys(moved, 0),
    )
    return dataclasses.replace(left, overhead=CUDA_CONTEXT_BYTES + round(ALLOCATOR_SLACK * left.tensors))
