"""Predicts the memory of a rank: the training state under its strategy, and the activations.

The state follows Rajbhandari et al. 2020 (ZeRO, arXiv:1910.02054, section 3) with 4 bytes for weights and gradients,
which are fp32 here under every precision. Added are temporary buffers of the engine and of the optimizer's step.
`benchmarks/memory.py` compares with measurements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

FLOAT32_BYTES = 4
MOMENTS = {"adamw": 2, "lamb": 2, "sgd": 1}


@dataclass(frozen=True)
class StateRule:
    """fp32 values per parameter on a rank; sharded ones are divided among the ranks."""

    weights: float = 0
    sharded_weights: float = 0
    gradients: float = 0
    sharded_gradients: float = 0
    sums: float = 0
    """Sharded sums of the gradients over the ranks, if there is more than one rank."""
    gradients_stay: bool = False
    """Whether the gradients' memory stays taken between the steps."""
    step: float = 0
    """Sharded values that the optimizer's step needs temporarily."""
    buckets: float = 0
    """Communication buckets, each as large as the smaller of the bucket's size and the model."""
    held_buckets: float = 0
    """Buckets that stay between the steps."""
    gathered: float = 0
    """Whole weights that forward and backward gather temporarily, if there is more than one rank."""
    adds_gradients: bool = False
    """Whether a layer's gradient exists temporarily beside the memory that it is added to."""


# oneDNN, which computes on a CPU, works on copies in layouts of its own: of a layer's weights, and of their gradient
# before it is brought back. VGG-16's first dense layer alone has three quarters of its weights.
CPU_LAYER_COPIES = 3

# By engine and ZeRO stage. DeepSpeed keeps a copy of the weights for the optimizer at every stage. The native engine's
# CPU ranks share one copy of the weights, of which each is charged its part.
_NATIVE = StateRule(sharded_weights=1, gradients=1, sums=1, gradients_stay=True, adds_gradients=True)
STATE_RULES: dict[tuple[str, int], StateRule] = {
    ("deepspeed", 1): StateRule(weights=1, sharded_weights=1, gradients=1, step=1),
    ("deepspeed", 2): StateRule(weights=1, sharded_weights=1, sharded_gradients=1, step=1, buckets=2, held_buckets=1),
    ("deepspeed", 3): StateRule(
        sharded_weights=2,
        sharded_gradients=1,
        gradients_stay=True,
        buckets=1,
        held_buckets=1,
        gathered=1,
        adds_gradients=True,
    ),
    **{("native", stage): _NATIVE for stage in (1, 2, 3)},
}


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes that one rank needs, by purpose."""

    weights: int
    """Weights, and the optimizer's copy of them."""
    moments: int
    gradients: int
    buffers: int
    """What is not trained, such as BatchNorm's statistics."""
    activations: int
    """Tensors that forward saves for backward."""
    communication: int
    """Buckets, and gathered weights."""
    layer: int
    """Copies of the largest layer's weights while it is computed."""
    step: int
    """Temporary tensors of the optimizer's step."""
    stays: int
    """Of all these, bytes beside weights, moments and buffers that stay taken between the steps."""

    @property
    def held(self) -> int:
        """Bytes between two steps."""
        return self.weights + self.moments + self.buffers + self.stays

    @property
    def peak(self) -> int:
        """Bytes at most: at the end of backward, or in the optimizer's step, when the activations are gone."""
        state = self.weights + self.moments + self.buffers + self.gradients
        return state + max(self.activations + self.communication + self.layer, self.step)


def plan_memory(
    *,
    parameters: int,
    engine: str,
    zero_stage: int,
    ranks: int,
    optimizer: str,
    bucket_elements: int,
    activation_bytes: int,
    buffer_bytes: int = 0,
    largest_parameter: int = 0,
) -> MemoryPlan:
    """Predict the bytes of one rank; plain arithmetic.

    Args:
        parameters: of the model.
        engine: with `zero_stage` a key of `STATE_RULES`.
        zero_stage: of the strategy.
        ranks: over which the state is sharded.
        optimizer: a key of `MOMENTS`.
        bucket_elements: `reduce_bucket_size` of the strategy's JSON.
        activation_bytes: of one micro-batch, see `models.dry_run.activation_bytes`.
        buffer_bytes: of what is not trained.
        largest_parameter: elements of the largest of them.
    """
    rule, has_others = STATE_RULES[engine, zero_stage], ranks > 1
    whole, part = FLOAT32_BYTES * parameters, FLOAT32_BYTES * parameters / ranks
    bucket = FLOAT32_BYTES * min(bucket_elements, parameters)
    sums = rule.sums * part if has_others else 0
    gradients = round(rule.gradients * whole + rule.sharded_gradients * part + sums)
    return MemoryPlan(
        weights=round(rule.weights * whole + rule.sharded_weights * part),
        moments=round(MOMENTS[optimizer] * part),
        gradients=gradients,
        buffers=buffer_bytes,
        activations=activation_bytes,
        communication=round(rule.buckets * bucket + (rule.gathered * whole if has_others else 0)),
        layer=FLOAT32_BYTES * largest_parameter * (CPU_LAYER_COPIES + rule.adds_gradients),
        step=round(rule.step * part),
        stays=round(rule.held_buckets * bucket) + (gradients if rule.gradients_stay else 0),
    )


def bucket_elements(strategy_json: Mapping[str, Mapping[str, int]]) -> int:
    """Return the size of a strategy's reduction bucket; DeepSpeed's default if its JSON has none."""
    return strategy_json["zero_optimization"].get("reduce_bucket_size", 500_000_000)
