"""ZeRO over flat buffers, in plain PyTorch: what DeepSpeed does, for models whose gradients fit one bucket.

Each parameter group is one flat fp32 buffer that the parameters are views of (Rajbhandari et al. 2020,
https://arxiv.org/abs/1910.02054). Every rank owns an equal part: it receives the sum of that part's gradients, keeps
the optimizer's state of it and updates it; then the parts are gathered again. That is one message in each direction
and no Python per parameter, which is where DeepSpeed spends its time on models of this size.

The same weights come out on any number of ranks, to the bit: gradients are added along one tree over the leaves of a
step, whoever computes them (`training.parallel.summation_tree`), every leaf has its own BatchNorm statistics, and norms
are sums over blocks whose boundaries do not depend on the ranks.

Images are channels_last, and so are the weights of convolutions, their gradients and moments in the flat buffers:
kernels would otherwise convert them in every step. Everything else sees the usual order of dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from training.parallel.batchnorm import ModelBuffers
from training.parallel.block_norms import BLOCK, BlockSum
from training.parallel.compilation import compile_mode
from training.parallel.engine import Engine, EngineSetup, StepResult
from training.parallel.flat_buffers import make_buffers
from training.parallel.parameter_shards import (
    CHANNELS_LAST,
    CONVOLUTION_DIMENSIONS,
    WEIGHTS,
    EngineState,
    ParameterShard,
    fill_shards,
    flat_shards,
    from_channels_last,
    frozen_parameters,
    frozen_shards,
    parameter_shapes,
)
from training.parallel.precision import DynamicLossScale, under_autocast
from training.parallel.summation_tree import StepTree
from training.parallel.world import World
from training.recipe.lamb import bind_lamb
from training.recipe.optimizer import create_state, moment_kinds, set_applied_steps

ALIGNMENT = 16  # elements: every parameter begins on a cache line


class FlatGroup:
    """One parameter group in one flat buffer.

    Attributes:
        buffers: weights and gradients; a part is a whole number of blocks.
        elements: of the parameters, with what aligns them; the same on any number of ranks.
        master: this rank's part of the weights [n / ranks], the one parameter that the optimizer sees.
        gradient: of the master, [n / ranks]; set by each step.
    """

    def __init__(
        self, parameters: dict[str, nn.Parameter], world: World, tree: StepTree, *, is_first: bool, releasable: bool
    ) -> None:
        self._parameters, self._starts, self.elements = parameters, dict[str, int](), 0
        for name, parameter in parameters.items():
            self._starts[name] = self.elements
            self.elements += _round_up(parameter.numel(), ALIGNMENT)
        size = _round_up(self.elements, BLOCK * world.size)
        self.buffers = make_buffers(size, world, tree, is_first=is_first, releasable=releasable)
        part = size // world.size
        self._low, self._high = world.rank * part, (world.rank + 1) * part
        for name, parameter in parameters.items():
            weight, gradient = (
                _view(flat, self._starts[name], parameter.shape)
                for flat in (self.buffers.weights, self.buffers.gradients)
            )
            if world.is_main:
                weight.copy_(parameter.detach())
            parameter.data, parameter.grad = weight, gradient
        self.buffers.start_from_main()
        self.master = nn.Parameter(self.buffers.part)
        self.gradient = torch.zeros(0)

    def shards(self, moments: Mapping[str, torch.Tensor]) -> Iterator[ParameterShard]:
        """Yield the parts of parameters that lie in this rank's part, with the optimizer's state of it."""
        flats = {WEIGHTS: self.master, **moments}
        for name, parameter in self._parameters.items():
            start = self._starts[name]
            low, high = max(start, self._low), min(start + parameter.numel(), self._high)
            shape, is_convolution = parameter.shape, parameter.ndim == CONVOLUTION_DIMENSIONS
            order = [shape[dimension] for dimension in CHANNELS_LAST] if is_convolution else shape
            for shard in flat_shards(name, order, low - start, high - start, flats, low - self._low):
                yield from_channels_last(shard) if is_convolution else shard


class NativeEngine(Engine):
    """A model whose training state is sharded over the ranks by flat buffers.

    The optimizer's groups get this rank's flat parts as their parameters.
    """

    def __init__(self, setup: EngineSetup) -> None:
        """Take over the parameters; a collective."""
        self.module, self.optimizer, self._world = setup.module, setup.optimizer, setup.world
        self.loss_scale = DynamicLossScale() if setup.precision == "fp16" else None
        self._network = under_autocast(setup.module, setup.precision, setup.world.device)
        self._accumulation_steps, self._clipping = setup.accumulation_steps, setup.gradient_clipping
        self._releases = setup.plan.releases_weights
        # The fused rules skip an update by a flag on the device. fp16's loss scale needs the verdict at once.
        is_fused = all(group.get("fused") for group in self.optimizer.param_groups)
        self.defers_verdict = self._world.device.type == "cuda" and is_fused and self.loss_scale is None
        tree = StepTree(self._world.size, self._accumulation_steps)
        self.buffers = ModelBuffers(self.module, versions=self._accumulation_steps)
        self._micro_steps = 0
        self._applied_steps: int | torch.Tensor = 0
        names = {id(parameter): name for name, parameter in self.module.named_parameters()}
        self._groups: list[FlatGroup] = []
        for group in self.optimizer.param_groups:
            parameters = {names[id(parameter)]: parameter for parameter in group["params"]}
            flat = FlatGroup(parameters, self._world, tree, is_first=not self._groups, releasable=self._releases)
            group["params"] = [flat.master]
            self._groups.append(flat)
        create_state(self.optimizer, (group.master for group in self._groups))
        self._block_sum = BlockSum([(group.elements, len(group.master)) for group in self._groups], self._world)
        self._has_all_weights = True
        bind_lamb(self.optimizer, self.state(), setup.world, by_blocks=True)
        if setup.compiles:
            self._network.compile(mode=compile_mode(self._world.device, setup.batch_size, setup.plan))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self._gather()
        if self.module.training:
            self.buffers.select(self._micro_steps % self._accumulation_steps)
        return self._network(images)

    def backward(self, loss: torch.Tensor) -> None:
        scale = 1 / (self._world.size * self._accumulation_steps)
        if self.loss_scale is not None:
            scale *= self.loss_scale.value
        for group in self._groups:
            group.buffers.sums.before_backward()
        (loss * scale).backward()
        for group in self._groups:
            group.buffers.sums.after_backward()

    def step(self) -> StepResult | None:
        self._micro_steps += 1
        if self._micro_steps % self._accumulation_steps:
            return None
        scale = self.loss_scale.value if self.loss_scale is not None else 1.0
        norm = self._sum_gradients() / scale
        is_finite = norm.isfinite()
        applied: bool | torch.Tensor = is_finite
        if self.defers_verdict:
            # The rule itself reads it on the device: nothing here waits.
            self.optimizer.found_inf = (~is_finite).float()  # type: ignore[attr-defined]
        else:
            applied = bool(is_finite)  # a sync on a GPU
        if applied is not False:
            self._update(norm, scale)
        for group in self._groups:
            group.buffers.sums.clear()
        self._applied_steps += applied
        if self.loss_scale is not None:
            self.loss_scale.update(bool(applied))
        return StepResult(applied, norm)

    def _sum_gradients(self) -> torch.Tensor:
        """Set each group's gradient to its sum over the leaves; return the global L2 norm, float64 []; a collective."""
        for group in self._groups:
            group.gradient = group.master.grad = group.buffers.sum_own_part()
        # All ranks have read the gradients when this returns: they may be written again.
        return self._block_sum([group.gradient for group in self._groups]).sqrt()

    @torch.no_grad()
    def _update(self, norm: torch.Tensor, scale: float) -> None:
        factor: float | torch.Tensor = 1 / scale
        if self._clipping:
            factor = factor * (self._clipping / (norm + 1e-6)).clamp(max=1.0)
        if self._clipping or scale != 1.0:
            for group in self._groups:
                group.gradient.mul_(factor)
        self.optimizer.step()
        if self._releases:
            for group in self._groups:
                group.buffers.release_weights()
            self._has_all_weights = False
        else:
            self._gather(changed=True)

    def state(self) -> EngineState:
        kinds, state = moment_kinds(self.optimizer), self.optimizer.state
        shards = frozen_shards(self.module, self._world)
        for group in self._groups:
            shards += group.shards({kind: state[group.master][kind] for kind in kinds})
        return EngineState(
            parameter_shapes(self.module), kinds, shards, self.buffers.by_name(), int(self._applied_steps)
        )

    @torch.no_grad()
    def load_state(
        self,
        tensors: Mapping[str, Mapping[str, torch.Tensor]],
        buffers: Mapping[str, torch.Tensor],
        applied_steps: int,
    ) -> None:
        self._applied_steps = applied_steps
        set_applied_steps(self.optimizer, applied_steps)
        for name, parameter in frozen_parameters(self.module).items():
            parameter.copy_(tensors[WEIGHTS][name])
        fill_shards(self.state().shards, tensors)
        self.buffers.write(buffers)
        self._gather(changed=True)

    def close(self) -> None: ...

    def _gather(self, *, changed: bool = False) -> None:
        """Gather all weights on this rank; a collective if they were released or have changed."""
        if changed or not self._has_all_weights:
            for group in self._groups:
                group.buffers.gather_weights()
            self._has_all_weights = True


def _view(flat: torch.Tensor, start: int, shape: torch.Size) -> torch.Tensor:
    """Return a view of a flat tensor in a parameter's shape; for a convolution's weights in channels_last."""
    place = flat.narrow(0, start, shape.numel())
    if len(shape) != CONVOLUTION_DIMENSIONS:
        return place.view(shape)
    outputs, inputs, height, width = shape
    return place.view(outputs, height, width, inputs).permute(0, 3, 1, 2)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
