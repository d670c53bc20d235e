"""Predicts the memory of a rank: the training state under its strategy and engine, and what a step needs beside it.

The state follows Rajbhandari et al. 2020 (ZeRO, arXiv:1910.02054, section 3) with 4 bytes for weights and gradients,
which are fp32 here under every precision. Added are temporary buffers of the engine and of the optimizer's step.
`benchmarks/memory.py` compares with measurements on CPU ranks.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from models.activations import Activations
from training.parallel.strategies import ParallelPlan
from training.parallel.summation_tree import StepTree

FLOAT32_BYTES = 4
# Of a GPU's process beside its tensors, stated, not measured here: the CUDA context with cuBLAS', cuDNN's and NCCL's
# workspaces; and what PyTorch's allocator keeps in pieces that it cannot use, a share of the tensors.
CUDA_CONTEXT_BYTES = 1_500_000_000
ALLOCATOR_SLACK = 0.08
# oneDNN, which computes on a CPU, works on copies in layouts of its own: of a layer's weights, and of their gradient
# before it is brought back. VGG-16's first dense layer alone has three quarters of its weights.
CPU_LAYER_COPIES = 3


@dataclass(frozen=True)
class ModelSizes:
    """A network in numbers, from `planning.run_workload.sizes_of`.

    Attributes:
        parameters: elements, trained or not.
        trained: elements that are trained.
        largest_parameter: elements of the largest parameter.
        largest_block: of the repeated block with the most elements, that FSDP2 gathers at once; 0 without blocks.
        outside: elements of what is in no block, and gathered with the whole network.
        buffer_bytes: of what is no parameter, such as BatchNorm's statistics.
    """

    parameters: int
    trained: int
    largest_parameter: int
    largest_block: int = 0
    outside: int = 0
    buffer_bytes: int = 0


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
    """Whether gradients are added along the native engine's tree."""
    accumulates_whole: bool = False
    """Whether accumulation keeps a whole sum of gradients that are otherwise sharded."""
    gradients_stay: bool = False
    """Whether the gradients' memory stays taken between the steps."""
    adds_gradients: bool = False
    """Whether a layer's gradient exists temporarily beside the memory that it is added to."""
    whole_moments: bool = False
    """Whether every rank has the optimizer's whole state, unless each updates some of the matrices for all."""
    step: float = 0
    """Sharded values that the optimizer's step needs temporarily."""
    buckets: float = 0
    """Communication buckets, each as large as the smaller of the bucket's size and the model."""
    held_buckets: float = 0
    """Buckets that stay between the steps."""
    gathered: float = 0
    """Whole weights that forward and backward gather temporarily, if there is more than one rank."""
    gathered_blocks: float = 0
    """The same of the largest block, beside what is in no block."""
    block_gradients: float = 0
    """Copies of the gradients of the largest block, or of what is in none, while they are sent."""


# The native engine's CPU ranks on one machine share one copy of the weights, of which each is charged its part.
NATIVE_SHARED = StateRule(
    sharded_weights=1, gradients=1, sums=1, parks_sums=True, gradients_stay=True, adds_gradients=True
)
_NATIVE = StateRule(
    weights=1, gradients=1, sums=1, received=1, parks_sums=True, gradients_stay=True, adds_gradients=True
)
# By engine and ZeRO stage. DeepSpeed keeps a copy of the weights for the optimizer at every stage.
STATE_RULES: dict[tuple[str, int], StateRule] = {
    ("deepspeed", 1): StateRule(weights=1, sharded_copy=1, gradients=1, step=1),
    ("deepspeed", 2): StateRule(weights=1, sharded_copy=1, sharded_gradients=1, step=1, buckets=2, held_buckets=1),
    ("deepspeed", 3): StateRule(
        sharded_weights=1,
        sharded_copy=1,
        sharded_gradients=1,
        gradients_stay=True,
        buckets=1,
        held_buckets=1,
        gathered=1,
        adds_gradients=True,
    ),
    ("native", 1): _NATIVE,
    ("native", 2): _NATIVE,
    ("native", 3): StateRule(
        sharded_weights=1,
        gathered=1,
        gradients=1,
        sums=1,
        received=1,
        parks_sums=True,
        gradients_stay=True,
        adds_gradients=True,
    ),
    ("torch", 1): StateRule(weights=1, gradients=1, gradients_stay=True, adds_gradients=True, whole_moments=True),
    ("torch", 2): StateRule(
        sharded_weights=1, sharded_gradients=1, accumulates_whole=True, gathered=1, block_gradients=2
    ),
    ("torch", 3): StateRule(
        sharded_weights=1, sharded_gradients=1, accumulates_whole=True, gathered_blocks=2, block_gradients=2
    ),
}
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
    """What is not trained, such as BatchNorm's statistics."""
    activations: int
    """Tensors that forward saves for backward."""
    workspace: int
    """Temporary tensors of backward, and copies of the largest layer's weights while it is computed."""
    communication: int
    """Buckets, and gathered weights."""
    step: int
    """Temporary tensors of the end of a step, when the activations are gone."""
    stays: int
    """Of gradients and communication, bytes that stay taken between the steps."""
    offloaded: int = 0
    """Bytes in CPU memory instead, in none of the fields above."""
    overhead: int = 0
    """Of a GPU: context, libraries' workspaces, and what the allocator cannot use."""

    @property
    def held(self) -> int:
        """Bytes between two steps, without overhead."""
        return self.weights + self.optimizer + self.buffers + self.stays

    @property
    def peak(self) -> int:
        """Bytes at most: in backward, or at the end of the step, when the activations are gone."""
        return self.tensors + self.overhead

    @property
    def tensors(self) -> int:
        """The same without overhead, as `torch.cuda.max_memory_allocated` counts."""
        state = self.weights + self.optimizer + self.buffers + self.gradients
        return state + max(self.activations + self.communication + self.workspace, self.step)


def plan_memory(
    *,
    sizes: ModelSizes,
    engine: str,
    plan: ParallelPlan,
    optimizer_values: float,
    activations: Activations,
    accumulation_steps: int = 1,
    device: str = "cpu",
    updates_matrices: bool = False,
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
        updates_matrices: whether the rule is one of `MATRIX_RULES`, which PyTorch's engine deals out to the ranks.
    """
    ranks = plan.shards * plan.replicas
    shares = device == "cpu" or ranks == 1
    rule = NATIVE_SHARED if engine == "native" and shares else STATE_RULES[engine, plan.zero_stage]
    whole, part = FLOAT32_BYTES * sizes.trained, FLOAT32_BYTES * sizes.trained / plan.shards
    others = ranks > 1
    rows = _rows(rule, ranks, accumulation_steps)
    gradients = rule.gradients * rows * whole + rule.sharded_gradients * part
    gradients += (rule.sums * part + rule.received * whole) if others else 0
    if rule.accumulates_whole and accumulation_steps > 1:
        gradients += whole
    bucket = FLOAT32_BYTES * min(plan.bucket_elements, sizes.trained)
    blocks = FLOAT32_BYTES * (rule.gathered_blocks * sizes.largest_block + bool(rule.gathered_blocks) * sizes.outside)
    gathered = (rule.gathered * whole if others else 0) + blocks
    sent = rule.block_gradients * FLOAT32_BYTES * max(sizes.largest_block, sizes.outside)
    layer = FLOAT32_BYTES * sizes.largest_parameter
    copies = CPU_LAYER_COPIES * layer if device == "cpu" else 0
    frozen = FLOAT32_BYTES * (sizes.parameters - sizes.trained)
    versions = accumulation_steps if rule.parks_sums and accumulation_steps > 1 else 0  # of BatchNorm's statistics
    deals = rule.whole_moments and updates_matrices and others
    moments = optimizer_values * (whole if rule.whole_moments and not deals else part)
    return _placed(
        MemoryPlan(
            weights=round(rule.weights * whole + rule.sharded_weights * part + frozen),
            optimizer=round(rule.sharded_copy * part + moments),
            gradients=round(gradients),
            buffers=sizes.buffer_bytes * (1 + versions),
            activations=activations.saved,
            workspace=round(max(activations.workspace - (not rule.adds_gradients) * layer, 0) + copies),
            communication=round(rule.buckets * bucket + gathered + sent),
            step=round(rule.step * part + deals * (whole + part)),
            stays=round(rule.held_buckets * bucket + (gradients if rule.gradients_stay else 0)),
        ),
        engine,
        plan.offload,
        device,
    )


def _rows(rule: StateRule, ranks: int, accumulation_steps: int) -> int:
    """Whole gradients of a rank: the running sum, and those that the tree sets aside."""
    if not rule.parks_sums:
        return 1
    tree = StepTree(ranks, accumulation_steps)
    return max(tree.rows_sent, 1 + max(segment.most_parked for segment in tree.segments))


def _placed(found: MemoryPlan, engine: str, offload: str, device: str) -> MemoryPlan:
    """Move what is offloaded from a GPU, and add a GPU's overhead."""
    if device == "cpu":
        return found
    moved = OFFLOADED[engine, offload] if offload != "none" else ()
    offloaded = sum(getattr(found, name) for name in moved)
    left = dataclasses.replace(found, offloaded=offloaded, **dict.fromkeys(moved, 0))
    return dataclasses.replace(left, overhead=CUDA_CONTEXT_BYTES + round(ALLOCATOR_SLACK * left.tensors))
