"""DeepSpeed ZeRO as an engine; only this module imports DeepSpeed."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from training.observe.timing import communication
from training.parallel.engine import Engine, FlatShard, Piece, StepResult, fill_shard, frozen_parameters, frozen_shards
from training.parallel.precision import DynamicLossScale
from training.parallel.world import World
from training.recipe.optimizer import create_state, moment_kinds, set_applied_steps


class DeepSpeedEngine(Engine):
    """A model whose training state DeepSpeed ZeRO shards; for the arguments see `ENGINES`."""

    def __init__(
        self,
        module: nn.Module,
        network: nn.Module,
        optimizer: torch.optim.Optimizer,
        config: Mapping[str, Any],
        loss_scale: DynamicLossScale | None,
        world: World,
    ) -> None:
        """Shard the model and its optimizer; a collective."""
        if world.device.type == "cpu":
            os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed warns that it found no GPU
        import deepspeed

        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        # An operator for inference on CPUs, which would be compiled at the first start (20 s) and is not used here.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        self._engine, _, _, _ = deepspeed.initialize(
            model=network, optimizer=optimizer, config=dict(config), dist_init_required=False
        )
        self.module, self.loss_scale, self._world = module, loss_scale, world
        self._applied_steps = 0
        self._backend = deepspeed.comm.comm.cdb
        deepspeed.comm.comm.cdb = TimedBackend(self._backend)
        create_state(self._engine.optimizer.optimizer, self._flat_partitions())
        _zero_padding(self.flat_shards())

    @property
    def parameter_groups(self) -> list[dict[str, Any]]:
        return self._engine.optimizer.optimizer.param_groups

    def compile(self, mode: str | None) -> None:
        self._engine.compile(compile_kwargs={"mode": mode})

    def train(self, mode: bool = True) -> None:
        self._engine.train(mode)

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

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, parameter in self.module.named_parameters():
            with self._whole(parameter):
                value = parameter.detach().to("cpu", torch.float32, copy=True)
            yield name, value
        for name, buffer in self.module.named_buffers():
            yield name, buffer.detach().to("cpu", copy=True)

    def applied_steps(self) -> int:
        return self._applied_steps

    def write_state(
        self, weights: Mapping[str, torch.Tensor], moments: Mapping[str, Mapping[str, torch.Tensor]], applied_steps: int
    ) -> None:
        self._applied_steps = applied_steps
        set_applied_steps(self._engine.optimizer.optimizer, applied_steps)
        for name, parameter in self.module.named_parameters():
            # The working weights too: if only the fp32 copy were set, the next forward would use the old ones.
            with self._whole(parameter, modifier_rank=0):
                parameter.data.copy_(weights[name])
        # Not safe_set_full_fp32_param: at ZeRO 3 it fails if a parameter's size is no multiple of the ranks.
        for shard in self.flat_shards():
            fill_shard(shard, weights, moments)

    def parameter_shapes(self) -> dict[str, list[int]]:
        return {name: list(getattr(p, "ds_shape", p.shape)) for name, p in self.module.named_parameters()}

    def flat_shards(self) -> list[FlatShard]:
        zero = self._engine.optimizer
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        kinds = moment_kinds(zero.optimizer)
        groups = zero.fp16_groups if self._is_stage_3 else zero.bit16_groups
        pieces_of = _stage_3_pieces if self._is_stage_3 else _flat_pieces
        shards = []
        for flat, group in zip(self._flat_partitions(), groups, strict=True):
            parameters = {names[id(parameter)]: parameter for parameter in group}
            moments = {kind: zero.optimizer.state[flat][kind] for kind in kinds}
            shards.append(FlatShard(flat, moments, tuple(pieces_of(parameters)), tuple(parameters)))
        if not self._is_stage_3:
            return shards + frozen_shards(self.module, self._world)
        # ZeRO 3 partitions frozen parameters as it does the others.
        return shards + [
            FlatShard(parameter.ds_tensor, {}, tuple(_stage_3_pieces({name: parameter})))  # type: ignore[attr-defined]
            for name, parameter in frozen_parameters(self.module).items()
        ]

    def _whole(self, parameter: nn.Parameter, modifier_rank: int | None = None) -> AbstractContextManager[None]:
        """Gather a parameter inside the block at ZeRO 3, and keep what `modifier_rank` writes to it; a collective."""
        import deepspeed

        return deepspeed.zero.GatheredParameters([parameter], modifier_rank=modifier_rank, enabled=self._is_stage_3)

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
        self._engine.destroy()  # without it a process may abort at its exit


class TimedBackend:
    """DeepSpeed's communication backend (`deepspeed.comm.comm.cdb`), whose collectives count as communication."""

    COLLECTIVES = (
        *("all_reduce", "all_reduce_coalesced", "reduce", "reduce_scatter", "reduce_scatter_tensor", "broadcast"),
        *("all_gather", "all_gather_into_tensor", "all_gather_coalesced", "all_to_all_single", "barrier"),
    )

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        for name in self.COLLECTIVES:
            setattr(self, name, functools.partial(_timed, getattr(backend, name)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)


class TimedWork:
    """A collective under way, the wait for which counts as communication."""

    def __init__(self, work: Any) -> None:
        self._work = work

    def wait(self, *arguments: Any) -> Any:
        with communication():
            return self._work.wait(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _timed(collective: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
    with communication():
        work = collective(*arguments, **named)
    return work if work is None else TimedWork(work)


def _zero_padding(shards: list[FlatShard]) -> None:
    """Set the padding of the flat weights to 0: ZeRO 3 leaves it uninitialized, and no two files would be equal."""
    for shard in shards:
        is_padding = torch.ones_like(shard.weights, dtype=torch.bool)
        for piece in shard.pieces:
            is_padding[piece.start : piece.start + piece.length] = False
        shard.weights.detach()[is_padding] = 0


def _flat_pieces(parameters: Mapping[str, nn.Parameter]) -> Iterator[Piece]:
    """ZeRO 1 and 2: the group's parameters one after another, cut into one part per rank."""
    for name, parameter in parameters.items():
        mapping = parameter._hp_mapping  # type: ignore[attr-defined]
        if mapping is not None:  # else all of it is on other ranks
            address = mapping.get_hp_fragment_address()
            yield Piece(name, mapping.lp_fragment_address.start, address.start, address.numel)


def _stage_3_pieces(parameters: Mapping[str, nn.Parameter]) -> Iterator[Piece]:
    """ZeRO 3: each parameter is cut over the ranks by itself; the padding of its last part is left out."""
    start = 0
    for name, parameter in parameters.items():
        size = parameter.ds_tensor.ds_numel  # type: ignore[attr-defined]
        real = min(max(parameter.ds_numel - dist.get_rank() * size, 0), size)  # type: ignore[attr-defined]
        if real:
            yield Piece(name, dist.get_rank() * size, start, real)
        start += size
