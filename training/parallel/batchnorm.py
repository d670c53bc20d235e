"""BatchNorm over ranks: averaged running statistics, and synchronized BatchNorm on any device.

Running statistics follow a leaf's samples under the native engine, which has one version of them per leaf, and a rank's
under DeepSpeed, which neither broadcasts nor averages buffers. They are averaged before every evaluation, so that the
reported accuracy is that of the saved file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from training.observe.timing import communication
from training.parallel.collectives import gather_rows
from training.parallel.world import World

BATCHNORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class ModelBuffers:
    """All buffers of a model (BatchNorm's statistics), in one version or several: under the native engine one per leaf.

    The module computes with the selected version. Its buffers become views of one flat tensor per dtype: copying
    mobilenet's 138 buffers one by one takes as long as the optimizer. They keep their names, and the modules still
    update them in place.

    Args:
        module: the model.
        versions: of all buffers, equal at first.
    """

    ALIGNMENT = 32  # elements: that of a tensor of its own

    def __init__(self, module: nn.Module, versions: int = 1) -> None:
        self._selected = 0
        self._live: list[torch.Tensor] = []  # [n] of each dtype, of which the module's buffers are views
        self._rows: list[torch.Tensor] = []  # [versions, n]; the selected row is up to date after `_store`
        self._by_name: dict[str, torch.Tensor] = {}
        by_kind: dict[tuple[torch.dtype, torch.device], dict[str, torch.Tensor]] = {}
        for name, buffer in module.named_buffers():
            by_kind.setdefault((buffer.dtype, buffer.device), {})[name] = buffer
        for (dtype, device), buffers in by_kind.items():
            starts = [0]
            for buffer in buffers.values():
                starts.append(starts[-1] + -(-buffer.numel() // self.ALIGNMENT) * self.ALIGNMENT)
            live = torch.zeros(starts[-1], dtype=dtype, device=device)
            for buffer, start in zip(buffers.values(), starts, strict=False):
                buffer.data = live[start : start + buffer.numel()].view(buffer.shape).copy_(buffer)
            rows = live[None] if versions == 1 else live.repeat(versions, 1)
            for (name, buffer), start in zip(buffers.items(), starts, strict=False):
                self._by_name[name] = rows[:, start : start + buffer.numel()].view(versions, *buffer.shape)
            self._live.append(live)
            self._rows.append(rows)

    def select(self, version: int) -> None:
        """Let the module compute with this version."""
        if version != self._selected:
            self._store()
            self._selected = version
            self._load()

    def by_name(self) -> dict[str, torch.Tensor]:
        """Return every buffer [versions, ...] by name: views, up to date until the module's next forward."""
        self._store()
        return self._by_name

    @torch.no_grad()
    def write(self, values: Mapping[str, torch.Tensor]) -> None:
        """Set all buffers, [versions, ...] by name."""
        for name, buffer in self._by_name.items():
            buffer.copy_(values[name])
        self._load()

    def copy(self) -> list[torch.Tensor]:
        """Return copies of all versions, for `restore`."""
        self._store()
        return [rows.clone() for rows in self._rows]

    def restore(self, copies: list[torch.Tensor]) -> None:
        """Set all versions to what `copy` returned."""
        for rows, kept in zip(self._rows, copies, strict=True):
            rows.copy_(kept)
        self._load()

    def restore_unless(self, applied: torch.Tensor, copies: list[torch.Tensor]) -> None:
        """As `restore` if the bool tensor `applied` [] is false, without a synchronization."""
        self._store()
        for rows, kept in zip(self._rows, copies, strict=True):
            rows.copy_(torch.where(applied, rows, kept))
        self._load()

    @torch.no_grad()
    def average(self, world: World) -> None:
        """Replace every floating-point buffer by its mean over the versions of all ranks; a collective.

        They are added in the order of the leaves, so that the number of ranks changes no digit.
        """
        self._store()
        for rows in self._rows:
            if rows.is_floating_point():
                every = gather_rows(rows.reshape(-1), world).view(-1, rows.shape[1])
                mean = every[0].clone()
                for row in every[1:]:
                    mean += row
                rows.copy_(mean.div_(len(every)))
        self._load()

    def _store(self) -> None:
        """Copy what the module computes with into the selected version; they are one if there is only one."""
        for live, rows in zip(self._live, self._rows, strict=True):
            if len(rows) > 1:
                rows[self._selected].copy_(live)

    def _load(self) -> None:
        """Let the module compute with the selected version as it is now."""
        for live, rows in zip(self._live, self._rows, strict=True):
            if len(rows) > 1:
                live.copy_(rows[self._selected])


def synchronize_batchnorm(module: nn.Module, world: World) -> nn.Module:
    """Convert every BatchNorm to take its training statistics over all ranks' samples.

    On GPUs that is PyTorch's SyncBatchNorm; it refuses CPU tensors, so CPU ranks get `CpuSyncBatchNorm2d`.
    """
    if world.size == 1:
        return module
    if world.device.type == "cuda":
        # timm's converter keeps the activation of its BatchNormAct2d, which PyTorch's would drop.
        from timm.layers import convert_sync_batchnorm

        return convert_sync_batchnorm(module)
    for child in module.modules():
        if isinstance(child, nn.BatchNorm2d):
            # Changing the class keeps subclasses' own state, such as the activation of timm's BatchNormAct2d.
            child.__class__ = _synchronized_class(type(child))
    return module


def freeze_statistics(module: nn.Module) -> None:
    """Set every BatchNorm to evaluation mode: it normalizes with its running statistics and does not update them."""
    for child in module.modules():
        if isinstance(child, BATCHNORMS):
            child.eval()


def synchronized_batch_norm(images: torch.Tensor, norm: nn.BatchNorm2d) -> torch.Tensor:
    """Normalize [B, C, H, W] with mean and variance over all ranks' samples, and update the running statistics.

    Gradients flow through the all-reduced mean and biased variance; the running variance is unbiased, as in
    `torch.nn.BatchNorm2d`. A collective in forward and in backward.
    """
    channels = images.shape[1]
    local = torch.cat([images.sum((0, 2, 3)), images.new_full((1,), images.numel() / channels)])
    sums = _SumOverRanks.apply(local)
    total = sums[-1].detach()
    mean = sums[:channels] / total
    # A second pass over the centred values: E[x^2] - E[x]^2 would cancel if the mean is large.
    centred = images - mean.view(1, -1, 1, 1)
    variance = _SumOverRanks.apply(centred.square().sum((0, 2, 3))) / total
    with torch.no_grad():
        if norm.running_mean is not None and norm.running_var is not None and norm.num_batches_tracked is not None:
            norm.num_batches_tracked.add_(1)
            momentum = 1 / float(norm.num_batches_tracked) if norm.momentum is None else norm.momentum
            norm.running_mean.lerp_(mean, momentum)
            norm.running_var.lerp_(variance * total / (total - 1), momentum)
    scale = torch.rsqrt(variance + norm.eps)
    if norm.affine:
        scale = scale * norm.weight
    output = centred * scale.view(1, -1, 1, 1)
    return output + norm.bias.view(1, -1, 1, 1) if norm.affine else output


class _SumOverRanks(torch.autograd.Function):
    """All-reduce whose gradient is the all-reduced gradient: each rank's input is part of every rank's output."""

    @staticmethod
    def forward(_context: Any, values: torch.Tensor) -> torch.Tensor:
        return _sum_over_ranks(values)

    @staticmethod
    def backward(_context: Any, gradient: torch.Tensor) -> torch.Tensor:
        return _sum_over_ranks(gradient.contiguous())


def _sum_over_ranks(values: torch.Tensor) -> torch.Tensor:
    total = values.clone()
    with communication():
        dist.all_reduce(total)
    return total


_SYNCHRONIZED: dict[type, type] = {}


def _synchronized_class(original: type) -> type:
    """Return the subclass of a BatchNorm2d class that computes its training statistics over all ranks."""
    if original not in _SYNCHRONIZED:

        class CpuSyncBatchNorm2d(original):
            def forward(self, images: torch.Tensor) -> torch.Tensor:
                if not self.training:
                    return super().forward(images)
                output = synchronized_batch_norm(images.float(), self)
                # timm's BatchNormAct2d applies its dropout and activation after the norm.
                for after in ("drop", "act"):
                    output = getattr(self, after, nn.Identity())(output)
                return output

        _SYNCHRONIZED[original] = CpuSyncBatchNorm2d
    return _SYNCHRONIZED[original]
