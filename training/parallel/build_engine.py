"""The table of engines, the choice of one, and its construction."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from training.errors import UserError
from training.parallel.collectives import copy_from_main
from training.parallel.deepspeed_config import keys_of_deepspeed_alone
from training.parallel.engine import Engine, EngineSetup
from training.parallel.parameter_shards import frozen_parameters
from training.parallel.strategies import ParallelPlan
from training.recipe.rules import NOT_DEEPSPEED, WHOLE_PARAMETER

# Module and class of each, built from an `EngineSetup`; a collective.
ENGINES = {
    "deepspeed": ("training.parallel.deepspeed_engine", "DeepSpeedEngine"),
    "native": ("training.parallel.native_engine", "NativeEngine"),
    "torch": ("training.parallel.torch_engine", "TorchEngine"),
}
MOST_GPUS_OF_NATIVE = 64  # it sends from every rank to every other; not measured


def resolve_engine(
    engine: str,
    plan: ParallelPlan,
    strategy_json: Mapping[str, Any],
    module: nn.Module,
    device: torch.device,
    optimizer: str = "adamw",
) -> str:
    """Return the engine of a run, a key of `ENGINES`.

    'auto' is DeepSpeed where the JSON asks for what it alone does. Otherwise it is the native one for models whose
    gradients fit into one bucket, and for any model if they are whole on every rank anyway (under ddp, on one GPU). For
    the others, if the update rule needs whole parameters and on more GPUs than `MOST_GPUS_OF_NATIVE`, it is PyTorch's;
    for the others on CPU ranks DeepSpeed.

    Args:
        engine: 'auto' or a key of `ENGINES`.
        plan: how the state is distributed.
        strategy_json: the strategy's JSON for DeepSpeed.
        module: the model.
        device: this rank's device.
        optimizer: name of the update rule.

    Raises:
        UserError: if an engine is asked for something that it does not do.
    """
    if engine == "auto" and optimizer in (*WHOLE_PARAMETER, *NOT_DEEPSPEED):
        engine = "torch"
    needs_deepspeed = reasons_for_deepspeed(plan, strategy_json)
    if engine == "torch":
        needs_deepspeed = keys_of_deepspeed_alone(strategy_json)
    if engine in ("native", "torch") and needs_deepspeed:
        raise UserError(
            f"--engine {engine} does not know {', '.join(needs_deepspeed)}: use --engine deepspeed, or auto."
        )
    if engine == "torch":
        _check_torch(plan, module)
    if engine != "auto":
        return engine
    if needs_deepspeed:
        return "deepspeed"
    parameters = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    fits = plan.zero_stage == 1 or parameters <= plan.bucket_elements
    if device.type == "cpu":
        return "native" if fits else "deepspeed"
    if plan.zero_stage > 1 and _single_number(module):
        return "native"
    ranks = plan.shards * plan.replicas
    return "native" if ranks == 1 or (fits and plan.replicas == 1 and ranks <= MOST_GPUS_OF_NATIVE) else "torch"


def reasons_for_deepspeed(plan: ParallelPlan, strategy_json: Mapping[str, Any]) -> list[str]:
    """Return what asks for DeepSpeed: keys of the JSON that it alone follows, and --offload."""
    return keys_of_deepspeed_alone(strategy_json) + (["--offload"] if plan.offload != "none" else [])


def note_deepspeed(asked: str, engine: str, plan: ParallelPlan, strategy_json: Mapping[str, Any]) -> list[str]:
    """Return a note if 'auto' has taken DeepSpeed, with the reason; for arguments see `resolve_engine`."""
    if asked != "auto" or engine != "deepspeed":
        return []
    reasons = ", ".join(reasons_for_deepspeed(plan, strategy_json))
    because = f"which alone knows {reasons}" if reasons else f"for more than {plan.bucket_elements:,} weights"
    return [f"--engine auto is deepspeed, {because}"]


def _single_number(module: nn.Module) -> str | None:
    """Return the name of a parameter that is a single number, which FSDP2 cannot shard."""
    return next((name for name, parameter in module.named_parameters() if not parameter.ndim), None)


def _check_torch(plan: ParallelPlan, module: nn.Module) -> None:
    """Raise a UserError for what FSDP2 cannot do."""
    if plan.offload == "optimizer" and plan.releases_weights:
        raise UserError(
            "--offload optimizer: at stage 3 --engine torch offloads weights, gradients and optimizer state together: "
            "use --offload all, or --engine deepspeed."
        )
    scalar = _single_number(module)
    if plan.zero_stage > 1 and scalar:
        raise UserError(
            f"--engine torch cannot shard this model: its parameter {scalar} is a single number. "
            "Use --strategy ddp, or --engine deepspeed."
        )


def build_engine(setup: EngineSetup, engine: str) -> Engine:
    """Distribute a model and its optimizer; a collective.

    Args:
        setup: model, optimizer and how they are distributed.
        engine: a key of `ENGINES`.
    """
    copy_from_main([*frozen_parameters(setup.module).values()], setup.world)
    # Imported here: DeepSpeed takes seconds to import, and other engines do not need it.
    module_name, class_name = ENGINES[engine]
    return getattr(importlib.import_module(module_name), class_name)(setup)
