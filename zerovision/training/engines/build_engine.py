"""The table of engines, the choice of one, and its construction."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from torch import nn

from zerovision.models.ensemble import Ensemble
from zerovision.training.base.errors import UserError
from zerovision.training.engines.deepspeed_config import keys_of_deepspeed_alone
from zerovision.training.engines.engine import Engine, EngineSetup
from zerovision.training.engines.islands import IslandEngine, Islands
from zerovision.training.engines.parameter_shards import frozen_parameters
from zerovision.training.engines.strategies import ParallelPlan
from zerovision.training.world.collectives import copy_from_main

# Module and class of each, built from an `EngineSetup`; a collective.
ENGINES = {
    "deepspeed": ("zerovision.training.engines.deepspeed_engine", "DeepSpeedEngine"),
    "torch": ("zerovision.training.engines.torch_engine", "TorchEngine"),
}
# The torch engine, if the model is cut, or has members.
PIPELINED = ("zerovision.training.engines.pipeline.engine", "PipelineEngine")
OF_MEMBERS = ("zerovision.training.engines.pipeline.members", "MembersEngine")


def resolve_engine(engine: str, plan: ParallelPlan, strategy_json: Mapping[str, Any], module: nn.Module) -> str:
    """Return the engine of a run, a key of `ENGINES`.

    'auto' is PyTorch's, which gives the same weights on any number of ranks, and DeepSpeed for what that does not do.

    Args:
        engine: 'auto' or a key of `ENGINES`.
        plan: how the state is distributed.
        strategy_json: the strategy's JSON for DeepSpeed.
        module: the model.

    Raises:
        UserError: if an engine is asked for something that it does not do.
    """
    if engine == "auto" and plan.replicas == plan.tensor_parallel == 1:
        return "deepspeed" if reasons_for_deepspeed(plan, strategy_json, module) else "torch"
    if engine in ("auto", "torch"):
        unknown = keys_of_deepspeed_alone(strategy_json)
        if unknown:
            raise UserError(f"--engine torch does not know {', '.join(unknown)}: use --engine deepspeed, or auto.")
        _check_torch(plan, module)
        return "torch"
    return engine


def reasons_for_deepspeed(plan: ParallelPlan, strategy_json: Mapping[str, Any], module: nn.Module) -> list[str]:
    """Return what asks for DeepSpeed under 'auto': keys of the JSON that it alone follows, and what it does better."""
    reasons = keys_of_deepspeed_alone(strategy_json) + (["--offload"] if plan.offload != "none" else [])
    if plan.zero_stage > 1 and (scalar := _single_number(module)):
        reasons.append(f"how to shard the single number {scalar}")
    return reasons


def note_engine(
    asked: str, engine: str, plan: ParallelPlan, strategy_json: Mapping[str, Any], module: nn.Module
) -> list[str]:
    """Return a note if the engine is another than the words say, or DeepSpeed; arguments as of `resolve_engine`."""
    if asked != "auto" or engine != "deepspeed":
        return []
    reasons = ", ".join(reasons_for_deepspeed(plan, strategy_json, module))
    return [f"--engine auto is deepspeed, which alone knows {reasons}"]


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


def build_engine(setup: EngineSetup, engine: str, islands: Islands | None = None) -> Engine:
    """Distribute a model and its optimizer; a collective.

    Args:
        setup: model, optimizer and how they are distributed.
        engine: a key of `ENGINES`.
        islands: of which each has an engine of its own, PyTorch's; None for none.
    """
    if engine != "torch" or setup.plan.zero_stage == 1 or setup.world.size == 1:  # else FSDP2 moves it block by block
        setup.module.to(setup.world.device)
    copy_from_main([*frozen_parameters(setup.module).values()], setup.world)
    if islands is not None:
        return IslandEngine(setup, islands)
    # Imported here: DeepSpeed takes seconds to import, and other engines do not need it.
    module_name, class_name = ENGINES[engine]
    if setup.pipeline is not None:
        module_name, class_name = OF_MEMBERS if isinstance(setup.module, Ensemble) else PIPELINED
    return getattr(importlib.import_module(module_name), class_name)(setup)
