"""The table of engines, the choice of one, and its construction."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from training.errors import UserError
from training.parallel.collectives import copy_from_main
from training.parallel.engine import Engine, frozen_parameters
from training.parallel.precision import DynamicLossScale, under_autocast
from training.parallel.world import World
from training.recipe.lamb import ShardedLamb

# Module and class of each. The arguments are the model in fp32, the same or the module that runs it under autocast, the
# optimizer, the configuration, fp16's loss scale or None, and the ranks; a collective.
ENGINES = {
    "deepspeed": ("training.parallel.deepspeed_engine", "DeepSpeedEngine"),
    "native": ("training.parallel.native_engine", "NativeEngine"),
}

# The keys of the configuration that the native engine follows, or that concern only DeepSpeed.
_NATIVE_KEYS = {
    *("zero_optimization", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping"),
    *("zero_allow_untested_optimizer", "zero_force_ds_cpu_optimizer"),
}
# The keys of zero_optimization that are more than advice.
_ZERO_KEYS_FOR_DEEPSPEED = {
    *("offload_optimizer", "offload_param"),
    *("zero_hpz_partition_size", "zero_quantized_weights", "zero_quantized_gradients"),
}


def resolve_engine(engine: str, config: Mapping[str, Any], module: nn.Module, device: torch.device) -> str:
    """Return the engine of a run, a key of `ENGINES`.

    'auto' is the native one if that was measured to be faster: on CPU ranks, for models that fit one bucket
    (`reduce_bucket_size` of the strategy's JSON; any model under ddp, whose gradients are whole on every rank).

    Args:
        engine: 'auto' or a key of `ENGINES`.
        config: what `training.parallel.strategies.engine_config` returned.
        module: the model.
        device: this rank's device.

    Raises:
        UserError: if the native engine is asked for something that only DeepSpeed does.
    """
    zero = config["zero_optimization"]
    needs_deepspeed = sorted({*config} - _NATIVE_KEYS | _ZERO_KEYS_FOR_DEEPSPEED & {*zero})
    if engine == "native" and needs_deepspeed:
        raise UserError(f"--engine native does not know {', '.join(needs_deepspeed)}: use --engine deepspeed, or auto.")
    if engine != "auto":
        return engine
    parameters = sum(parameter.numel() for parameter in module.parameters())
    fits = zero["stage"] == 1 or parameters <= zero.get("reduce_bucket_size", 0)
    return "native" if fits and device.type == "cpu" and not needs_deepspeed else "deepspeed"


def build_engine(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    config: Mapping[str, Any],
    precision: str,
    world: World,
    engine: str = "auto",
) -> Engine:
    """Shard a model and its optimizer as the configuration says; a collective.

    Args:
        module: the model in fp32 on `world.device`, float32 images [B, 3, H, W] -> logits [B, classes].
        optimizer: the optimizer over the module's parameters.
        config: what `training.parallel.strategies.engine_config` returned.
        precision: 'bf16', 'fp16' or 'fp32'.
        world: the ranks.
        engine: 'auto' or a key of `ENGINES`.

    Raises:
        UserError: see `resolve_engine`.
    """
    copy_from_main([*frozen_parameters(module).values()], world)
    network = under_autocast(module, precision, world.device)
    loss_scale = DynamicLossScale() if precision == "fp16" else None
    module_name, class_name = ENGINES[resolve_engine(engine, config, module, world.device)]
    # Imported here: DeepSpeed takes seconds to import, and native runs do not need it.
    engine_class = getattr(importlib.import_module(module_name), class_name)
    built = engine_class(module, network, optimizer, config, loss_scale, world)
    if isinstance(optimizer, ShardedLamb):
        optimizer.bind_shards(built.flat_shards(), world)
    return built
