"""DeepSpeed ZeRO as an engine; nothing outside this module knows DeepSpeed."""

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
from training.parallel.engine import FlatShard, Piece, StepResult, fill_shard, frozen_parameters, frozen_shards
from training.parallel.precision import DynamicLossScale
from training.parallel.world import World
from training.recipe.lamb import FlatLayout, Fragment
from training.recipe.optimizer import create_state, moment_kinds, set_applied_steps


class DeepSpeedEngine:
    """A model whose training state DeepSpeed ZeRO shards; see `training.parallel.engine.Engine`."""

    def __init__(
        self,
        module: nn.Module,
        network: nn.Module,
        optimizer: torch.optim.Optimizer,
        config: Mapping[str, Any],
        loss_scale: DynamicLossScale | None,
        world: World,
    ) -> None:
        """Shard the model and its optimizer; a collective.

        Args:
            module: the model in fp32; at ZeRO 3 its parameters are empty outside forward and backward.
            network: the same, or what runs it under autocast.
            optimizer: the rule over the module's parameters.
            config: what `training.parallel.strategies.engine_config` returned.
            loss_scale: of fp16, else None.
            world: the ranks.
        """
        if world.device.type == "cpu":
            os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed warns that it found no GPU
        import deepspeed

        logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
        # A CPU-only helper for inference that would be compiled at every first start (20 s) and is never called here.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        self._engine, _, _, _ = deepspeed.initialize(
            model=network, optimizer=optimizer, config=dict(config), dist_init_required=False
        )
        self.module, self.loss_scale, self._world = module, loss_scale, world
        self._applied_steps = 0
        self._backend = deepspeed.comm.comm.cdb
        deepspeed.comm.comm.cdb = TimedBackend(self._backend)
        create_state(self._engine.optimizer.optimizer, self._flat_partitions())
        _clear_filling(self.flat_shards())

    @property
    def parameter_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups, whose 'lr' the schedule sets before each step."""
        return self._engine.optimizer.optimizer.param_groups

    def compile(self, mode: str | None) -> None:
        """Let `torch.compile` translate the model at its first forward; mode as of `torch.compile`."""
        self._engine.compile(compile_kwargs={"mode": mode})

    def train(self, mode: bool = True) -> None:
        """Set training or evaluation mode of the model."""
        self._engine.train(mode)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits [B, classes] in float32 for images [B, 3, H, W]; a collective at ZeRO 3."""
        return self._engine(images)

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of a scalar loss, and reduce it over the ranks where it is due; a collective."""
        if self.loss_scale is not None:
            self._engine.optimizer.override_loss_scale(self.loss_scale.value)
        self._engine.backward(loss)

    def step(self) -> StepResult | None:
        """Count a micro-step, and update the weights after the last one of an accumulation; a collective.

        Returns:
            None between the updates. An update is skipped on all ranks when the gradient's norm is not finite.
        """
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
        """Yield every parameter in full and in fp32, and every buffer, as CPU tensors; a collective."""
        for name, parameter in self.module.named_parameters():
            with self._whole(parameter):
                value = parameter.detach().to("cpu", torch.float32, copy=True)
            yield name, value
        for name, buffer in self.module.named_buffers():
            yield name, buffer.detach().to("cpu", copy=True)

    def applied_steps(self) -> int:
        """Return how many updates the optimizer has applied, which Adam's bias correction needs."""
        return self._applied_steps

    def write_state(
        self, weights: Mapping[str, torch.Tensor], moments: Mapping[str, Mapping[str, torch.Tensor]], applied_steps: int
    ) -> None:
        """Fill a fresh engine with the state of another, under whatever strategy it was; a collective."""
        self._applied_steps = applied_steps
        set_applied_steps(self._engine.optimizer.optimizer, applied_steps)
        for name, parameter in self.module.named_parameters():
            # The working weights, too: setting the fp32 copy alone would leave the next forward with the old ones.
            with self._whole(parameter, modifier_rank=0):
                parameter.data.copy_(weights[name])
        # Not safe_set_full_fp32_param: at ZeRO 3 it fails where a parameter does not divide by the ranks.
        for shard in self.flat_shards():
            fill_shard(shard, weights, moments)

    def parameter_shapes(self) -> dict[str, list[int]]:
        """Return the full shape of every parameter, also where ZeRO 3 has emptied it."""
        return {name: list(getattr(p, "ds_shape", p.shape)) for name, p in self.module.named_parameters()}

    def flat_shards(self) -> list[FlatShard]:
        """Return this rank's part of weights and moments as it lies in memory, the frozen ones last; no collective."""
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        kinds = moment_kinds(self._engine.optimizer.optimizer)
        states = self._engine.optimizer.optimizer.state
        trained = [
            FlatShard(
                weights=flat,
                moments={kind: states[flat][kind] for kind in kinds},
                pieces=tuple(Piece(names[id(group[f.parameter])], f.offset, f.start, f.length) for f in fragments),
            )
            for flat, group, fragments in self._fragments()
        ]
        return trained + self._frozen_shards()

    def _frozen_shards(self) -> list[FlatShard]:
        """Return this rank's part of the frozen parameters, which ZeRO 3 cuts over the ranks as it does the others."""
        if not self._is_stage_3:
            return frozen_shards(self.module, self._world)
        return [
            FlatShard(
                weights=parameter.ds_tensor,  # type: ignore[attr-defined]
                moments={},
                pieces=tuple(Piece(name, f.offset, f.start, f.length) for f in _stage_3_fragments([parameter])),
            )
            for name, parameter in frozen_parameters(self.module).items()
        ]

    def _whole(self, parameter: nn.Parameter, modifier_rank: int | None = None) -> AbstractContextManager[None]:
        """Have a parameter whole for a while, also at ZeRO 3, and keep what that rank writes to it; a collective."""
        import deepspeed

        return deepspeed.zero.GatheredParameters([parameter], modifier_rank=modifier_rank, enabled=self._is_stage_3)

    @property
    def _is_stage_3(self) -> bool:
        return hasattr(self._engine.optimizer, "fp32_partitioned_groups_flat")

    def shard_layouts(self) -> dict[int, FlatLayout]:
        """Say, for each of this rank's flat fp32 pieces (by `id`), which part of which parameter lies where."""
        return {id(flat): FlatLayout(len(group), fragments) for flat, group, fragments in self._fragments()}

    def _fragments(self) -> list[tuple[torch.Tensor, list[nn.Parameter], tuple[Fragment, ...]]]:
        """Return each flat piece of this rank, the parameters of its group, and their fragments in it."""
        zero = self._engine.optimizer
        groups = zero.fp16_groups if self._is_stage_3 else zero.bit16_groups
        fragments_of = _stage_3_fragments if self._is_stage_3 else _flat_fragments
        return [
            (flat, group, tuple(fragments_of(group)))
            for flat, group in zip(self._flat_partitions(), groups, strict=True)
        ]

    def _flat_partitions(self) -> list[torch.Tensor]:
        """This rank's flat fp32 pieces of the weights, which are the inner optimizer's parameters."""
        zero = self._engine.optimizer
        return zero.fp32_partitioned_groups_flat if self._is_stage_3 else zero.single_partition_of_fp32_groups

    def close(self) -> None:
        """Release DeepSpeed's hooks and buffers; without it a process may abort at its exit (findings, row 17)."""
        import deepspeed

        deepspeed.comm.comm.cdb = self._backend
        self._engine.destroy()


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


def _clear_filling(shards: list[FlatShard]) -> None:
    """Set to 0 what fills up the flat weights: ZeRO 3 leaves it as the memory was, and no two files would be equal."""
    for shard in shards:
        is_filling = torch.ones_like(shard.weights, dtype=torch.bool)
        for piece in shard.pieces:
            is_filling[piece.start : piece.start + piece.length] = False
        shard.weights.detach()[is_filling] = 0


def _flat_fragments(parameters: list[nn.Parameter]) -> Iterator[Fragment]:
    """ZeRO 1 and 2: the group's parameters one after another, cut into one piece per rank."""
    for number, parameter in enumerate(parameters):
        mapping = parameter._hp_mapping  # type: ignore[attr-defined]
        if mapping is not None:  # else it lies wholly on other ranks
            address = mapping.get_hp_fragment_address()
            yield Fragment(number, address.start, address.numel, mapping.lp_fragment_address.start)


def _stage_3_fragments(parameters: list[nn.Parameter]) -> Iterator[Fragment]:
    """ZeRO 3: each parameter is cut over the ranks by itself; the last piece is filled up, and the filling left out."""
    start = 0
    for number, parameter in enumerate(parameters):
        size = parameter.ds_tensor.ds_numel  # type: ignore[attr-defined]
        real = min(max(parameter.ds_numel - dist.get_rank() * size, 0), size)  # type: ignore[attr-defined]
        if real:
            yield Fragment(number, start, real, dist.get_rank() * size)
        start += size
