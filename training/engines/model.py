"""The model of a run on its device, before an engine shards it."""

from __future__ import annotations

import dataclasses

import torch

from models.build import BuiltModel, build_model
from models.dry_run import forward_failure
from models.sides import ImageSize
from training.base.errors import UserError
from training.data.datasets import DatasetPair
from training.engines.activation_checkpointing import enable_activation_checkpointing
from training.engines.batchnorm import synchronize_batchnorm
from training.engines.flops import TrainingFlops
from training.recipe.loss import EMBEDDING_SIZE
from training.recipe.settings import RecipeSettings
from training.recipe.tuning import tune
from training.recipe.whitening import whiten_stem
from training.world.collectives import agreed
from training.world.world import World


def new_model(
    config: RecipeSettings, classes: int, image_size: ImageSize, image_channels: int, *, loads_weights: bool
) -> BuiltModel:
    """Build a run's network in fp32 on PyTorch's default device, all of it trained yet.

    Args:
        config: with the model and its initial weights.
        classes: of the data set.
        image_size: of the images in pixels.
        image_channels: of these.
        loads_weights: whether it begins with the configured weights; else with random ones.

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
        The model in fp32 on `world.device`, and on rank 0 the counter of its FLOPs.

    Raises:
        UserError: on all ranks, if the model cannot be built.
    """

    channels = data.image_channels

    def build() -> BuiltModel:
        # The same seed on every rank: all have the same initial weights.
        torch.manual_seed(config.seed)
        size = data.preprocessing["image_size"]
        built = new_model(config, len(data.class_names), size, channels, loads_weights=loads_weights)
        for size in data.train.sizes:
            is_other = size != data.preprocessing["image_size"]
            if is_other and forward_failure(built.module, size, config.micro_batch, channels):
                raise UserError(
                    f"model '{config.model_type}' is made for images of {data.preprocessing['image_size']} pixels, and "
                    f"does not work with {size}: leave out --progressive-size and --eval-image-size, or take another."
                )
        return tune(built, config.tune)

    # One rank per machine goes first and downloads hub weights; the others then find them in the cache.
    built = agreed(lambda: build() if world.local_rank == 0 else None, world)
    if built is None:
        built = build()
    if config.whitened_stem:
        agreed(lambda: whiten_stem(built, data, computes=world.is_main), world)
    module = built.module.to(world.device)
    # Before the conversion for several ranks: only rank 0 counts.
    has_one_size = len(data.train.sizes) == 1  # else the operations are those of no epoch
    flops = TrainingFlops(module, data.train.sizes[0], channels) if world.is_main and has_one_size else None
    if config.sync_batchnorm:  # before the next, which keeps references to layers that this may replace
        module = synchronize_batchnorm(module, world.data)
    if config.activation_checkpointing:
        enable_activation_checkpointing(module)
    return dataclasses.replace(built, module=module), flops
