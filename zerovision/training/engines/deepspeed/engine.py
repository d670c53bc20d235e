"""DeepSpeed ZeRO as an engine; only this module imports DeepSpeed."""

from __future__ import annotations

import argparse
import contextlib
import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zerovision.training.base.files import process_space
from zerovision.training.base.timing import communication
from zerovision.training.engines.engine import Engine, EngineSetup, StepResult
from zerovision.training.engines.model_buffers import ModelBuffers
from zerovision.training.engines.parameter_shards import (
    WEIGHTS,
    EngineState,
    ParameterShard,
    TakeBox,
    fill_shards,
    flat_shards,
    frozen_parameters,
    frozen_shards,
    parameter_shapes,
)
from zerovision.training.engines.precision import DynamicLossScale, under_autocast
from zerovision.training.recipe.optimizer import create_state, moment_kinds, moments_of, restart, set_applied_steps
from zerovision.training.world.collectives import copy_from_main


class DeepSpeedEngine(Engine):
    """A model whose training state DeepSpeed ZeRO shards."""

    def __init__(self, setup: EngineSetup, config: dict[str, Any]) -> None:
        """Shard the model and its optimizer according to DeepSpeed's configuration; a collective."""
        os.environ["DS_ACCELERATOR"] = setup.data.device.type  # otherwise, DeepSpeed probes, and may warn
        import deepspeed

        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        # Declare no operators compatible. Otherwise, DeepSpeed probes compilers and GPUs for them (seconds), and at the
        # first start, compiles an operator for CPU inference, which is not used here (20 s).
        deepspeed.ops.__compatible_ops__ = {}
        # Disable the decorator of DeepSpeed's own Muon, which is not used here: it would make torch.compile import its
        # code generation in each rank (3 CPU seconds).
        deepspeed.runtime.compiler.compile = lambda: lambda function: function
        _sign_build_locks()
        self.module, self._world = setup.module, setup.data
        self.loss_scale = DynamicLossScale() if setup.precision == "fp16" else None
        _forget_destroyed_group()
        self._linear = nn.functional.linear  # stage 3 replaces this for the whole process
        self._engine, _, _, _ = deepspeed.initialize(
            args=argparse.Namespace(device_rank=setup.data.device.index or 0),  # by default, the local rank
            model=under_autocast(setup.module, setup.precision, setup.data.device),
            optimizer=setup.optimizer,
            config=config,
            dist_init_required=False,
        )
        self.optimizer = self._engine.optimizer.optimizer
        self.buffers, self._applied_steps = ModelBuffers(self.module, device=self._world.device), 0
        self._backend = deepspeed.comm.comm.cdb
        deepspeed.comm.comm.cdb = TimedBackend(self._backend)
        create_state(self.optimizer, self._flat_partitions())
        self.optimizer.register_step_pre_hook(lambda rule, *_: self._count_once(rule))
        if setup.compiles:
            self._engine.compile()

    def _count_once(self, rule: torch.optim.Optimizer) -> None:
        """Correct step counts of rules that count per group, as DeepSpeed calls a rule for each part of the weights."""
        for group in rule.param_groups:
            if "step" in group:
                group["step"] = self._applied_steps

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self._engine(images)

    def backward(self, loss: torch.Tensor) -> None:
        if self.loss_scale is not None:
            self._engine.optimizer.override_loss_scale(self.loss_scale.value)
        self._engine.backward(loss)

    def step(self) -> StepResult | None:
        due = self._engine.is_gradient_accumulation_boundary()
        self._engine.step()
        if not due:
            return None
        applied = self._engine.was_step_applied()
        self._applied_steps += applied
        if self.loss_scale is not None:
            self.loss_scale.update(applied)
        return StepResult(applied, self._engine.get_global_grad_norm())

    def restart_optimizer(self) -> None:
        self._applied_steps = 0
        restart(self.optimizer)

    @torch.no_grad()
    def change_weights(self, change: Callable[[torch.Tensor, dict[str, torch.Tensor]], None]) -> None:
        with self._parts_written():
            for flat in self._flat_partitions():
                change(flat, self.optimizer.state[flat])

    @contextlib.contextmanager
    def _parts_written(self) -> Iterator[None]:
        """Copy the changes that the block makes to this rank's parts of the weights into the model; a collective."""
        zero = self._engine.optimizer
        if self._is_stage_3:
            zero.checkpoint_event_prologue()  # releases whole weights, which would be outdated
        yield
        if self._is_stage_3:  # as after a step
            for number in range(len(zero.fp16_groups)):
                zero._reassign_or_swap_out_partitioned_parameters(number)
            zero.checkpoint_event_epilogue()
        else:
            zero.update_lp_params()

    def state(self) -> EngineState:
        zero, kinds = self._engine.optimizer, moment_kinds(self.optimizer)
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        groups = zero.fp16_groups if self._is_stage_3 else zero.bit16_groups
        shards_of = _stage_3_shards if self._is_stage_3 else _stage_1_and_2_shards
        shards: list[ParameterShard] = []
        for flat, group in zip(self._flat_partitions(), groups, strict=True):
            flats = {WEIGHTS: flat} | moments_of(self.optimizer, flat)
            shards += shards_of({names[id(parameter)]: parameter for parameter in group}, flats)
        if self._is_stage_3:  # stage 3 also shards frozen parameters
            for name, parameter in frozen_parameters(self.module).items():
                shards += _stage_3_shards({name: parameter}, {WEIGHTS: parameter.ds_tensor})  # type: ignore[attr-defined]
        else:
            shards += frozen_shards(self.module, self._world)
        shapes, buffers = parameter_shapes(self.module), self.buffers.by_name()
        return EngineState(shapes, kinds, shards, buffers, (self._world.rank,), self._applied_steps)

    @torch.no_grad()
    def load_state(
        self, tensors: Mapping[str, TakeBox], buffers: Mapping[str, torch.Tensor], applied_steps: int
    ) -> None:
        self._applied_steps = applied_steps
        set_applied_steps(self.optimizer, applied_steps)
        # safe_set_full_fp32_param would fail at ZeRO 3 if a parameter's size is not a multiple of the number of ranks.
        with self._parts_written():
            fill_shards(self.state().shards, tensors)
        if not self._is_stage_3:  # only rank 0 has filled frozen parameters
            for parameter in frozen_parameters(self.module).values():
                copy_from_main([parameter], self._world)
        self.buffers.write(buffers)

    @property
    def _is_stage_3(self) -> bool:
        return hasattr(self._engine.optimizer, "fp32_partitioned_groups_flat")

    def _flat_partitions(self) -> list[torch.Tensor]:
        """Return this rank's flat fp32 parts of the weights, which are the inner optimizer's parameters."""
        zero = self._engine.optimizer
        return zero.fp32_partitioned_groups_flat if self._is_stage_3 else zero.single_partition_of_fp32_groups

    def close(self) -> None:
        import deepspeed

        deepspeed.comm.comm.cdb = self._backend
        self._engine.destroy()  # without this, the process may abort when it exits
        nn.functional.linear = self._linear


def _forget_destroyed_group() -> None:
    """Make DeepSpeed renew its copy of the process group if an earlier run in this process destroyed the copy.

    Otherwise, DeepSpeed keeps its first copy for the lifetime of the process (`groups._clone_world_group`).
    """
    from deepspeed.utils import groups

    if groups._WORLD_GROUP is not None:
        try:
            dist.get_global_rank(groups._WORLD_GROUP, 0)
        except ValueError:
            groups._WORLD_GROUP = None


@functools.cache
def _sign_build_locks() -> None:
    """Make locks on operator builds record where this process runs; see `zerovision.launch.process_tree`."""
    from torch.utils.file_baton import FileBaton

    acquire = FileBaton.try_acquire

    def acquire_and_sign(baton: FileBaton) -> bool | None:
        if is_acquired := acquire(baton):
            with contextlib.suppress(OSError):
                Path(baton.lock_file_path).write_text(process_space())
        return is_acquired

    FileBaton.try_acquire = acquire_and_sign  # type: ignore[assignment, method-assign]


class TimedBackend:
    """Wraps DeepSpeed's backend, `deepspeed.comm.comm.cdb`, or one of its work handles, to time communication."""

    COLLECTIVES = (
        *("all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_tensor", "broadcast"),
        *("all_gather", "all_gather_into_tensor", "all_gather_coalesced", "all_to_all_single", "barrier"),
    )

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._backend, name)
        if name not in (*self.COLLECTIVES, "wait"):
            return found

        @functools.wraps(found)  # DeepSpeed reads the function's name
        def timed(*arguments: Any, **named: Any) -> Any:
            with communication():
                result = found(*arguments, **named)
            return TimedBackend(result) if hasattr(result, "wait") else result

        return timed


def _stage_1_and_2_shards(
    parameters: Mapping[str, nn.Parameter], flats: Mapping[str, torch.Tensor]
) -> Iterator[ParameterShard]:
    """Yield the shards at ZeRO 1 and 2, where a group's parameters are concatenated and cut into one part per rank."""
    for name, parameter in parameters.items():
        mapping = parameter._hp_mapping  # type: ignore[attr-defined]
        if mapping is not None:  # otherwise, the whole parameter is on other ranks
            address, low = mapping.get_hp_fragment_address(), mapping.lp_fragment_address.start
            yield from flat_shards(name, parameter.shape, low, low + address.numel, flats, address.start)


def _stage_3_shards(
    parameters: Mapping[str, nn.Parameter], flats: Mapping[str, torch.Tensor]
) -> Iterator[ParameterShard]:
    """Yield the shards at ZeRO 3, where each parameter is cut separately, without the padding of the last part."""
    start = 0
    for name, parameter in parameters.items():
        size = parameter.ds_tensor.ds_numel  # type: ignore[attr-defined]
        low = min(dist.get_rank() * size, parameter.ds_numel)  # type: ignore[attr-defined]
        high = min(low + size, parameter.ds_numel)  # type: ignore[attr-defined]
        yield from flat_shards(name, parameter.ds_shape, low, high, flats, start)  # type: ignore[attr-defined]
        start += size
