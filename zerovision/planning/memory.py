"""Predicts the memory of a rank: the training state under its strategy and engine, and what a step needs beside it.

The state follows Rajbhandari et al. 2020 (ZeRO, arXiv:1910.02054, section 3) with 4 bytes for weights and gradients,
which are fp32 here under every precision; `STATE_RULES` has what a rank has of it, by engine and stage. Added are
temporary buffers of the engine and of the optimizer's step. `benchmarks/memory.py` compares with measurements on CPU
ranks.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from zerovision.models.activations import Activations
from zerovision.training.base.leaves import Leaves
from zerovision.training.engines.strategies import ParallelPlan
from zerovision.training.engines.summation_tree import StepTree, plan_segment


@dataclass(frozen=True)
class StateRule:
    """fp32 values per trained parameter on a rank; sharded ones are divided among the ranks of a replica."""

    weights: float = 0
    sharded_weights: float = 0
    sharded_copy: float = 0
    """Of the weights, for the optimizer."""
    gradients: float = 0
    """Whole gradients, once for each sum that accumulation sets aside if `parks_sums`."""
    sharded_gradients: float = 0
    sums: float = 0
    """Sharded sums of the gradients over the ranks, if there is more than one rank."""
    received: float = 0
    """Other ranks' sums of this rank's part, if there is more than one rank."""
    parks_sums: bool = False
    """Whether gradients are added along the tree of PyTorch's engine."""
    keeps_sums: bool = False
    """Whether accumulation keeps sums of sharded gradients, as the tree says, from one micro-step to the next."""
    gradients_stay: bool = False
    """Whether the gradients' memory stays taken between the steps; else backward takes it as it computes them."""
    step: float = 0
    """Sharded values that the optimizer's step needs temporarily."""
    buckets: int = 0
    """Communication buckets, which stay if the gradients do. A CPU gives memory to what is written of them."""
    flattens: bool = False
    """Whether the gradients of a bucket are copied into one tensor to be sent, and their norm is taken in fp64."""
    gathered: float = 0
    """Whole weights that forward and backward gather temporarily, if there is more than one rank."""
    gathers_blocks: bool = False
    """Whether these are only those of a block next to the largest, beside what is in no block: while the gradients of
    one are sent, the next is gathered."""
    gathers_twice: bool = False
    """Whether CPU ranks gather into memory that is copied, up to a bucket of weights at once."""
    channels_last: bool = False
    """Whether the weights of convolutions are in the images' order of dimensions."""
    block_gradients: float = 0
    """Whole gradients of the largest block, and a copy of them, while they are sent; those of what is in no block are
    sent when backward ends."""


# By engine and ZeRO stage. DeepSpeed keeps a copy of the weights for the optimizer at every stage.
STATE_RULES: dict[tuple[str, int], StateRule] = {
    ("deepspeed", 1): StateRule(weights=1, sharded_copy=1, gradients=1, step=1, flattens=True),
    ("deepspeed", 2): StateRule(weights=1, sharded_copy=1, sharded_gradients=1, step=1, buckets=2, flattens=True),
    ("deepspeed", 3): StateRule(
        sharded_weights=1,
        sharded_copy=1,
        sharded_gradients=1,
        gradients_stay=True,
        step=1,
        buckets=1,
        flattens=True,
        gathered=1,
        gathers_twice=True,
    ),
    ("torch", 1): StateRule(
        weights=1, gradients=1, sums=1, received=1, parks_sums=True, gradients_stay=True, channels_last=True
    ),
    ("torch", 2): StateRule(sharded_weights=1, sharded_gradients=1, keeps_sums=True, gathered=1, block_gradients=2),
    ("torch", 3): StateRule(
        sharded_weights=1, sharded_gradients=1, keeps_sums=True, gathers_blocks=True, block_gradients=2
    ),
}
# At stage 1 PyTorch's engine shares one copy of the weights between a machine's CPU ranks: each is charged its part.
SHARED = StateRule(sharded_weights=1, gradients=1, sums=1, parks_sums=True, gradients_stay=True, channels_last=True)
# One rank has plain parameters under PyTorch's engine at stages 2 and 3.
ALONE = StateRule(weights=1, gradients=1, keeps_sums=True)


FLOAT32_BYTES = 4
# Of a GPU's process beside its tensors, stated, not measured here: the CUDA context with cuDNN's and NCCL's workspaces;
# and what PyTorch's allocator keeps in pieces that it cannot use, a share of the tensors.
CUDA_CONTEXT_BYTES = 1_500_000_000
# cuBLAS' workspaces for forward's thread and backward's, which PyTorch's allocator counts: 32 MiB each on Hopper.
BLAS_BYTES = 2 * 32 << 20
ALLOCATOR_SLACK = 0.08


@dataclass(frozen=True)
class ModelSizes:
    """A network in numbers, from `zerovision.planning.run_workload.sizes_of`.

    Attributes:
        parameters: elements, trained or not.
        trained: elements that are trained.
        largest_parameter: elements of the largest parameter.
        largest_block: of the repeated block with the most elements, that FSDP2 gathers at once; 0 without blocks.
        next_block: of the larger one before or after it.
        outside: elements of what is in no block, and gathered with the whole network.
        buffer_bytes: of what is no parameter, such as BatchNorm's statistics.
    """

    parameters: int
    trained: int
    largest_parameter: int
    largest_block: int = 0
    next_block: int = 0
    outside: int = 0
    buffer_bytes: int = 0


# What an offload moves to CPU memory, of the fields of `MemoryPlan`, by engine: the others do not offload.
_OPTIMIZER = ("optimizer", "gradients")
OFFLOADED = {
    ("deepspeed", "optimizer"): _OPTIMIZER,
    ("deepspeed", "all"): (*_OPTIMIZER, "weights"),
    ("torch", "optimizer"): (*_OPTIMIZER, "weights"),
    ("torch", "all"): (*_OPTIMIZER, "weights"),
}


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that one rank needs, by purpose."""

    weights: int
    optimizer: int
    """The optimizer's copy of the weights, its moments, and averages of the weights."""
    gradients: int
    buffers: int
    """What is not trained, such as BatchNorm's statistics; on a GPU also what cuBLAS works in."""
    activations: int
    """Tensors that forward saves for backward."""
    workspace: int
    """Temporary tensors of backward, and copies of a layer's weights while it is computed."""
    communication: int
    """Buckets, and gathered weights."""
    step: int
    """Temporary tensors of the end of a step, when the activations are gone."""
    later: int = 0
    """Of gradients and communication, bytes that backward has not taken yet when all in all it needs most."""
    offloaded: int = 0
    """Bytes in CPU memory instead, in none of the fields above."""
    start: int = 0
    """What a rank has before the network is divided: whole weights, and what is tried with them."""
    overhead: int = 0
    """Of a GPU: context, libraries' workspaces, and what the allocator cannot use."""

    @property
    def peak(self) -> int:
        """Bytes at most: in backward, or at the end of the step, when the activations are gone."""
        return self.tensors + self.overhead

    @property
    def tensors(self) -> int:
        """The same without overhead, as `torch.cuda.max_memory_allocated` counts."""
        state = self.weights + self.optimizer + self.buffers + self.gradients
        return max(
            state + max(self.activations + self.communication + self.workspace - self.later, self.step), self.start
        )


def plan_memory(
    *,
    sizes: ModelSizes,
    engine: str,
    plan: ParallelPlan,
    optimizer_values: float,
    activations: Activations,
    accumulation_steps: int = 1,
    device: str = "cpu",
    images_ahead: int = 0,
    start: int = 0,
) -> MemoryPlan:
    """Predict the bytes of one rank; plain arithmetic.

    Args:
        sizes: of the model.
        engine: with the plan's stage a key of `STATE_RULES`.
        plan: how the state is distributed.
        optimizer_values: that the optimizer keeps per trained parameter: 2 for AdamW, and 1 for each average.
        activations: of one micro-batch.
        accumulation_steps: micro-steps of an update.
        device: 'cpu' or 'cuda'; CPU ranks are those of one machine.
        images_ahead: bytes of the next micro-batch, which a GPU has while it computes with one.
        start: bytes before the network is divided.
    """
    ranks = plan.shards * plan.replicas
    shares = device == "cpu" or ranks == 1
    rule = STATE_RULES[engine, plan.zero_stage]
    if engine == "torch" and (ranks == 1 or (shares and plan.zero_stage == 1)):
        rule = SHARED if plan.zero_stage == 1 else ALONE
    traffic = _traffic(rule, sizes, plan, ranks, device)
    whole, part = FLOAT32_BYTES * sizes.trained, FLOAT32_BYTES * sizes.trained / plan.shards
    others, accumulates = ranks > 1, accumulation_steps > 1
    rows = _rows(ranks, accumulation_steps) if rule.parks_sums else 1
    kept = _sums_kept(Leaves(ranks, accumulation_steps, plan.neighbours)) if rule.keeps_sums else 0
    # What ranks send each other takes the place of the sums in the last micro-step.
    sharded = max(rule.sharded_gradients, kept)
    computed = rule.gradients * rows * whole + sharded * part
    gradients = computed + ((rule.sums * part + rule.received * whole) if others else 0)
    later = 0.0
    if not rule.gradients_stay:

        def missing(done: int) -> float:
            ready = done - done % plan.bucket_elements if rule.buckets else done - traffic.outside
            of_gradients = 0 if accumulates else computed * (1 - max(ready, 0) / max(sizes.trained, 1))
            return of_gradients + max(traffic.grows - FLOAT32_BYTES * done, 0)

        later = activations.workspace - max(at_once - missing(done) for at_once, done in activations.moments)
    frozen = FLOAT32_BYTES * (sizes.parameters - sizes.trained)
    versions = accumulation_steps if engine != "deepspeed" and accumulates else 0  # of BatchNorm's statistics
    moments = optimizer_values * part
    return _placed(
        MemoryPlan(
            weights=round(rule.weights * whole + rule.sharded_weights * part + frozen),
            optimizer=round(rule.sharded_copy * part + moments),
            gradients=round(gradients),
            buffers=sizes.buffer_bytes * (1 + versions) + (0 if device == "cpu" else BLAS_BYTES),
            activations=activations.saved + (0 if device == "cpu" else images_ahead),
            workspace=max(activations.workspace, traffic.forward),
            communication=round(traffic.most),
            step=round(max(rule.step * part, traffic.step)),
            later=round(later),
            start=start,
        ),
        engine,
        plan.offload,
        device,
    )


@dataclass(frozen=True)
class _Traffic:
    """Bytes of a rank's communication: in backward at most, of which so many are taken as backward goes on; copies
    in forward and at the end of the step; and the elements whose gradients are sent when backward ends."""

    most: float
    grows: float
    forward: int
    step: float
    outside: int


def _traffic(rule: StateRule, sizes: ModelSizes, plan: ParallelPlan, ranks: int, device: str) -> _Traffic:
    on_cpu, largest = device == "cpu", sizes.largest_parameter
    alone = largest if largest > plan.bucket_elements else 0  # sent without a bucket
    filled = rule.buckets * plan.bucket_elements
    filled = FLOAT32_BYTES * (min(filled, sizes.trained - alone) if on_cpu else filled)
    sent = FLOAT32_BYTES * max(min(plan.bucket_elements, sizes.trained), alone)
    outside = sizes.outside if rule.block_gradients else 0
    gathered = rule.gathered if ranks > 1 else 0
    blocks = sizes.next_block + sizes.outside if rule.gathers_blocks else 0
    weights = FLOAT32_BYTES * (gathered * sizes.trained + blocks)
    gradients = FLOAT32_BYTES * (rule.block_gradients * sizes.largest_block + outside)
    most = filled + weights + gradients
    step = most + FLOAT32_BYTES * outside
    if rule.flattens:
        norm = 2 * FLOAT32_BYTES * min(largest, sizes.trained / plan.shards)
        step = max(filled + sent, filled * rule.gradients_stay + norm)
    return _Traffic(
        most=most,
        grows=gradients + (filled if on_cpu and not rule.gradients_stay else 0),
        forward=sent if rule.gathers_twice and ranks > 1 and on_cpu else 0,
        step=step,
        outside=outside,
    )


def _rows(ranks: int, accumulation_steps: int) -> int:
    """Whole gradients of a rank: the running sum, and those that the tree sets aside."""
    tree = StepTree(ranks, accumulation_steps)
    return max(tree.rows_sent, 1 + max(segment.most_parked for segment in tree.segments))


def _sums_kept(leaves: Leaves) -> int:
    """Sums of a part of the gradients that a rank keeps from one micro-step to the next, at most."""
    total, ends = leaves.ranks * leaves.per_rank, range(1, leaves.per_rank)
    return max((len(plan_segment(0, end * leaves.in_turn, total).nodes) for end in ends), default=0)


def _placed(found: MemoryPlan, engine: str, offload: str, device: str) -> MemoryPlan:
    """Move what is offloaded from a GPU, and add a GPU's overhead."""
    if device == "cpu":
        return found
    moved = OFFLOADED[engine, offload] if offload != "none" else ()
    offloaded = sum(getattr(found, name) for name in moved)
    left = dataclasses.replace(found, offloaded=offloaded, **dict.fromkeys(moved, 0))
    return dataclasses.replace(left, overhead=CUDA_CONTEXT_BYTES + round(ALLOCATOR_SLACK * left.tensors))
