"""The model of a run, before an engine moves it to its device and shards it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zerovision.models.build import BuiltModel, build_model
from zerovision.models.dry_run import forward_failure
from zerovision.models.sides import ImageSize
from zerovision.training.base.errors import UserError
from zerovision.training.base.timing import communication
from zerovision.training.data.datasets import DatasetPair
from zerovision.training.engines.activation_checkpointing import enable_activation_checkpointing
from zerovision.training.engines.flops import TrainingFlops
from zerovision.training.recipe.loss import EMBEDDING_SIZE
from zerovision.training.recipe.settings import RecipeSettings
from zerovision.training.recipe.tuning import BATCHNORMS, tune
from zerovision.training.recipe.whitening import whiten_stem
from zerovision.training.world.collectives import agreed
from zerovision.training.world.world import World


def new_model(
    config: RecipeSettings,
    classes: int,
    image_size: ImageSize,
    image_channels: int,
    *,
    loads_weights: bool,
    class_names: Sequence[str] = (),
) -> BuiltModel:
    """Build a run's network in fp32 on PyTorch's default device, all of it trained yet.

    Args:
        config: with the model and its initial weights.
        classes: of the data set.
        image_size: of the images in pixels.
        image_channels: of these.
        loads_weights: whether it begins with the configured weights; else with random ones.
        class_names: of the data set, by which a loaded classifier is put in order; none to take it as it is.

    Raises:
        UserError: if it cannot be built.
    """
    return build_model(
        config.model_type,
        num_classes=classes,
        image_size=image_size,
        image_channels=image_channels,
        pretrained=config.pretrained if loads_weights else None,
        weights=config.weights if loads_weights else None,
        members=tuple(config.ensemble_members.split(",")),
        batch_size=config.micro_batch,
        keep_stem=config.stem == "keep",
        dropout=config.dropout,
        drop_path=config.drop_path,
        embedding=EMBEDDING_SIZE if config.is_contrastive else 0,
        class_names=class_names,
    )


def build_training_model(
    config: RecipeSettings, data: DatasetPair, world: World, *, loads_weights: bool = True
) -> tuple[BuiltModel, TrainingFlops | None]:
    """Build the configured model, the same on every rank; a collective.

    Args:
        config: with the model and its initial weights.
        data: with the number of classes, size and channels of the images.
        world: the ranks.
        loads_weights: whether the model begins with the configured weights; else all are to be restored.

    Returns:
        The model in fp32 on the CPU, and on rank 0 the counter of its FLOPs.

    Raises:
        UserError: on all ranks, if the model cannot be built.
    """

    channels = data.image_channels

    def build() -> BuiltModel:
        # The same seed on every rank: all have the same initial weights.
        torch.manual_seed(config.seed)
        size, names = data.preprocessing["image_size"], data.class_names
        built = new_model(config, len(names), size, channels, loads_weights=loads_weights, class_names=names)
        for size in data.train.sizes:
            is_other = size != data.preprocessing["image_size"]
            if is_other and forward_failure(built.module, size, config.micro_batch, channels):
                raise UserError(
                    f"model '{config.model_type}' is made for images of {data.preprocessing['image_size']} pixels, and "
                    f"does not work with {size}: leave out --progressive-size and --eval-image-size, or take another."
                )
        return tune(built, config.tune)

    # One rank per machine goes first and downloads hub weights; the others then find them in the cache.
    built = agreed(lambda: build() if world.local_rank == 0 else None, world) or build()
    if config.whitened_stem:
        agreed(lambda: whiten_stem(built, data, computes=world.is_main), world)
    module = built.module
    # Before the conversion for several ranks: only rank 0 counts.
    has_one_size = len(data.train.sizes) == 1  # else the operations are those of no epoch
    flops = TrainingFlops(module, data.train.sizes[0], channels) if world.is_main and has_one_size else None
    if config.sync_batchnorm:  # before the next, which keeps references to layers that this may replace
        module = synchronize_batchnorm(module, world.data)
    if config.activation_checkpointing:
        enable_activation_checkpointing(module)
    return dataclasses.replace(built, module=module), flops


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
