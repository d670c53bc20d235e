"""Estimates how long an update takes, on 1 to thousands of ranks: operations over a rate, bytes over bandwidths.

A rank computes for operations / peak + traffic / bandwidth of its memory + a fixed time per layer. The traffic is a
multiple of the activations that forward keeps. The exchange of gradients and weights is its volume over the slowest
link, a message at a time, of which the backward pass hides what it can.

How far off it is, on one rank. An H200 under `ddp` at 128 images of 224 pixels: 4 % too short to 3 % too long, of four
networks to which it was fitted. Other GPUs, by eight published speeds of others' training, 16 bits and large batches:
25 % too short to 15 % too long on an A100 and an H100 (NVIDIA DeepLearningExamples, Lambda), 18 to 77 % too long on an
RTX 3090 (timm's benchmark files). Not counted: the host's time, most of a step of small batches without CUDA graphs,
as other engines and stages have them. CPU ranks: 20 % too short to 33 % too long on 24 steps of
PyTorch's engine under `ddp`; others take up to four times as long on small images. `measured_s` replaces all of it by
20 steps on this machine. What several ranks exchange was never compared with GPUs.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from zerovision.models.sides import ImageSize, sides
from zerovision.planning.machines import Machine
from zerovision.planning.memory import FLOAT32_BYTES
from zerovision.planning.run_workload import Workload, build_network, optimizer_of
from zerovision.training.config import TrainConfig
from zerovision.training.engines.precision import under_autocast
from zerovision.training.engines.strategies import ParallelPlan, bubble

if TYPE_CHECKING:
    from zerovision.planning.stages import RankShare

STEPS, WARM_UP_STEPS = 20, 5
ADAMW_PASSES = 7  # over the fp32 values: weight and two moments, read and written; gradient, read
MESSAGE_BYTES = 25 << 20
BACKWARD_SHARE = 2 / 3  # of a step's operations
RECOMPUTED = 4 / 3  # operations with activation checkpointing


@dataclass(frozen=True)
class Multiples:
    """Of the ideal times of a kind of device.

    Attributes:
        operations: of the operations at the peak.
        traffic: of the kept activations at the memory's bandwidth.
        layer_s: seconds of each layer with parameters, forward and backward, whatever its size.
    """

    operations: float
    traffic: float
    layer_s: float


# The CPU's were fitted to steps of basic_cnn, mobilenet, efficientnet and cnn_lstm on 1, 2 and 4 ranks of two cores,
# the GPU's to those of mobilenet, efficientnet, resnet50 and vit_small on an H200 (benchmarks/results).
CPU, GPU = Multiples(1.6, 10.0, 0.4e-3), Multiples(1.0, 17.0, 0.04e-3)


@dataclass(frozen=True)
class StepTime:
    """Seconds of one update of a rank, all its micro-steps together.

    Attributes:
        compute_s: forward and backward.
        update_s: of the optimizer.
        exchange_s: of the exchange, what no computation hides.
    """

    compute_s: float
    update_s: float
    exchange_s: float

    @property
    def step_s(self) -> float:
        """Seconds from one update to the next."""
        return self.compute_s + self.update_s + self.exchange_s


def estimate_step(
    workload: Workload,
    machine: Machine,
    plan: ParallelPlan,
    config: TrainConfig,
    precision: str,
    kept_bytes: int,
    compute_scale: float = 1.0,
    shares: Sequence[RankShare] = (),
) -> StepTime:
    """Estimate one update.

    Args:
        workload: the network.
        machine: one of those that the ranks fill.
        plan: of the strategy, with its shards and replicas.
        config: its micro-batch, accumulation and activation checkpointing.
        precision: 'fp32', 'bf16' or 'fp16'.
        kept_bytes: of the activations that forward keeps of a micro-batch, without checkpointing.
        compute_scale: on forward, backward and update: that of a measured step to its estimate.
        shares: of the ranks of a pipeline; none without one.
    """
    gpu, multiples = machine.gpu, CPU if machine.is_cpu else GPU
    trained = max([share.sizes.trained for share in shares], default=workload.sizes.trained)
    micro_s = compute_s(machine, precision, workload.flops_per_image * config.micro_batch, kept_bytes)
    micro_s += multiples.layer_s * workload.layers * max(1.0, 1 / machine.rank_cores)
    micro_s *= RECOMPUTED if config.activation_checkpointing else 1
    micro_s *= max([share.time for share in shares], default=1)
    steps = config.gradient_accumulation_steps
    update_s = ADAMW_PASSES * FLOAT32_BYTES * trained / plan.shards / gpu.bandwidth_bytes_per_s
    # Ranks that exchange gradients are as many on a machine as it has groups.
    groups = dataclasses.replace(machine, ranks=max(1, machine.ranks // config.ranks_per_replica))
    exchange_s = exposed_s(groups, plan, FLOAT32_BYTES * trained, steps, compute_scale * micro_s)
    exchange_s += steps * _features_s(machine, config, precision, workload, shares)
    waits = bubble(config.pipeline_parallel, config.pipeline_schedule, steps) if config.has_stages else 0
    return StepTime(compute_scale * steps * micro_s / (1 - waits), compute_scale * update_s, exchange_s)


def _features_s(
    machine: Machine, config: TrainConfig, precision: str, workload: Workload, shares: Sequence[RankShare]
) -> float:
    """Return the seconds in which a micro-batch's features and their gradients go between ranks; nothing hides them.

    A tensor group adds up outputs in forward, in a recomputed one again, and gradients of fp32 in backward, around a
    ring; of a pipeline, those of its stage. Ranks of a pipeline send to their neighbours.
    """
    ranks, is_apart = config.tensor_parallel, config.ranks_per_replica > machine.ranks
    forwards = 2 if config.activation_checkpointing else 1
    values = forwards * (1 if precision == "fp32" else 0.5) + 1
    added = values * FLOAT32_BYTES * config.micro_batch * sum(workload.exchanged)
    messages = (forwards + 1) * len(workload.exchanged) * 2 * math.ceil(math.log2(ranks))
    added_s = 2 * (ranks - 1) / ranks * added / machine.inside.rate + messages * machine.inside.latency_s
    link, received = machine.between if is_apart else machine.inside, max([s.received_bytes for s in shares], default=0)
    added_s *= max([share.time for share in shares], default=1)
    return added_s + (2 * (received / link.rate + link.latency_s) if received else 0.0)


def compute_s(machine: Machine, precision: str, operations: float, kept_bytes: float) -> float:
    """Return the seconds of forward and backward without the fixed time of each layer; arguments as of the step's."""
    gpu, multiples = machine.gpu, CPU if machine.is_cpu else GPU
    seconds = multiples.operations * operations / gpu.peaks.get(precision, gpu.peaks["fp32"])
    return seconds + multiples.traffic * kept_bytes / gpu.bandwidth_bytes_per_s


def exposed_s(machine: Machine, plan: ParallelPlan, size_bytes: int, micro_steps: int, micro_s: float) -> float:
    """Return the seconds of an update's exchange that no computation hides.

    A reduce-scatter of the gradients and an all-gather of the weights, of which stage 3 has two in each micro-step
    (Rajbhandari et al. 2020, ZeRO, arXiv:1910.02054, section 7), around a ring, whose latency is that of a tree.

    Args:
        machine: one of those that the ranks fill.
        plan: of the strategy.
        size_bytes: of the trained parameters.
        micro_steps: of an update.
        micro_s: that a micro-step computes.
    """
    ranks = plan.shards * plan.replicas
    if ranks == 1:
        return 0.0
    inside, between, local = machine.inside, machine.between, min(machine.ranks, ranks)
    link = inside if ranks <= machine.ranks else between
    rate = inside.rate if ranks <= machine.ranks else min(inside.rate if local > 1 else math.inf, local * between.rate)
    passes = 2 * micro_steps + 1 if plan.zero_stage == 3 else 2
    messages = passes * math.ceil(size_bytes / MESSAGE_BYTES)
    latency_s = messages * math.ceil(math.log2(ranks)) * link.latency_s
    total_s = passes * (ranks - 1) / ranks * size_bytes / rate + latency_s
    if machine.is_cpu:  # whose cores would have to compute and to copy at once
        return total_s
    hidden_s = micro_steps * micro_s if plan.zero_stage == 3 else BACKWARD_SHARE * micro_s
    return max(total_s - hidden_s, total_s / messages)


def measured_s(config: TrainConfig, classes: int, image_size: ImageSize, precision: str) -> float:
    """Train `STEPS` steps of a micro-batch of random images on this machine's first GPU, or its CPU, in one process.

    Args:
        config: with model, micro-batch, channels of the images, optimizer.
        classes: of the data set.
        image_size: in pixels.
        precision: 'fp32', 'bf16' or 'fp16', whose loss is not scaled here.

    Returns:
        The median seconds of forward, backward and update.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network = build_network(config, classes, image_size).to(device).to(memory_format=torch.channels_last)
    resolved = dataclasses.replace(config, precision=precision)  # type: ignore[arg-type]  # one of its values
    optimizer = optimizer_of(network, resolved)
    forward = under_autocast(network, precision, device)
    images = torch.rand(config.micro_batch, config.image_channels or 3, *sides(image_size), device=device)
    images = images.contiguous(memory_format=torch.channels_last)
    seconds = []
    for _ in range(WARM_UP_STEPS + STEPS):
        start = time.perf_counter()
        forward(images).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[WARM_UP_STEPS:])
