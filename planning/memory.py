"""How much memory a rank needs: what its strategy keeps of the training state, and the activations.

The state follows Rajbhandari et al. 2020 (ZeRO, arXiv:1910.02054, section 3) with 4 bytes for weights and gradients,
which are fp32 here under every precision. Beside the formula stands what the engine holds for a time: buckets, and
what a step of the optimizer needs. `benchmarks/memory.py` compares with measurements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

FLOAT32_BYTES = 4
MOMENTS = {"adamw": 2, "lamb": 2, "sgd": 1}
AUTOCAST_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}


@dataclass(frozen=True)
class StateRule:
    """fp32 values per parameter that a rank holds; whole ones on every rank, sharded ones over the ranks.

    Attributes:
        weights: whole copies of the weights.
        sharded_weights: copies of this rank's part of the weights.
        gradients: whole gradients.
        sharded_gradients: this rank's part of the gradients.
        sums: this rank's part of the gradients summed over the ranks, where there is more than one rank.
        gradients_stay: whether the gradients' memory stays taken between the steps.
        step: values per parameter of this rank's part that the optimizer's step needs for a while.
        buckets: communication buckets, each as large as the smaller of the bucket's size and the model.
        held_buckets: how many of them stay between the steps.
        gathered: whole weights that forward and backward gather for a while, where there is more than one rank.
        adds_gradients: whether a layer's gradient exists for a while beside the memory that it is added to.
    """

    weights: float = 0
    sharded_weights: float = 0
    gradients: float = 0
    sharded_gradients: float = 0
    sums: float = 0
    gradients_stay: bool = False
    step: float = 0
    buckets: float = 0
    held_buckets: float = 0
    gathered: float = 0
    adds_gradients: bool = False


# oneDNN, which computes on a CPU, works on copies in layouts of its own: of a layer's weights, and of their gradient
# before it is brought back. VGG-16's first dense layer alone has three quarters of its weights.
CPU_LAYER_COPIES = 3

# Engine and ZeRO stage -> what it holds. DeepSpeed keeps a copy of the weights for the optimizer at every stage. The
# native engine's CPU ranks share one copy of the weights, of which each is charged its part.
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
    """Bytes that one rank needs, by what needs them.

    Attributes:
        weights: weights, and the optimizer's copy of them.
        moments: what the optimizer keeps of each parameter.
        gradients: from backward to the step.
        buffers: what is not trained, such as BatchNorm's statistics.
        activations: what forward keeps for backward.
        communication: buckets, and gathered weights.
        layer: copies of the largest layer's weights while it is computed.
        step: what the optimizer's step needs for a while.
        stays: of all these, bytes beside weights, moments and buffers that stay taken between the steps.
    """

    weights: int
    moments: int
    gradients: int
    buffers: int
    activations: int
    communication: int
    layer: int
    step: int
    stays: int

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
    layer_copies: int = CPU_LAYER_COPIES,
) -> MemoryPlan:
    """Predict the bytes of one rank; plain arithmetic.

    Args:
        parameters: of the model.
        engine: the first word of a key of `STATE_RULES`.
        zero_stage: the second.
        ranks: over which the state is sharded.
        optimizer: a key of `MOMENTS`.
        bucket_elements: `reduce_bucket_size` of the strategy's JSON.
        activation_bytes: of one micro-batch, see `activation_bytes`.
        buffer_bytes: of what is not trained.
        largest_parameter: elements of the largest of them.
        layer_copies: copies of a layer's weights that the device's library makes while it computes.
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
        layer=FLOAT32_BYTES * largest_parameter * (layer_copies + rule.adds_gradients),
        step=round(rule.step * part),
        stays=round(rule.held_buckets * bucket) + (gradients if rule.gradients_stay else 0),
    )


def model_sizes(module: nn.Module) -> dict[str, int]:
    """Return `parameters`, `largest_parameter` (elements) and `buffer_bytes`, as `plan_memory` takes them."""
    elements = [parameter.numel() for parameter in module.parameters()]
    buffers = sum(buffer.numel() * buffer.element_size() for buffer in module.buffers())
    return {"parameters": sum(elements), "largest_parameter": max(elements), "buffer_bytes": buffers}


def activation_bytes(module: nn.Module, batch_size: int, image_size: int, precision: str = "fp32") -> int:
    """Count what forward keeps for backward, by a forward on the meta device, where nothing is computed.

    Args:
        module: the model; it is moved to the meta device, so give one that is not needed any more.
        batch_size: images per micro-batch.
        image_size: pixels.
        precision: 'fp32', or 'bf16' or 'fp16', whose activations take half.

    Returns:
        Bytes of the distinct tensors saved by autograd, weights apart, and of the images themselves.
    """
    module = module.to("meta").train()
    weights = {tensor.untyped_storage()._cdata for tensor in (*module.parameters(), *module.buffers())}
    saved: dict[int, int] = {}
    kept = []  # a storage that were freed might come back under the same address

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            saved[storage._cdata] = storage.nbytes()
            kept.append(tensor)
        return tensor

    images = torch.empty(batch_size, 3, image_size, image_size, device="meta")
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        module(images).sum()
    saved.setdefault(images.untyped_storage()._cdata, images.nbytes)
    return sum(saved.values()) * AUTOCAST_BYTES[precision] // FLOAT32_BYTES


def bucket_elements(strategy_json: Mapping[str, Mapping[str, int]]) -> int:
    """Return the size of a strategy's reduction bucket; DeepSpeed's default where its JSON names none."""
    return strategy_json["zero_optimization"].get("reduce_bucket_size", 500_000_000)
