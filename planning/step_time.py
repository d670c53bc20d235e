"""Predicts how long an update takes a rank: forward, backward, the optimizer's step, and what it waits for others.

A roofline over the forward's operators, in the sense of Williams, Waterman and Patterson 2009
(doi:10.1145/1498765.1498785): an operator needs its operations at the device's peak and its values at the memory's
bandwidth. Real kernels need a multiple of both, and some time whatever their size: `CALIBRATIONS` has these multiples.
The two times are added rather than the larger taken, which makes the multiples a linear least-squares problem.

CPU: fitted by `benchmarks/fit_step_time.py` to steps of 19 networks measured in fp32 on a core of an AMD EPYC (torch
2.15). Fitted without a network, the multiples predict it within 18 % (median), regnety_002 worst (+45 %). What threads
and ranks cost each other that share two cores was fitted to five of timm's networks, what other engines add to two of
them; docs/predictions.md has the others.
GPU: no GPU has been measured. Fitted to published training speeds with 16-bit arithmetic, 224
pixels and large batches: timm's benchmark files for an RTX 3090 (MobileNetV3-Large 2732 images/s, MobileNetV2 2313,
EfficientNet-B0 1752, VGG16 546, ResNet-50 1218), NVIDIA DeepLearningExamples for an A100 80 GB (EfficientNet-B0 2489,
ResNet-50 2470), Lambda for an H100 SXM (ResNet-50 2790). They come from several frameworks and years; with the matrix
units at their peak and one multiple for all of the memory's traffic, images/s are within 42 % of each of the eight.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from models.operators import CONVOLUTION, DEPTHWISE, NORM, OTHER, POINTWISE, POOL, PRODUCT, Operator
from planning.communication import SHARED_MEMORY, USUAL_BLOCKS, communication_s
from planning.machines import Machine
from planning.memory import FLOAT32_BYTES
from training.parallel.strategies import ParallelPlan

ACTIVATION_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2}  # under autocast
ADAMW_PASSES = 7  # over the fp32 values: weight and two moments, read and written; gradient, read
LARGE_WEIGHT = 1 << 23  # values: above 32 MB malloc maps fresh pages for each copy, on Linux (mallopt(3))


@dataclass(frozen=True)
class Multiples:
    """Of the ideal time, that operators of one kind need.

    Attributes:
        flops: of the operations at the peak.
        activations: of the activations at the bandwidth.
        weights: of the weights at the bandwidth.
        operator_s: seconds that each takes whatever its size.
    """

    flops: float = 0
    activations: float = 0
    weights: float = 0
    operator_s: float = 0


@dataclass(frozen=True)
class Sharing:
    """What threads and ranks cost each other that share a machine's cores, caches and memory.

    Attributes:
        factor: on forward and backward, beside the share of the cores: caches and the memory's bandwidth are shared
            too, and are cold after every time slice of another rank.
        operator_s: seconds for each operator's forward and backward, whose threads begin and end together.
    """

    factor: float
    operator_s: float = 0.0


@dataclass(frozen=True)
class EngineCost:
    """What an engine does on a CPU beside the native engine's work: the same for any size of batch.

    Attributes:
        layer_s: seconds for each operator with parameters: hooks, and small kernels around each.
        threads_s: the same if a rank has several threads, which begin and end each of these kernels together.
        value_s: seconds for each value of a parameter, which is copied.
        block_s: seconds for each block of the network, if several ranks gather and scatter it.
    """

    layer_s: float = 0.0
    threads_s: float = 0.0
    value_s: float = 0.0
    block_s: float = 0.0


@dataclass(frozen=True)
class Calibration:
    """Multiples of one kind of device.

    Attributes:
        forward: by kind of operator.
        backward: likewise, of the forward's operators.
        large_weights: in backward, of `is_large_convolution`, in place of `weights`.
        update: of AdamW's passes at the bandwidth.
        update_s: seconds of an update whatever the size.
        dispatch_s: of the host for each operator, meanwhile the device computes; once in forward, twice in backward.
        sharing: by the cores of a machine per rank; the nearest counts.
        engines: by engine and ZeRO stage; nothing for those that are missing.
    """

    forward: Mapping[str, Multiples]
    backward: Mapping[str, Multiples]
    large_weights: float
    update: float
    update_s: float
    dispatch_s: float
    sharing: Mapping[float, Sharing]
    engines: Mapping[tuple[str, int], EngineCost] = dataclasses.field(default_factory=dict)


GPU_HOST_S = 20e-6  # per operator: assumed, of eager PyTorch under autocast
CALIBRATIONS = {
    "cpu": Calibration(
        forward={
            CONVOLUTION: Multiples(1.26, 0.0, 4.952, 120.6e-6),
            POINTWISE: Multiples(1.898, 0.0, 1.606, 120.6e-6),
            DEPTHWISE: Multiples(0.0, 0.0, 0.0, 120.6e-6),
            PRODUCT: Multiples(0.95, 0.0, 4.148),
            NORM: Multiples(0.0, 3.537),
            POOL: Multiples(),
            OTHER: Multiples(0.0, 3.172),
        },
        backward={
            CONVOLUTION: Multiples(2.06, 9.666, 31.01, 113.9e-6),
            POINTWISE: Multiples(2.367, 9.666, 33.85, 113.9e-6),
            DEPTHWISE: Multiples(2.811, 9.666, 0.0, 113.9e-6),
            PRODUCT: Multiples(1.9, 9.666, 8.308e-08),
            NORM: Multiples(0.0, 2.484),
            POOL: Multiples(),
            OTHER: Multiples(0.0, 5.084),
        },
        large_weights=103.5,
        update=1.251,
        update_s=921.7e-6,
        dispatch_s=0.0,
        sharing={2: Sharing(1.178), 1: Sharing(1.103), 0.5: Sharing(1.228)},
        engines={
            ("torch", 1): EngineCost(threads_s=649.3e-6, block_s=402.6e-6),
            ("torch", 2): EngineCost(threads_s=470.3e-6, value_s=4.264e-9, block_s=5.159e-3),
            ("torch", 3): EngineCost(threads_s=397.5e-6, value_s=5.114e-9, block_s=6.245e-3),
            ("deepspeed", 1): EngineCost(threads_s=163.7e-6, value_s=4.806e-9),
            ("deepspeed", 2): EngineCost(threads_s=191.7e-6, value_s=6.452e-9, block_s=89.52e-6),
            ("deepspeed", 3): EngineCost(threads_s=697.9e-6, value_s=7.721e-9, block_s=2.875e-3),
        },
    ),
    "gpu": Calibration(
        forward=dict.fromkeys((CONVOLUTION, POINTWISE, PRODUCT), Multiples(1.0, 2.3, 1.0))
        | dict.fromkeys((DEPTHWISE, NORM, POOL, OTHER), Multiples(0.0, 2.3, 1.0)),
        backward=dict.fromkeys((CONVOLUTION, POINTWISE, PRODUCT), Multiples(2.0, 4.6, 2.0))
        | dict.fromkeys((DEPTHWISE, NORM, POOL, OTHER), Multiples(0.0, 4.6, 2.0)),
        large_weights=2.0,
        update=1.0,
        update_s=0.1e-3,
        dispatch_s=GPU_HOST_S,
        sharing={1: Sharing(1.0)},
    ),
}


@dataclass(frozen=True)
class StepTime:
    """Seconds of one update of a rank, all its micro-steps together.

    Attributes:
        forward_s: of the network.
        backward_s: of its gradients.
        update_s: of the optimizer, and of what else the engine does.
        communication_s: of all exchanges.
        exposed_communication_s: of these, what no computation hides.
    """

    forward_s: float
    backward_s: float
    update_s: float
    communication_s: float
    exposed_communication_s: float

    @property
    def step_s(self) -> float:
        """Seconds from one update to the next."""
        return self.forward_s + self.backward_s + self.update_s + self.exposed_communication_s


def predict_step(
    operators: Sequence[Operator],
    parameters: int,
    machine: Machine,
    plan: ParallelPlan,
    *,
    engine: str,
    batch_size: int,
    precision: str = "fp32",
    accumulation_steps: int = 1,
    checkpointing: bool = False,
    blocks: int = USUAL_BLOCKS,
    compute_scale: float = 1.0,
    calibration: Calibration | None = None,
) -> StepTime:
    """Predict one update; plain arithmetic.

    Args:
        operators: of the network's forward, see `models.operators.count_operators`.
        parameters: trained ones.
        machine: one of those that the ranks fill; of CPU ranks, each one's share.
        plan: of the strategy, with its shards and replicas.
        engine: 'native', 'torch' or 'deepspeed'.
        batch_size: images of a micro-batch.
        precision: 'fp32', 'bf16' or 'fp16'.
        accumulation_steps: micro-batches of an update.
        checkpointing: whether backward computes forward again.
        blocks: of the network.
        compute_scale: on forward, backward and optimizer, such as that of a measured step to its prediction.
        calibration: of the device; None for that of `CALIBRATIONS`.
    """
    is_cpu = machine.inside.name == SHARED_MEMORY
    calibration = calibration or CALIBRATIONS["cpu" if is_cpu else "gpu"]
    cores = machine.rank_cores
    sharing = calibration.sharing[min(calibration.sharing, key=lambda known: abs(known - cores))]
    if is_cpu and machine.ranks == cores == 1:
        sharing = Sharing(1.0)  # a core and its memory for itself
    slices = max(1.0, 1 / cores)  # of a core's time, until a rank's turn has come again
    met_s = len(operators) * sharing.operator_s / 2  # half in forward, half in backward
    forward, backward = (
        compute_scale
        * (
            met_s
            + sharing.factor
            * _phase_s(operators, calibration, machine, batch_size, precision, slices, is_backward=is_backward)
        )
        for is_backward in (False, True)
    )
    backward += forward if checkpointing else 0
    updated = parameters if engine == "torch" and plan.zero_stage == 1 else parameters / plan.shards
    update_s = calibration.update * ADAMW_PASSES * FLOAT32_BYTES * updated / machine.gpu.bandwidth_bytes_per_s
    update_s += slices * calibration.update_s
    cost = calibration.engines.get((engine, plan.zero_stage), EngineCost())
    layers = sum(operator.weights > 0 for operator in operators)
    engine_s = layers * (cost.threads_s if cores > 1 else cost.layer_s) + cost.value_s * parameters
    engine_s += cost.block_s * blocks if plan.shards * plan.replicas > 1 else 0.0
    exchange = communication_s(
        engine,
        plan,
        parameters,
        machine,
        forward_s=forward,
        backward_s=backward,
        accumulation_steps=accumulation_steps,
        blocks=blocks,
    )
    return StepTime(
        accumulation_steps * forward,
        accumulation_steps * backward,
        compute_scale * update_s + sharing.factor * slices * engine_s,
        exchange.total_s,
        exchange.exposed_s,
    )


def is_large_convolution(operator: Operator) -> bool:
    """Return whether backward copies an operator's weights into fresh pages: `Calibration.large_weights`."""
    return operator.kind != PRODUCT and operator.weights > LARGE_WEIGHT


def _phase_s(
    operators: Sequence[Operator],
    calibration: Calibration,
    machine: Machine,
    batch_size: int,
    precision: str,
    slices: float,
    *,
    is_backward: bool,
) -> float:
    """Seconds of the forward or the backward of a micro-batch."""
    gpu, of_kind = machine.gpu, calibration.backward if is_backward else calibration.forward
    convolution_flops = gpu.peaks.get(precision, gpu.peaks["fp32"])
    product_flops = convolution_flops * gpu.product_share
    seconds = 0.0
    for operator in operators:
        multiples = of_kind[operator.kind]
        weights = multiples.weights
        if is_backward and is_large_convolution(operator):
            weights = calibration.large_weights
        values = multiples.activations * operator.activations * batch_size * ACTIVATION_BYTES[precision]
        values += weights * operator.weights * FLOAT32_BYTES
        peak = product_flops if operator.kind == PRODUCT else convolution_flops
        seconds += multiples.flops * operator.flops * batch_size / peak + values / gpu.bandwidth_bytes_per_s
        seconds += slices * multiples.operator_s
    return max(seconds, len(operators) * calibration.dispatch_s * (1 + is_backward))
