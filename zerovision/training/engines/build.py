"""Builds the model of a run, and the engine for its settings."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from zerovision.models import model_spec
from zerovision.models.build import BuiltModel, build_model
from zerovision.models.dry_run import forward_failure
from zerovision.training.base.errors import AgreedError, UserError
from zerovision.training.data.datasets import DatasetPair
from zerovision.training.engines.activation_checkpointing import enable_activation_checkpointing
from zerovision.training.engines.engine import Engine, EngineSetup
from zerovision.training.engines.flops import TrainingFlops
from zerovision.training.engines.parameter_shards import WHOLE, frozen_parameters
from zerovision.training.engines.settings import TORCH, WAYS, check_machine, ways_of
from zerovision.training.engines.torch_engine import TorchEngine
from zerovision.training.engines.ways import ParallelPlan, Way, plan_of
from zerovision.training.recipe.optimizer import build_optimizer
from zerovision.training.recipe.schedule import has_slow_backbone
from zerovision.training.recipe.settings import RecipeSettings
from zerovision.training.recipe.tuning import tune, whiten_stem
from zerovision.training.world.collectives import agreed, copy_from_main, ranks_per_machine
from zerovision.training.world.launchers import data_ranks
from zerovision.training.world.world import World, form_mesh

ENGINES = (*(way.engine for way in WAYS if way.engine), TORCH)


def resolve_engine(config: Any, plan: ParallelPlan, module: nn.Module, needed_by: str = "") -> str:
    """Return the engine of a run, one of `ENGINES`.

    'auto' selects PyTorch's engine, which computes the same weights on any number of ranks, or another engine for
    settings that PyTorch's engine does not support.

    Args:
        config: the settings.
        plan: how the state is distributed.
        module: the model.
        needed_by: a setting, with its value, that needs PyTorch's engine; '' if there is none.

    Raises:
        UserError: if an engine does not support a setting.
    """
    if config.engine not in ("auto", TORCH):
        return config.engine
    for way in (kind(config) for kind in WAYS):
        if config.engine == "auto" and plan.replicas == 1 and (reasons := way.reasons(plan, module)):
            if needed_by:
                raise UserError(
                    f"{needed_by} needs --engine torch, but other settings need {way.engine}, the only engine with "
                    f"{', '.join(reasons)}: leave one out."
                )
            return way.engine
        if unknown := way.alone_knows():
            raise UserError(f"--engine torch does not support {', '.join(unknown)}: use --engine {way.engine} or auto.")
    # FSDP2 does not support the following.
    if plan.offload == "optimizer" and plan.releases_weights:
        raise UserError(
            "--offload optimizer: at stage 3 --engine torch offloads weights, gradients and optimizer state together: "
            "use --offload all, or --engine deepspeed."
        )
    scalar = next((name for name, parameter in module.named_parameters() if not parameter.ndim), None)
    if plan.zero_stage > 1 and scalar:
        raise UserError(
            f"--engine torch cannot shard this model: its parameter {scalar} is a single number. "
            "Use --strategy ddp, or --engine deepspeed."
        )
    return TORCH


def form_ranks(config: Any, world: World) -> World:
    """Return the world with the mesh that a run's settings need, or unchanged if they need no mesh; a collective.

    Raises:
        UserError: on all ranks, if the ranks cannot be divided into the mesh.
    """
    agreed(lambda: data_ranks(world.size, config.mesh), world)
    agreed(lambda: check_machine(config, world.local_size), world)
    return form_mesh(world, config.mesh)


def parallel_plan(config: Any, world: World) -> ParallelPlan:
    """Return how the state is distributed over the ranks; a collective."""
    shards = ranks_per_machine(world.data) if config.replicate_across == "nodes" else world.data.size
    return plan_of(config.strategy, world.data.size, config.offload, shards)


def set_up_engine(
    config: Any, built: BuiltModel, precision: str, world: World, needed_by: str = "", *, compiles: bool
) -> tuple[EngineSetup, list[Way]]:
    """Return the engine's setup, with a new optimizer, and the run's ways to share work; a collective.

    Args:
        config: the settings.
        built: the model, which is reduced to this rank's part.
        precision: the resolved precision.
        world: the ranks.
        needed_by: see `resolve_engine`.
        compiles: whether the model runs through `torch.compile`.

    Raises:
        UserError: on all ranks, for contradictory settings.
    """
    plan, part = parallel_plan(config, world), WHOLE
    ways = ways_of(config, agreed(lambda: resolve_engine(config, plan, built.module, needed_by), world))
    for way in ways:
        part = way.prepare(built.module, world) or part
    settings = dataclasses.replace(config, precision=precision), built.head_parameter_names
    is_slow = has_slow_backbone(config)
    optimizer = agreed(lambda: build_optimizer(built.module, *settings, discriminative=is_slow), world)
    setup = EngineSetup(
        built.module,
        optimizer,
        plan,
        precision,
        world,
        batch_size=config.micro_batch,
        accumulation_steps=config.gradient_accumulation_steps,
        gradient_clipping=config.gradient_clipping,
        compile=config.compile if compiles else "off",
        part=part,
    )
    return setup, ways


def build_engine(setup: EngineSetup, ways: Sequence[Way] = ()) -> Engine:
    """Distribute a model and its optimizer; a collective.

    Args:
        setup: setup with the model, the optimizer, and how they are distributed.
        ways: the run's ways to share work.
    """
    data = setup.data
    # Otherwise, FSDP2 moves the module block by block.
    if any(way.engine for way in ways) or setup.plan.zero_stage == 1 or data.size == 1:
        setup.module.to(data.device)
    copy_from_main([*frozen_parameters(setup.module).values()], data)
    return next(filter(None, (way.build_engine(setup) for way in ways)), None) or TorchEngine(setup)


def build_training_model(
    config: RecipeSettings, data: DatasetPair, world: World, *, loads_weights: bool = True
) -> tuple[BuiltModel, TrainingFlops | None]:
    """Build the configured model, which is the same on every rank; a collective.

    Args:
        config: settings with the model and its initial weights.
        data: data with the number of classes, and the size and channels of the images.
        world: the ranks.
        loads_weights: whether the model begins with the configured weights; otherwise all weights are restored later.

    Returns:
        The model in fp32 on the CPU, and, on rank 0, a counter of its FLOPs.

    Raises:
        UserError: on all ranks, if the model cannot be built.
    """

    channels = data.preprocessing.channels

    def build() -> BuiltModel:
        # Use the same seed on every rank, so that all ranks have the same initial weights.
        torch.manual_seed(config.seed)
        size, names = data.preprocessing.image_size, data.class_names
        built = build_model(config, len(names), size, channels, loads_weights=loads_weights, class_names=names)
        for size in data.train.sizes:
            is_other = size != data.preprocessing.image_size
            if is_other and forward_failure(built.module, size, config.micro_batch, channels):
                raise UserError(
                    f"model '{config.model_type}' is made for images of {data.preprocessing.image_size} pixels, and "
                    f"does not work with {size}: use one --image-size without --progressive-size, or another model."
                )
        return tune(built, config.tune)

    # One rank per machine goes first and downloads hub weights; the other ranks then find them in the cache.
    built = agreed(lambda: build() if world.local_rank == 0 else None, world) or build()
    if model_spec(config.model_type).whitens_stem and not config.weights:
        agreed(lambda: whiten_stem(built, data, computes=world.is_main), world)
    module = built.module
    # Count operations before the conversion for several ranks, because only rank 0 counts them.
    has_one_size = len(data.train.sizes) == 1  # otherwise, no single count applies to all epochs
    flops = TrainingFlops(module, data.train.sizes[0], channels) if world.is_main and has_one_size else None
    if config.sync_batchnorm and world.data.size > 1:
        if world.device.type != "cuda":
            raise AgreedError(
                "--sync-batchnorm: PyTorch's SyncBatchNorm needs GPUs: leave it out on several CPU ranks."
            )
        # timm's converter keeps the activation of its BatchNormAct2d, which PyTorch's converter would drop. Convert
        # before enabling activation checkpointing, which keeps references to layers that the conversion replaces.
        from timm.layers import convert_sync_batchnorm

        module = convert_sync_batchnorm(module, world.data.group)
    if config.activation_checkpointing:
        enable_activation_checkpointing(module)
    return dataclasses.replace(built, module=module), flops
