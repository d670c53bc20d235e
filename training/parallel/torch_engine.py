"""PyTorch's own data parallelism as an engine.

`training.parallel.torch_distribution` distributes the parameters. The optimizer sees plain tensors, the rows of
a parameter that this rank has: an operation on a DTensor costs many times its dispatch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from training.parallel.block_norms import sum_of_squares
from training.parallel.collectives import sum_over_ranks
from training.parallel.engine import Engine, EngineSetup, StepResult, Updates
from training.parallel.model_buffers import ModelBuffers
from training.parallel.parameter_shards import (
    WEIGHTS,
    EngineState,
    ParameterShard,
    fill_shards,
    parameter_shapes,
)
from training.parallel.torch_distribution import Distribution, Replicated, Sharded
from training.recipe.lamb import bind_lamb
from training.recipe.optimizer import create_state, moment_kinds, moments_of, restart, set_applied_steps

VALUES_NORMED_IN_FLOAT32 = 1 << 14


class TorchEngine(Engine):
    """A model whose training state PyTorch replicates or shards.

    The optimizer's groups get this rank's parts of the parameters.
    """

    def __init__(self, setup: EngineSetup) -> None:
        """Distribute the model; a collective."""
        self.module, self.optimizer, self._world = setup.module, setup.optimizer, setup.world
        device = self._world.device if setup.plan.offload == "none" else torch.device("cpu")
        self.updates = Updates(self.optimizer, setup.precision, setup.gradient_clipping, device)
        self.loss_scale = self.updates.loss_scale
        self._accumulation_steps, self._micro_steps = setup.accumulation_steps, 0
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        grouped = [[names[id(parameter)] for parameter in group["params"]] for group in self.optimizer.param_groups]
        self._distribution: Distribution = (Replicated if setup.plan.zero_stage == 1 else Sharded)(setup)
        parameters = dict(self.module.named_parameters())
        self.buffers = ModelBuffers(self.module, versions=self._accumulation_steps)
        # Without the parameters of which this rank has no rows, or that another rank updates.
        self._trained = {
            name: _local_parameter(parameters[name])
            for group in grouped
            for name in group
            if _local(parameters[name]).numel() and self._distribution.updates(name)
        }
        self._live = {name: parameters[name] for name in self._trained}
        for group, members in zip(self.optimizer.param_groups, grouped, strict=True):
            group["params"] = [self._trained[name] for name in members if name in self._trained]
        create_state(self.optimizer, self._trained.values())
        bind_lamb(self.optimizer, self._state_of(self._shards()), self._world, self._distribution.copies)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        leaf = self._micro_steps % self._accumulation_steps
        if self.module.training:
            self.buffers.select(leaf)
        return self._distribution.forward(images, is_last_micro_step=leaf == self._accumulation_steps - 1)

    def backward(self, loss: torch.Tensor) -> None:
        (loss * (self.updates.scale / self._accumulation_steps)).backward()  # PyTorch divides by the ranks

    @torch.no_grad()
    def step(self) -> StepResult | None:
        self._micro_steps += 1
        if self._micro_steps % self._accumulation_steps:
            return None
        gradients = self._take_gradients()
        squares = _sum_of_squares(gradients, self._world.device)
        norm = (sum_over_ranks(squares, self._world) / self._distribution.copies).sqrt() / self.updates.scale
        result = self.updates.apply(norm, lambda: self._update(gradients, norm))
        for parameter in (*self.module.parameters(), *self._trained.values()):
            parameter.grad = None
        return result

    def _take_gradients(self) -> list[torch.Tensor]:
        """Give the optimizer's parameters values and gradients of the model's; return the gradients."""
        self._take_weights()
        for name, parameter in self._live.items():
            trained, gradient = self._trained[name], parameter.grad
            trained.grad = torch.zeros_like(trained) if gradient is None else _local(gradient)
        return [cast(torch.Tensor, trained.grad) for trained in self._trained.values()]

    def _take_weights(self) -> None:
        """Give the optimizer's parameters the values of the model's, which FSDP2 may have moved."""
        for name, parameter in self._live.items():
            trained = self._trained[name]
            if trained is not parameter:
                trained.data = _local(parameter)

    def restart_optimizer(self) -> None:
        self.updates.applied = 0
        restart(self.optimizer)

    @torch.no_grad()
    def change_weights(self, change: Callable[[torch.Tensor, dict[str, torch.Tensor]], None]) -> None:
        self._distribution.settle()
        self._take_weights()
        for trained in self._trained.values():
            change(trained, self.optimizer.state[trained])
        self._distribution.share_weights()

    def _update(self, gradients: list[torch.Tensor], norm: torch.Tensor) -> None:
        factor = self.updates.factor(norm)
        if gradients and factor is not None:
            torch._foreach_mul_(gradients, factor.to(gradients[0].device, torch.float32))
        self.optimizer.step()
        self._distribution.share_weights()

    def state(self) -> EngineState:
        return self._state_of([shard for shard in self._shards() if self._distribution.owns(shard.name)])

    def _state_of(self, shards: list[ParameterShard]) -> EngineState:
        shapes, kinds = parameter_shapes(self.module), moment_kinds(self.optimizer)
        return EngineState(shapes, kinds, shards, self.buffers.by_name(), int(self.updates.applied))

    def _shards(self) -> list[ParameterShard]:
        """Return this rank's parts of all parameters, also of those that another rank reports."""
        self._distribution.settle()
        shards = []
        for name, parameter in self.module.named_parameters():
            tensors = {WEIGHTS: _local(parameter).detach()}
            if name in self._trained:
                tensors |= moments_of(self.optimizer, self._trained[name])
            if tensors[WEIGHTS].numel():
                offsets = (self._distribution.first_row(parameter), *[0] * (parameter.ndim - 1))[: parameter.ndim]
                shards.append(ParameterShard(name, offsets, tensors))
        return shards

    @torch.no_grad()
    def load_state(
        self,
        tensors: Mapping[str, Mapping[str, torch.Tensor]],
        buffers: Mapping[str, torch.Tensor],
        applied_steps: int,
    ) -> None:
        self.updates.applied = applied_steps
        set_applied_steps(self.optimizer, applied_steps)
        fill_shards(self._shards(), tensors)
        self.buffers.write(buffers)

    def close(self) -> None: ...


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, any other tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _local_parameter(parameter: nn.Parameter) -> nn.Parameter:
    if not isinstance(parameter, DTensor):
        return parameter
    return nn.Parameter(_local(parameter).detach(), requires_grad=parameter.requires_grad)


def _sum_of_squares(tensors: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return the sum of the squares of all values as float64 [] on `device`, to about float32's precision."""
    small, large = list[torch.Tensor](), list[torch.Tensor]()
    for tensor in tensors:  # CUDA's kernel adds 64 Ki values in a tree, then their sums
        (small if tensor.is_cuda or tensor.numel() <= VALUES_NORMED_IN_FLOAT32 else large).append(tensor)
    total = torch.zeros((), dtype=torch.float64, device=device)
    if small:
        total += torch.stack(torch._foreach_norm(small)).double().square().sum().to(device)
    for tensor in large:
        # Dense, in whatever order of dimensions: as a vector in the order of memory.
        total += sum_of_squares(tensor.as_strided((tensor.numel(),), (1,))).to(device)
    return total
