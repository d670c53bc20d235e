"""What one training step costs at the least: its FLOPs, the bytes it moves, and the time of both on a given machine.

The model, in the sense of Williams, Waterman and Patterson 2009 (the roofline, doi:10.1145/1498765.1498785), operator
by operator: an operator takes no less than its FLOPs at the peak rate, and no less than reading its inputs and writing
its outputs once at the memory's bandwidth. Activations, weights and gradients count as bf16 (2 bytes), as they are
under autocast; AdamW adds 7 passes over fp32 values (weight, two moments: read and written; gradient: read). Launches,
the casts of autocast and what a cache saves between two operators are not in it; fused operators may beat it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from benchmarks.peers.job import mean_cross_entropy
from zerovision.models.build import build_model
from zerovision.models.dry_run import convolution_backward_flops
from zerovision.training.base.settings import RunSettings
from zerovision.training.engines.flops import peak_tflops

ADAMW_BYTES_PER_PARAMETER = 7 * 4


@dataclass(frozen=True)
class Peak:
    """A device's dense bf16 tensor-core rate in FLOP/s and its memory bandwidth in bytes/s."""

    flops_per_second: float
    bytes_per_second: float
    source: str


# Memory bandwidth in TB/s by words of the device's name, the more particular first, from NVIDIA's data sheets.
BANDWIDTHS = {
    "H200": 4.8,
    "H100 PCIe": 2.0,
    "H100 NVL": 3.9,
    "H100": 3.35,
    "A100-SXM4-40GB": 1.555,
    "A100-PCIE-40GB": 1.555,
    "A100": 2.039,
    "L40S": 0.864,
    "RTX 4090": 1.008,
}


def peak_of(device: torch.device) -> Peak | None:
    """Look up the device; None where a table does not know it, or for a CPU."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    tflops = peak_tflops(name)
    bandwidth = next((bandwidth for part, bandwidth in BANDWIDTHS.items() if part in name), None)
    if tflops is None or bandwidth is None:
        return None
    return Peak(1e12 * tflops, 1e12 * bandwidth, f"{tflops:g} TFLOP/s and {bandwidth:g} TB/s (data sheet)")


@dataclass(frozen=True)
class StepCosts:
    """FLOPs of forward and backward, and (FLOPs, bytes) of each operator of a step, the optimizer's last."""

    flops: int
    operators: tuple[tuple[int, int], ...]

    def least_seconds(self, peak: Peak) -> float:
        """Return the roofline's time of the step."""
        return sum(max(flops / peak.flops_per_second, moved / peak.bytes_per_second) for flops, moved in self.operators)


def step_costs(model_type: str, batch_size: int, image_size: int, num_classes: int) -> StepCosts:
    """Run one step on the meta device, where nothing is computed, and count."""
    module = build_model(RunSettings(model_type=model_type, batch_size=batch_size), num_classes, image_size).module
    parameters = sum(parameter.numel() for parameter in module.parameters())
    module = module.to("meta", torch.bfloat16)
    images = torch.empty(batch_size, 3, image_size, image_size, dtype=torch.bfloat16, device="meta")
    labels = torch.empty(batch_size, dtype=torch.int64, device="meta")
    counter = _OperatorCounter()
    with counter:
        mean_cross_entropy(module(images), labels).backward()
    counter.operators.append((0, ADAMW_BYTES_PER_PARAMETER * parameters))
    return StepCosts(sum(flops for flops, _ in counter.operators), tuple(counter.operators))


class _OperatorCounter(TorchDispatchMode):
    """Notes the FLOPs and bytes of every operator that is no view."""

    def __init__(self) -> None:
        super().__init__()
        self.operators: list[tuple[int, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not func.is_view:
            flops = _flops(func._overloadpacket, args, kwargs, result)
            tensors = {id(leaf): leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)}
            self.operators.append((flops, sum(leaf.numel() * leaf.element_size() for leaf in tensors.values())))
        return result


def _flops(operator: Any, args: Any, kwargs: Any, result: Any) -> int:
    if operator is torch.ops.aten.convolution_backward:
        shapes = [value.shape if isinstance(value, torch.Tensor) else value for value in args]
        return convolution_backward_flops(*shapes, out_shape=[None if out is None else out.shape for out in result])
    count = flop_registry.get(operator)
    return int(count(*args, **kwargs, out_val=result)) if count else 0
