"""ZeRO in plain PyTorch, with bit-identical weights on any number of ranks.

Gradients are added along one tree over the leaves of a step, no matter which ranks compute the leaves (see
`engines.summation_tree`). Every leaf has its own BatchNorm statistics, and norms are added in an order that does not
depend on the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch.distributed.tensor import DTensor

from zerovision.training.engines.engine import Engine, EngineSetup, StepResult, Updates
from zerovision.training.engines.fsdp2 import Fsdp2
from zerovision.training.engines.model_buffers import ModelBuffers
from zerovision.training.engines.parameter_shards import (
    EngineState,
    TakeBox,
    fill_shards,
    frozen_parameters,
    parameter_shapes,
)
from zerovision.training.engines.zero1 import Zero1
from zerovision.training.recipe.optimizer import create_state, moment_kinds, restart, set_applied_steps
from zerovision.training.world.collectives import copy_from_main


class TorchEngine(Engine):
    """A model whose training state is sharded by `Zero1` (stage 1) or `Fsdp2` (stages 2 and 3)."""

    def __init__(self, setup: EngineSetup) -> None:
        """Distribute the model; a collective."""
        self.module, self.optimizer, self._world = setup.module, setup.optimizer, setup.data
        device = self._world.device if setup.plan.offload == "none" else torch.device("cpu")
        self.updates = Updates(self.optimizer, setup.precision, setup.gradient_clipping, device)
        self.loss_scale = self.updates.loss_scale
        self._accumulation_steps, self._micro_steps, self._part = setup.accumulation_steps, 0, setup.part
        self._leaves = setup.leaves
        self._copied: torch.cuda.Event | None = None
        self.buffers = ModelBuffers(self.module, setup.leaves, device)
        self._distribution: Zero1 | Fsdp2 = (Zero1 if setup.plan.zero_stage == 1 else Fsdp2)(setup)
        create_state(self.optimizer, self._trained())

    @property
    def _factor(self) -> float:
        """The factor on a leaf's loss: the loss scale, divided by the number of leaves."""
        return self.updates.scale / (self._world.size * self._accumulation_steps)

    @property
    def _leaf(self) -> int:
        return self._micro_steps % self._accumulation_steps

    def _trained(self) -> list[torch.Tensor]:
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        if self.module.training:
            self.buffers.select(self._leaf)
        return self._distribution.forward(images)

    def backward(self, loss: torch.Tensor) -> None:
        self._distribution.begin_backward(self._leaf)
        loss.backward(torch.full_like(loss, self._factor))
        self._distribution.end_backward()

    def gradients(self, loss: torch.Tensor) -> dict[str, torch.Tensor]:
        trained = {name: one for name, one in self.module.named_parameters() if one.requires_grad}
        found = torch.autograd.grad(loss * self._factor, [*trained.values()], allow_unused=True)
        return {name: gradient for name, gradient in zip(trained, found, strict=True) if gradient is not None}

    def drop_leaf(self) -> None:
        assert isinstance(self._distribution, Zero1)
        self._distribution.drop_leaf()

    @torch.no_grad()
    def step(self) -> StepResult | None:
        self._micro_steps += 1
        return None if self._leaf else self._update_weights()

    @torch.no_grad()
    def _update_weights(self) -> StepResult:
        self._wait_for_copies()
        norm = self._part.sum(self._distribution.sum_gradients()).sqrt() / self.updates.scale
        result = self.updates.apply(norm, lambda: self._update(norm))
        for parameter in self._trained():
            parameter.grad = None
        return result

    def _update(self, norm: torch.Tensor) -> None:
        factor = self.updates.factor(norm)
        if factor is not None:
            self._distribution.scale_gradients(factor)
        self.optimizer.step()
        self._distribution.share_weights()

    def restart_optimizer(self) -> None:
        self.updates.applied = 0
        restart(self.optimizer)

    @torch.no_grad()
    def change_weights(self, change: Callable[[torch.Tensor, dict[str, torch.Tensor]], None]) -> None:
        self._wait_for_copies()
        self._distribution.settle()
        for parameter in self._trained():
            change(parameter, self.optimizer.state[parameter])
        self._distribution.share_weights()

    def wait_before_change(self, copied: torch.cuda.Event) -> None:
        self._copied = copied

    def _wait_for_copies(self) -> None:
        if self._copied is not None:
            self._copied.wait()
        self._copied = None

    def state(self) -> EngineState:
        shapes, kinds = self._part.shapes(parameter_shapes(self.module)), moment_kinds(self.optimizer)
        own = self._distribution.shards() if self._distribution.reports else []
        shards = self._part.of_whole(shard for shard in own if self._part.counts(shard.name))
        leaves = tuple(self._leaves.of(self._world.rank))
        buffers, applied = self.buffers.by_name(), int(self.updates.applied)
        return EngineState(shapes, kinds, shards, buffers, leaves, applied, saves_buffers=self._part.counts(""))

    @torch.no_grad()
    def load_state(
        self, tensors: Mapping[str, TakeBox], buffers: Mapping[str, torch.Tensor], applied_steps: int
    ) -> None:
        self.updates.applied = applied_steps
        set_applied_steps(self.optimizer, applied_steps)
        fill_shards(self._part.of_whole(self._distribution.shards()), tensors)
        for parameter in frozen_parameters(self.module).values():
            # Frozen parameters are whole on every rank that uses them, but only one rank saves them as a shard.
            if not isinstance(parameter, DTensor) and not parameter.is_meta:
                copy_from_main([parameter], self._world)
        self.buffers.write(buffers)
        self._distribution.settle()
        self._distribution.share_weights()

    def close(self) -> None: ...
