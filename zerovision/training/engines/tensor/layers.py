"""Tensor parallelism: layers that several ranks compute together, with plain tensors as parameters.

PyTorch's `parallelize_module` creates DTensors, which flat buffers cannot contain. Here, a rank's layers are smaller
layers of the same classes, so that every strategy shards them over the data dimension like any other model. Ranks
communicate as in Megatron (Shoeybi et al. 2019, https://arxiv.org/abs/1909.08053, figure 3): they sum the outputs of a
region in forward, and the gradients of the region's input in backward.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from timm.layers import AttentionRope
from timm.models.eva import EvaAttention
from torch import nn

from zerovision.models.tensor_plan import Region, TensorPlan
from zerovision.training.base.timing import communication
from zerovision.training.engines.parameter_shards import WEIGHTS, ModelPart, ParameterShard
from zerovision.training.world.collectives import copy_from_main, gather_rows
from zerovision.training.world.world import World


@dataclass(frozen=True)
class Cut:
    """A rank's part of a parameter, as pieces along one dimension."""

    shape: tuple[int, ...]  # of the whole parameter
    dimension: int
    pieces: tuple[tuple[int, int], ...]  # first index and length of each piece along the dimension

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """Return a copy of this part of a whole parameter."""
        return torch.cat([whole.narrow(self.dimension, *piece) for piece in self.pieces], self.dimension)

    def boxes(self, shard: ParameterShard) -> Iterator[ParameterShard]:
        """Yield a shard of the part as shards of the whole parameter, one for each piece that it overlaps."""
        low = shard.offsets[self.dimension]
        high, start = low + shard.tensors[WEIGHTS].shape[self.dimension], 0
        for first, length in self.pieces:
            begin, end = max(low, start), min(high, start + length)
            if begin < end:
                offsets = list(shard.offsets)
                offsets[self.dimension] = first + begin - start
                span = (self.dimension, begin - low, end - begin)
                box = {kind: tensor.narrow(*span) for kind, tensor in shard.tensors.items()}
                yield ParameterShard(shard.name, tuple(offsets), box)
            start += length


@dataclass(frozen=True, kw_only=True)
class TensorPart(ModelPart):
    """This rank's part of the parameters that its tensor group divides; other parameters are whole on every rank."""

    group: World
    cuts: Mapping[str, Cut]  # by the name of a divided parameter

    def is_divided(self, name: str) -> bool:
        return name in self.cuts

    def counts(self, name: str) -> bool:
        return self.group.is_main or name in self.cuts

    def share_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        """See `ModelPart`; otherwise, gradients that differ by rounding would make the ranks' weights drift apart."""
        copy_from_main([parameter.grad for parameter in parameters if parameter.grad is not None], self.group)

    def sum(self, squares: torch.Tensor) -> torch.Tensor:
        return gather_rows(squares.view(1), self.group).sum()

    def shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        return {name: self.cuts[name].shape if name in self.cuts else shape for name, shape in shapes.items()}

    def of_whole(self, shards: Iterable[ParameterShard]) -> list[ParameterShard]:
        return [
            box
            for shard in shards
            for box in (self.cuts[shard.name].boxes(shard) if shard.name in self.cuts else (shard,))
        ]


class _CopyToRanks(torch.autograd.Function):
    """The identity function; its gradient is summed over the ranks, because each rank uses the whole input."""

    @staticmethod
    def forward(context: Any, values: torch.Tensor, world: World) -> torch.Tensor:
        context.world = world
        return values.view_as(values)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _sum(gradient, context.world), None


class _SumOverRanks(torch.autograd.Function):
    """The sum of the ranks' values; each rank has the whole gradient of the sum."""

    @staticmethod
    def forward(_context: Any, values: torch.Tensor, world: World) -> torch.Tensor:
        return _sum(values, world)

    @staticmethod
    def backward(_context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient, None


class _GatherFeatures(torch.autograd.Function):
    """Gathers the ranks' features [..., n / ranks] as [..., n]; each rank has the whole gradient of the result."""

    @staticmethod
    def forward(context: Any, values: torch.Tensor, world: World) -> torch.Tensor:
        context.world = world
        rows = values.new_empty(world.size, *values.shape)
        if world.group is not None and not values.is_meta:
            with communication():
                dist.all_gather_into_tensor(rows.view(-1), values.contiguous().view(-1), group=world.group)
        return rows.movedim(0, -2).flatten(-2)

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradient.chunk(context.world.size, -1)[context.world.rank].contiguous(), None


def _sum(values: torch.Tensor, world: World) -> torch.Tensor:
    total = values.clone(memory_format=torch.contiguous_format)
    if world.group is not None and not values.is_meta:  # a single rank may count operations
        with communication():
            dist.all_reduce(total, group=world.group)
    return total


class _DividedInputs(nn.Module):
    """The base class of linear layers and 1x1 convolutions whose inputs are divided over the ranks."""

    tensor_group: World
    weight: torch.Tensor
    bias: torch.Tensor | None

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        is_convolution = self.weight.ndim > 2
        features_last = values.movedim(1, -1) if is_convolution else values
        outputs = _SumOverRanks.apply(F.linear(features_last, self.weight.flatten(1)), self.tensor_group)
        outputs = outputs if self.bias is None else outputs + self.bias
        return outputs.movedim(-1, 1) if is_convolution else outputs


class _DividedOutputs(nn.Module):
    """The base class of linear layers whose outputs are divided over the ranks, and then gathered."""

    tensor_group: World

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        outputs = super().forward(_CopyToRanks.apply(values, self.tensor_group))
        return _GatherFeatures.apply(outputs, self.tensor_group)


class _DividedDropout(nn.Module):
    """The base class of dropout on divided features, which draws the same mask as a single rank with all features."""

    tensor_group: World
    place: tuple[int, int, int]  # number of features, this rank's first feature, and dimension
    p: float

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        if not self.training or not self.p:
            return values
        features, first, dimension = self.place
        shape = list(values.shape)
        shape[dimension], own = features, shape[dimension]
        is_channels_last = values.ndim > 3 and values.is_contiguous(memory_format=torch.channels_last)
        layout = torch.channels_last if is_channels_last else torch.contiguous_format
        # Dropout draws in the order of memory.
        drawn = F.dropout(values.new_ones(shape).contiguous(memory_format=layout), self.p)
        return values * drawn.narrow(dimension, first, own)


def split_model(module: nn.Module, plan: TensorPlan, group: World) -> TensorPart:
    """Reduce the layers that a plan divides to this rank's part; not a collective.

    The network must be whole, and equal on all ranks, and no optimizer may use it yet. Without a process group, the
    ranks exchange nothing, which is used to count the operations of one rank.
    """
    cuts = dict[str, Cut]()
    for name, (region, units) in plan.regions.items():
        _split_region(module, name, region, units, group, cuts)
    if plan.head:
        head = module.get_submodule(plan.head)
        for own, parameter in head.named_parameters():
            name = f"{plan.head}.{own}"
            cuts[name] = _take_part(module, name, 0, 1, len(parameter), group)
        _become(head, _DividedOutputs, group)
    return TensorPart(group=group, cuts=cuts)


def _split_region(module: nn.Module, name: str, region: Region, units: int, group: World, cuts: dict[str, Cut]) -> None:
    """Divide the layer `name`, and add the cuts of the layer's parameters to `cuts`."""
    layer = module.get_submodule(name)
    for own, _ in layer.named_parameters():
        blocks = region.first.get(own.partition(".")[0], 0)
        if blocks or own == f"{region.last}.weight":
            place = f"{name}.{own}"
            cuts[place] = _take_part(module, place, 0 if blocks else 1, blocks or 1, units, group)
    for count in filter(None, (region.heads, *region.counts)):
        if hasattr(layer, count):
            setattr(layer, count, getattr(layer, count) // units * _share(units, group)[1])
    layer.register_forward_pre_hook(lambda _, inputs: (_CopyToRanks.apply(inputs[0], group), *inputs[1:]))
    last = layer.get_submodule(region.last)
    _become(last, _DividedInputs, group)
    if region.dropout:
        dropout: Any = layer.get_submodule(region.dropout)
        _become(dropout, _DividedDropout, group)
        dropout.place = (units, _share(units, group)[0], 1 if isinstance(last, nn.Conv2d) else -1)
    if isinstance(layer, EvaAttention):
        # `AttentionRope` differs from EVA's attention only in using the width of its heads, here this rank's, instead
        # of the width of its input, and in having no separate parameters for biases.
        attention: Any = layer
        attention.num_kv_heads, attention.num_kv_groups = attention.num_heads, 1
        attention.attn_dim = attention.num_heads * attention.head_dim
        attention.__class__ = AttentionRope
        if attention.q_bias is not None:
            # Not a closure: deepcopy must bind the hook to the copied layer.
            attention.qkv.register_forward_hook(functools.partial(_add_biases, attention))


def _add_biases(layer: EvaAttention, _qkv: nn.Module, _inputs: tuple[Any, ...], outputs: torch.Tensor) -> torch.Tensor:
    """Add the biases of the queries and values; that of the keys is 0."""
    return outputs + torch.cat((layer.q_bias, torch.zeros_like(layer.q_bias), layer.v_bias))


def _share(units: int, group: World) -> tuple[int, int]:
    """Return the first index and the number of this rank's heads or features; ranks' numbers differ by at most one."""
    low, high = (units * rank // group.size for rank in (group.rank, group.rank + 1))
    return low, high - low


def _take_part(module: nn.Module, name: str, dimension: int, blocks: int, units: int, group: World) -> Cut:
    """Reduce a parameter to this rank's share of the `units` (heads or features) of each block; return the cut."""
    parameter, (first, count) = module.get_parameter(name), _share(units, group)
    length = parameter.shape[dimension] // blocks
    width = length // units
    pieces = tuple((block * length + first * width, count * width) for block in range(blocks))
    cut = Cut(tuple(parameter.shape), dimension, pieces)
    parameter.data = cut.take(parameter.data)
    layer = module.get_submodule(name.rpartition(".")[0])
    for size, of_dimension in (("out_features", 0), ("out_channels", 0), ("in_features", 1), ("in_channels", 1)):
        if name.endswith(".weight") and hasattr(layer, size):
            setattr(layer, size, parameter.shape[of_dimension])
    return cut


def _become(layer: nn.Module, base: type[nn.Module], group: World) -> None:
    """Change a layer's class so that the layer uses the forward of `base`, while its parameters keep their names."""
    layer.__class__ = _subclass(base, type(layer))  # type: ignore[arg-type]
    layer.tensor_group = group  # type: ignore[assignment]  # not a module


@functools.cache
def _subclass(base: Any, original: Any) -> type:
    return type(f"{base.__name__.lstrip('_')}{original.__name__}", (base, original), {})
