"""BatchNorm synchronized over ranks, on any device."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from training.base.timing import communication
from training.recipe.tuning import BATCHNORMS
from training.world.world import World


def synchronize_batchnorm(module: nn.Module, world: World) -> nn.Module:
    """Convert every BatchNorm to take its training statistics over all ranks' samples.

    On GPUs that is PyTorch's SyncBatchNorm; it refuses CPU tensors, so CPU ranks get `CpuSyncBatchNorm`.
    """
    if world.size == 1:
        return module
    if world.device.type == "cuda":
        # timm's converter keeps the activation of its BatchNormAct2d, which PyTorch's would drop.
        from timm.layers import convert_sync_batchnorm

        return convert_sync_batchnorm(module, world.group)
    for child in module.modules():
        if isinstance(child, BATCHNORMS):
            # Changing the class keeps subclasses' own state, such as the activation of timm's BatchNormAct2d.
            child.__class__ = _synchronized_class(type(child))  # type: ignore[arg-type]
            child.process_group = world.group  # under SyncBatchNorm's own name
    return module


def synchronized_batch_norm(images: torch.Tensor, norm: Any) -> torch.Tensor:
    """Normalize [B, C, ...] with mean and variance over all ranks' samples, and update the running statistics.

    Gradients flow through the all-reduced mean and biased variance; the running variance is unbiased, as in
    `torch.nn.BatchNorm2d`. A collective in forward and in backward.
    """
    channels, dimensions = images.shape[1], (0, *range(2, images.ndim))
    along_channels = (1, channels, *[1] * (images.ndim - 2))
    local = torch.cat([images.sum(dimensions), images.new_full((1,), images.numel() / channels)])
    sums = _SumOverRanks.apply(local, norm.process_group)
    total = sums[-1].detach()
    mean = sums[:channels] / total
    # A second pass over the centred values: E[x^2] - E[x]^2 would cancel if the mean is large.
    centred = images - mean.view(along_channels)
    variance = _SumOverRanks.apply(centred.square().sum(dimensions), norm.process_group) / total
    with torch.no_grad():
        if norm.running_mean is not None and norm.running_var is not None and norm.num_batches_tracked is not None:
            norm.num_batches_tracked.add_(1)
            momentum = 1 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
            norm.running_mean.lerp_(mean, momentum)
            norm.running_var.lerp_(variance * total / (total - 1), momentum)
    scale = torch.rsqrt(variance + norm.eps)
    if norm.affine:
        scale = scale * norm.weight
    output = centred * scale.view(along_channels)
    return output + norm.bias.view(along_channels) if norm.affine else output


class _SumOverRanks(torch.autograd.Function):
    """All-reduce whose gradient is the all-reduced gradient: each rank's input is part of every rank's output."""

    @staticmethod
    def forward(context: Any, values: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
        context.group = group
        return _sum_over_ranks(values, group)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _sum_over_ranks(gradient.contiguous(), context.group), None


def _sum_over_ranks(values: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    total = values.clone()
    with communication():
        dist.all_reduce(total, group=group)
    return total


class CpuSyncBatchNorm(nn.Module):
    """The base that comes before a class of BatchNorm, and computes its training statistics over all ranks."""

    process_group: dist.ProcessGroup | None

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Normalize [B, C, ...]; a collective in training."""
        if not self.training:
            return super().forward(images)
        output = synchronized_batch_norm(images.float(), self)
        # timm's BatchNormAct2d applies its dropout and activation after the norm.
        for after in ("drop", "act"):
            output = getattr(self, after, nn.Identity())(output)
        return output


@cache
def _synchronized_class(original: type) -> type:
    """Return the subclass of a class of BatchNorm that computes its training statistics over all ranks."""
    return type(f"Sync{original.__name__}", (CpuSyncBatchNorm, original), {})
