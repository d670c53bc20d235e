"""ZeRO over flat buffers, in plain PyTorch: what DeepSpeed does, for models whose gradients fit one bucket.

Each parameter group is one flat fp32 buffer that the parameters are views of (Rajbhandari et al. 2020,
https://arxiv.org/abs/1910.02054). Every rank owns an equal part: it receives the sum of that part's gradients, keeps
the optimizer's state of it and updates it; then the parts are gathered again. There is one message for each of the
two ways and no Python per parameter, which is where DeepSpeed spends its time on models of this size.

Images are channels_last, and so are the weights of convolutions and their gradients: kernels would otherwise bring
them into that order in every step. Checkpoints have them as they lie and say so; all else sees the usual shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from training.parallel.collectives import sum_over_ranks
from training.parallel.engine import (
    CONVOLUTION_DIMENSIONS,
    FlatShard,
    Piece,
    StepResult,
    fill_shard,
    frozen_parameters,
    frozen_shards,
)
from training.parallel.flat_buffers import FlatBuffers, make_buffers
from training.parallel.precision import DynamicLossScale
from training.parallel.world import World
from training.recipe.lamb import FlatLayout, Fragment
from training.recipe.optimizer import create_state, moment_kinds, set_applied_steps

VALUES_SUMMED_IN_FLOAT32 = 1024
ALIGNMENT = 16  # elements: every parameter begins on a cache line


class FlatGroup:
    """One parameter group in one flat buffer.

    Attributes:
        parameters: views of the buffer, in its order.
        buffers: weights and gradients.
        master: this rank's part of the weights [n / ranks], the one parameter that the optimizer sees.
        gradient: of the master, [n / ranks]; set by each step.
    """

    def __init__(self, parameters: list[nn.Parameter], world: World, *, is_first: bool, releasable: bool) -> None:
        self.parameters, self._rank = parameters, world.rank
        starts = [0]
        for parameter in parameters:
            starts.append(starts[-1] + _round_up(parameter.numel(), ALIGNMENT))
        self._starts = starts[:-1]
        size = _round_up(starts[-1], ALIGNMENT * world.size)
        self.buffers: FlatBuffers = make_buffers(size, world, is_first=is_first, releasable=releasable)
        for parameter, start in zip(parameters, self._starts, strict=True):
            weight, gradient = (
                _view(flat, start, parameter.shape) for flat in (self.buffers.weights, self.buffers.gradients)
            )
            if world.is_main:
                weight.copy_(parameter.detach())
            parameter.data, parameter.grad = weight, gradient
        self.buffers.start_from_main()
        self.master = nn.Parameter(self.buffers.part)
        self.gradient = torch.zeros(0)

    def fragments(self) -> tuple[Fragment, ...]:
        """Return what of which parameter lies in this rank's part."""
        first = self._rank * self.master.numel()
        found = []
        for number, (parameter, start) in enumerate(zip(self.parameters, self._starts, strict=True)):
            low, high = max(start, first), min(start + parameter.numel(), first + self.master.numel())
            if low < high:
                found.append(Fragment(number, low - first, high - low, low - start))
        return tuple(found)


class NativeEngine:
    """A model whose training state is sharded over the ranks by flat buffers; see `training.parallel.engine.Engine`."""

    def __init__(
        self,
        module: nn.Module,
        network: nn.Module,
        optimizer: torch.optim.Optimizer,
        config: Mapping[str, Any],
        loss_scale: DynamicLossScale | None,
        world: World,
    ) -> None:
        """Take over the parameters; a collective.

        Args:
            module: the model in fp32.
            network: the same, or what runs it under autocast.
            optimizer: the rule; its groups' parameters become this rank's flat parts.
            config: what `training.parallel.strategies.engine_config` returned.
            loss_scale: of fp16, else None.
            world: the ranks.
        """
        self.module, self.loss_scale = module, loss_scale
        self._network = network
        self._optimizer, self._world = optimizer, world
        self._accumulation_steps = config["gradient_accumulation_steps"]
        self._clipping = config["gradient_clipping"]
        self._releases = config["zero_optimization"]["stage"] == 3
        # The fused rules skip an update by a flag on the device. fp16's loss scale has to know at once.
        is_fused = all(group.get("fused") for group in optimizer.param_groups)
        self.defers_verdict = world.device.type == "cuda" and is_fused and loss_scale is None
        self._micro_steps = 0
        self._applied_steps: int | torch.Tensor = 0
        self._groups: list[FlatGroup] = []
        for group in optimizer.param_groups:
            flat = FlatGroup(group["params"], world, is_first=not self._groups, releasable=self._releases)
            group["params"] = [flat.master]
            self._groups.append(flat)
        create_state(optimizer, (group.master for group in self._groups))
        self._has_all_weights = True
        self._names = {id(parameter): name for name, parameter in module.named_parameters()}

    @property
    def parameter_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups, whose 'lr' the schedule sets before each step."""
        return self._optimizer.param_groups

    def compile(self, mode: str | None) -> None:
        """Let `torch.compile` translate the model at its first forward; mode as of `torch.compile`."""
        self._network.compile(mode=mode)

    def train(self, mode: bool = True) -> None:
        """Set training or evaluation mode of the model."""
        self.module.train(mode)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits [B, classes] in float32 for images [B, 3, H, W]; a collective at ZeRO 3."""
        self._gather()
        return self._network(images)

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of a scalar loss to this rank's buffers."""
        scale = 1 / (self._world.size * self._accumulation_steps)
        if self.loss_scale is not None:
            scale *= self.loss_scale.value
        (loss * scale).backward()

    def step(self) -> StepResult | None:
        """Count a micro-step, and update the weights after the last one of an accumulation; a collective."""
        self._micro_steps += 1
        if self._micro_steps % self._accumulation_steps:
            return None
        scale = self.loss_scale.value if self.loss_scale is not None else 1.0
        norm = self._sum_gradients() / scale
        is_finite = norm.isfinite()
        applied: bool | torch.Tensor = is_finite
        if self.defers_verdict:
            # The rule itself looks at it, on the device: nothing here waits.
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
        """Give each rank the sum of its part's gradients; return their global L2 norm, float64 []; a collective."""
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
            self._gather(anew=True)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every parameter in full and in fp32, and every buffer, as CPU tensors; a collective."""
        self._gather()
        for name, tensor in [*self.module.named_parameters(), *self.module.named_buffers()]:
            yield name, tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)

    def applied_steps(self) -> int:
        """Return how many updates the optimizer has applied, which Adam's bias correction needs; may wait for a GPU."""
        return int(self._applied_steps)

    @torch.no_grad()
    def write_state(
        self, weights: Mapping[str, torch.Tensor], moments: Mapping[str, Mapping[str, torch.Tensor]], applied_steps: int
    ) -> None:
        """Fill a fresh engine with the state of another, under whatever strategy it was; a collective."""
        self._applied_steps = applied_steps
        set_applied_steps(self._optimizer, applied_steps)
        for name, parameter in frozen_parameters(self.module).items():
            parameter.copy_(weights[name])
        for shard in self.flat_shards():
            fill_shard(shard, weights, moments)
        self._gather(anew=True)

    def parameter_shapes(self) -> dict[str, list[int]]:
        """Return the full shape of every parameter."""
        return {name: list(parameter.shape) for name, parameter in self.module.named_parameters()}

    def flat_shards(self) -> list[FlatShard]:
        """Return this rank's part of weights and moments as it lies in memory, the frozen ones last; no collective."""
        kinds = moment_kinds(self._optimizer)
        return [
            FlatShard(
                weights=group.master,
                moments={kind: self._optimizer.state[group.master][kind] for kind in kinds},
                pieces=tuple(
                    Piece(self._names[id(group.parameters[f.parameter])], f.offset, f.start, f.length)
                    for f in group.fragments()
                ),
                channels_last=frozenset(
                    self._names[id(p)] for p in group.parameters if p.ndim == CONVOLUTION_DIMENSIONS
                ),
            )
            for group in self._groups
        ] + frozen_shards(self.module, self._world)

    def shard_layouts(self) -> dict[int, FlatLayout]:
        """Say, for each of this rank's flat fp32 pieces (by `id`), which part of which parameter lies where."""
        return {id(group.master): FlatLayout(len(group.parameters), group.fragments()) for group in self._groups}

    def close(self) -> None:
        """Nothing outlives the tensors."""

    def _gather(self, *, anew: bool = False) -> None:
        """Have all weights on this rank; a collective where they were released, or changed."""
        if anew or not self._has_all_weights:
            for group in self._groups:
                group.buffers.gather_weights()
            self._has_all_weights = True


def _view(flat: torch.Tensor, start: int, shape: torch.Size) -> torch.Tensor:
    """Return a parameter's place in a flat tensor in its shape; of a convolution's weights in channels_last."""
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
    1e-2, and otherwise on another number of ranks, which share the values out. All in float64 takes 100 times as long.
    """
    count = len(values) // VALUES_SUMMED_IN_FLOAT32
    rows, rest = values.split([count * VALUES_SUMMED_IN_FLOAT32, len(values) - count * VALUES_SUMMED_IN_FLOAT32])
    norms = torch.linalg.vector_norm(rows.view(count, VALUES_SUMMED_IN_FLOAT32), dim=1)
    return norms.double().square().sum() + torch.linalg.vector_norm(rest).double().square()
