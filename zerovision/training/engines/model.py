"""The model of a run, before an engine moves it to its device and shards it."""

from __future__ import annotations

import dataclasses

import torch

from zerovision.models import model_spec
from zerovision.models.build import BuiltModel, build_model
from zerovision.models.dry_run import forward_failure
from zerovision.training.base.errors import AgreedError, UserError
from zerovision.training.data.datasets import DatasetPair
from zerovision.training.engines.activation_checkpointing import enable_activation_checkpointing
from zerovision.training.engines.flops import TrainingFlops
from zerovision.training.recipe.settings import RecipeSettings
from zerovision.training.recipe.tuning import tune
from zerovision.training.recipe.whitening import whiten_stem
from zerovision.training.world.collectives import agreed
from zerovision.training.world.world import World


def build_training_model(
    config: RecipeSettings, data: DatasetPair, world: World, *, loads_weights: bool = True
) -> tuple[BuiltModel, TrainingFlops | None]:
    """Build the configured model, the same on every rank; a collective.

    Args:
        config: settings with the model and its initial weights.
        data: data with the number of classes, size and channels of the images.
        world: the ranks.
        loads_weights: whether the model begins with the configured weights; otherwise all weights are restored later.

    Returns:
        The model in fp32 on the CPU, and on rank 0 the counter of its FLOPs.

    Raises:
        UserError: on all ranks, if the model cannot be built.
    """

    channels = data.preprocessing.channels

    def build() -> BuiltModel:
        # The same seed on every rank: all have the same initial weights.
        torch.manual_seed(config.seed)
        size, names = data.preprocessing.image_size, data.class_names
        built = build_model(config, len(names), size, channels, loads_weights=loads_weights, class_names=names)
        for size in data.train.sizes:
            is_other = size != data.preprocessing.image_size
            if is_other and forward_failure(built.module, size, config.micro_batch, channels):
                raise UserError(
                    f"model '{config.model_type}' is made for images of {data.preprocessing.image_size} pixels, and "
                    f"does not work with {size}: give one --image-size, and no --progressive-size, or another model."
                )
        return tune(built, config.tune)

    # One rank per machine goes first and downloads hub weights; the others then find them in the cache.
    built = agreed(lambda: build() if world.local_rank == 0 else None, world) or build()
    if model_spec(config.model_type).whitens_stem and not config.weights:
        agreed(lambda: whiten_stem(built, data, computes=world.is_main), world)
    module = built.module
    # Before the conversion for several ranks: only rank 0 counts.
    has_one_size = len(data.train.sizes) == 1  # else the operations are those of no epoch
    flops = TrainingFlops(module, data.train.sizes[0], channels) if world.is_main and has_one_size else None
    if config.sync_batchnorm and world.data.size > 1:
        if world.device.type != "cuda":
            raise AgreedError(
                "--sync-batchnorm: PyTorch's SyncBatchNorm needs GPUs: leave it out on several CPU ranks."
            )
        # timm's converter keeps the activation of its BatchNormAct2d, which PyTorch's would drop. It comes before the
        # next, which keeps references to layers that this replaces.
        from timm.layers import convert_sync_batchnorm

        module = convert_sync_batchnorm(module, world.data.group)
    if config.activation_checkpointing:
        enable_activation_checkpointing(module)
    return dataclasses.replace(built, module=module), flops
