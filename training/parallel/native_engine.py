"""ZeRO over flat buffers, in plain PyTorch: what DeepSpeed does, for models whose gradients fit one bucket.

Each parameter group is one flat fp32 buffer that the parameters are views of (Rajbhandari et al. 2020,
https://arxiv.org/abs/1910.02054). Every rank owns an equal part: it receives the sum of that part's gradients, keeps
the optimizer's state of it and updates it; then the parts are gathered again. That is one message in each direction
and no Python per parameter, which is where DeepSpeed spends its time on models of this size.

Images are channels_last, and so are the weights of convolutions and their gradients: kernels would otherwise convert
them in every step. Checkpoints store them in this order and record it; everything else sees the usual shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from training.parallel.collectives import sum_over_ranks
from training.parallel.engine import (
    CONVOLUTION_DIMENSIONS,
    Engine,
    FlatShard,
    Piece,
    StepResult,
    fill_shard,
    frozen_parameters,
    frozen_shards,
)
from training.parallel.flat_buffers import make_buffers
from training.parallel.precision import DynamicLossScale
from training.parallel.world import World
from training.recipe.optimizer import create_state, moment_kinds, set_applied_steps

VALUES_SUMMED_IN_FLOAT32 = 1024
ALIGNMENT = 16  # elements: every parameter begins on a cache line


class FlatGroup:
    """One parameter group in one flat buffer.

    Attributes:
        parameters: by name, in the buffer's order; views of the buffer.
        buffers: weights and gradients.
        master: this rank's part of the weights [n / ranks], the one parameter that the optimizer sees.
        gradient: of the master, [n / ranks]; set by each step.
    """

    def __init__(self, parameters: dict[str, nn.Parameter], world: World, *, is_first: bool, releasable: bool) -> None:
        self.parameters = parameters
        starts = [0]
        for parameter in parameters.values():
            starts.append(starts[-1] + _round_up(parameter.numel(), ALIGNMENT))
        size = _round_up(starts[-1], ALIGNMENT * world.size)
        self.buffers = make_buffers(size, world, is_first=is_first, releasable=releasable)
        part = size // world.size
        self._pieces = []
        for (name, parameter), start in zip(parameters.items(), starts, strict=False):
            weight, gradient = (
                _view(flat, start, parameter.shape) for flat in (self.buffers.weights, self.buffers.gradients)
            )
            if world.is_main:
                weight.copy_(parameter.detach())
            parameter.data, parameter.grad = weight, gradient
            low = max(start, world.rank * part)
            high = min(start + parameter.numel(), (world.rank + 1) * part)
            if low < high:
                self._pieces.append(Piece(name, low - start, low - world.rank * part, high - low))
        self.buffers.start_from_main()
        self.master = nn.Parameter(self.buffers.part)
        self.gradient = torch.zeros(0)

    def shard(self, moments: dict[str, torch.Tensor]) -> FlatShard:
        """Return this rank's part with the optimizer's state of it."""
        convolutions = {name for name, p in self.parameters.items() if p.ndim == CONVOLUTION_DIMENSIONS}
        return FlatShard(
            self.master, moments, tuple(self._pieces), tuple(self.parameters), channels_last=frozenset(convolutions)
        )


class NativeEngine(Engine):
    """A model whose training state is sharded over the ranks by flat buffers; for the arguments see `ENGINES`.

    The optimizer's groups get this rank's flat parts as their parameters.
    """

    def __init__(
        self,
        module: nn.Module,
        network: nn.Module,
        optimizer: torch.optim.Optimizer,
        config: Mapping[str, Any],
        loss_scale: DynamicLossScale | None,
        world: World,
    ) -> None:
        """Take over the parameters; a collective."""
        self.module, self.loss_scale = module, loss_scale
        self._network = network
        self._optimizer, self._world = optimizer, world
        self._accumulation_steps = config["gradient_accumulation_steps"]
        self._clipping = config["gradient_clipping"]
        self._releases = config["zero_optimization"]["stage"] == 3
        # The fused rules skip an update by a flag on the device. fp16's loss scale needs the verdict at once.
        is_fused = all(group.get("fused") for group in optimizer.param_groups)
        self.defers_verdict = world.device.type == "cuda" and is_fused and loss_scale is None
        self._micro_steps = 0
        self._applied_steps: int | torch.Tensor = 0
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        self._groups: list[FlatGroup] = []
        for group in optimizer.param_groups:
            parameters = {names[id(parameter)]: parameter for parameter in group["params"]}
            flat = FlatGroup(parameters, world, is_first=not self._groups, releasable=self._releases)
            group["params"] = [flat.master]
            self._groups.append(flat)
        create_state(optimizer, (group.master for group in self._groups))
        self._has_all_weights = True

    @property
    def parameter_groups(self) -> list[dict[str, Any]]:
        return self._optimizer.param_groups

    def compile(self, mode: str | None) -> None:
        self._network.compile(mode=mode)

    def train(self, mode: bool = True) -> None:
        self.module.train(mode)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        self._gather()
        return self._network(images)

    def backward(self, loss: torch.Tensor) -> None:
        scale = 1 / (self._world.size * self._accumulation_steps)
        if self.loss_scale is not None:
            scale *= self.loss_scale.value
        (loss * scale).backward()

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
            self._optimizer.found_inf = (~is_finite).float()  # type: ignore[attr-defined]
        else:
            applied = bool(is_finite)  # a sync on a GPU
        if applied is not False:
            self._update(norm, scale)
        for group in self._groups:
            group.buffers.gradients.zero_()
        self._applied_steps += applied
        if self.loss_scale is not None:
            self.loss_scale.update(bool(applied))
        return StepResult(applied, norm)

    def _sum_gradients(self) -> torch.Tensor:
        """Set each group's gradient to its sum over the ranks; return the global L2 norm, float64 []; a collective."""
        squares = torch.zeros((), dtype=torch.float64, device=self._world.device)
        for group in self._groups:
            group.gradient = group.master.grad = group.buffers.sum_own_part()
            squares += sum_of_squares(group.gradient)
        # All ranks have read the gradients when this returns: they may be written again.
        return sum_over_ranks(squares, self._world).sqrt()

    @torch.no_grad()
    def _update(self, norm: torch.Tensor, scale: float) -> None:
        factor = 1 / scale
        if self._clipping:
            factor = factor * (self._clipping / (norm + 1e-6)).clamp(max=1.0)
        if self._clipping or scale != 1.0:
            for group in self._groups:
                group.gradient.mul_(factor)
        self._optimizer.step()
        if self._releases:
            for group in self._groups:
                group.buffers.release_weights()
            self._has_all_weights = False
        else:
            self._gather(changed=True)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._gather()
        for name, tensor in [*self.module.named_parameters(), *self.module.named_buffers()]:
            yield name, tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)

    def applied_steps(self) -> int:
        return int(self._applied_steps)

    @torch.no_grad()
    def write_state(
        self, weights: Mapping[str, torch.Tensor], moments: Mapping[str, Mapping[str, torch.Tensor]], applied_steps: int
    ) -> None:
        self._applied_steps = applied_steps
        set_applied_steps(self._optimizer, applied_steps)
        for name, parameter in frozen_parameters(self.module).items():
            parameter.copy_(weights[name])
        for shard in self.flat_shards():
            fill_shard(shard, weights, moments)
        self._gather(changed=True)

    def parameter_shapes(self) -> dict[str, list[int]]:
        return {name: list(parameter.shape) for name, parameter in self.module.named_parameters()}

    def flat_shards(self) -> list[FlatShard]:
        kinds, state = moment_kinds(self._optimizer), self._optimizer.state
        shards = [group.shard({kind: state[group.master][kind] for kind in kinds}) for group in self._groups]
        return shards + frozen_shards(self.module, self._world)

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


def sum_of_squares(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of the squares of float32 [N] as float64 [], to about float32's precision for any N.

    A CPU's single sum in float32 loses digits: the norm of 5 million values was off by 1e-4, that of 138 million by
    1e-2, by another amount on another number of ranks. All in float64 takes 100 times as long.
    """
    count = len(values) // VALUES_SUMMED_IN_FLOAT32
    rows, rest = values.split([count * VALUES_SUMMED_IN_FLOAT32, len(values) - count * VALUES_SUMMED_IN_FLOAT32])
    norms = torch.linalg.vector_norm(rows.view(count, VALUES_SUMMED_IN_FLOAT32), dim=1)
    return norms.double().square().sum() + torch.linalg.vector_norm(rest).double().square()
