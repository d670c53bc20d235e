"""Describes a rank's part of the training state by the name of each parameter, and offsets and sizes in its dimensions.

PyTorch's DTensor and distributed checkpoints describe shards in the same way. This description covers every kind of
sharding: whole parameters, rows, and pieces of flat buffers.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from zerovision.training.base.timing import communication
from zerovision.training.world.collectives import gather_rows
from zerovision.training.world.world import World

if TYPE_CHECKING:
    from zerovision.training.engines.engine import Engine

WEIGHTS = "weights"
# In a checkpoint, the prefix of parameter names that belong to an additional group of ranks with its own weights.
FURTHER = re.compile(r"[a-z]+ ([0-9]{1,6})/")
CHANNELS_LAST = (0, 2, 3, 1)  # the order of a convolution's dimensions in memory
CONVOLUTION_DIMENSIONS = len(CHANNELS_LAST)
# The position of each dimension of the usual order in `CHANNELS_LAST`.
USUAL_FROM_CHANNELS_LAST = tuple(CHANNELS_LAST.index(dimension) for dimension in range(CONVOLUTION_DIMENSIONS))

# Returns a box of a whole parameter, given the parameter's name: part of a tensor in memory, or data read from files.
TakeBox = Callable[[str, tuple[slice, ...]], torch.Tensor]


@dataclass(frozen=True)
class ParameterShard:
    """One rank's part of one parameter: live fp32 tensors with the part's sizes and any strides, not copies.

    The kinds of tensors are 'weights', and the names of the optimizer's moments and of averages of the weights. A
    frozen parameter has only 'weights'.
    """

    name: str
    offsets: tuple[int, ...]  # the first index of the part in each dimension of the parameter
    tensors: dict[str, torch.Tensor]  # by kind

    @property
    def box(self) -> tuple[slice, ...]:
        """The index of the part in the whole parameter."""
        return index_of(self.offsets, self.tensors[WEIGHTS].shape)


@dataclass(frozen=True)
class ModelPart:
    """This rank's part of a model: the whole model, unless a subclass divides the model."""

    # Names of this rank's parameters, grouped by the backward pass that computes their gradients; None for one group.
    stages: Sequence[Collection[str]] | None = None
    holders: World | None = None  # the ranks that together have all parameters; None if each rank has them all

    def is_divided(self, name: str) -> bool:
        """Return whether this rank has only a part of a parameter."""
        return False

    def counts(self, name: str) -> bool:
        """Return whether this rank's values of a parameter count; if ranks have equal values, only the first counts.

        Buffers, which are never divided, have the name ''.
        """
        return True

    def share_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        """Make the gradients of undivided parameters equal on all ranks that have them; a collective."""

    def sum(self, squares: torch.Tensor) -> torch.Tensor:
        """Return the sum of a scalar [] over the ranks that divide parameters, equal on all of them; a collective."""
        return squares

    def shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Convert the shapes of this rank's parameters to the shapes of whole parameters."""
        return {**shapes}

    def of_whole(self, shards: Iterable[ParameterShard]) -> list[ParameterShard]:
        """Convert shards of this rank's parameters to shards of whole parameters."""
        return [*shards]


WHOLE = ModelPart()


@dataclass(frozen=True)
class EngineState:
    """One rank's part of an engine's training state.

    Attributes:
        shapes: the whole shape of every parameter, in the same order on all ranks.
        moment_kinds: names of the optimizer's moments, and of averages of the weights.
        shards: this rank's shards. Every element of every parameter is in exactly one shard of one rank.
        buffers: name -> [n, ...], the module's buffers in all n versions that this rank has.
        leaves: the step's leaves that the versions belong to.
        applied_steps: number of updates that have been applied, for Adam's bias correction.
        saves_buffers: whether this rank's buffers are saved in checkpoints; if several ranks have equal buffers, only
            the first rank saves them.
    """

    shapes: dict[str, tuple[int, ...]]
    moment_kinds: tuple[str, ...]
    shards: list[ParameterShard]
    buffers: dict[str, torch.Tensor]
    leaves: tuple[int, ...]
    applied_steps: int
    saves_buffers: bool = True


def index_of(offsets: Sequence[int], sizes: Sequence[int]) -> tuple[slice, ...]:
    """Return the index of a box in the whole tensor."""
    return tuple(slice(offset, offset + size) for offset, size in zip(offsets, sizes, strict=True))


def flat_shards(
    name: str, shape: Sequence[int], low: int, high: int, flats: Mapping[str, torch.Tensor], start: int
) -> Iterator[ParameterShard]:
    """Yield elements `low` to `high` - 1 of a flattened parameter as shards.

    `shape` is the shape of the whole parameter. Element `low` has index `start` in the flat tensors [n] of all kinds.
    """
    for offsets, sizes in boxes(shape, low, high):
        length = math.prod(sizes)
        tensors = {kind: flat.detach().narrow(0, start, length).view(sizes) for kind, flat in flats.items()}
        yield ParameterShard(name, offsets, tensors)
        start += length


def from_channels_last(shard: ParameterShard) -> ParameterShard:
    """Convert a shard of convolution weights from `CHANNELS_LAST` to the usual order of dimensions."""
    tensors = {kind: tensor.permute(USUAL_FROM_CHANNELS_LAST) for kind, tensor in shard.tensors.items()}
    offsets = tuple(shard.offsets[dimension] for dimension in USUAL_FROM_CHANNELS_LAST)
    return ParameterShard(shard.name, offsets, tensors)


def boxes(shape: Sequence[int], low: int, high: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Yield offsets and sizes of the boxes that make up elements `low` to `high` - 1 of a contiguous tensor, in order.

    There are at most 2 D - 1 boxes in D dimensions: whole rows in the middle, and, recursively, a partial row at each
    end.
    """
    if not shape and low < high:
        yield (), ()
        return
    row = math.prod(shape[1:])
    while low < high:
        index, start = divmod(low, row)
        rows = 0 if start else (high - low) // row  # whole ones from here
        if rows:
            yield (index, *[0] * (len(shape) - 1)), (rows, *shape[1:])
        else:
            for offsets, sizes in boxes(shape[1:], start, min(start + high - low, row)):
                yield (index, *offsets), (1, *sizes)
        low = (index + max(rows, 1)) * row  # where the next row begins; after the last box, `high` or beyond


def of_first_group(shapes: Mapping[str, Sequence[int]]) -> dict[str, list[int]]:
    """Return the shapes of the first group's parameters, without additional groups of ranks; see `FURTHER`."""
    return {name: list(shape) for name, shape in shapes.items() if not FURTHER.match(name)}


def parameter_shapes(module: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the whole shape of every parameter; empty ZeRO 3 parameters keep theirs in `ds_shape`."""
    return {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in module.named_parameters()}


def frozen_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return, by name, the parameters that the optimizer does not update; checkpoints contain them."""
    return {name: parameter for name, parameter in module.named_parameters() if not parameter.requires_grad}


def frozen_shards(module: nn.Module, world: World) -> list[ParameterShard]:
    """Return the frozen parameters as shards of rank 0; they are whole and equal on all ranks."""
    if not world.is_main:
        return []
    return [
        ParameterShard(name, (0,) * parameter.ndim, {WEIGHTS: parameter.detach()})
        for name, parameter in frozen_parameters(module).items()
        if not parameter.is_meta  # on another rank
    ]


def fill_shards(shards: Sequence[ParameterShard], tensors: Mapping[str, TakeBox]) -> None:
    """Fill shards from whole tensors, one kind after another; see `Engine.load_state` for the arguments."""
    for kind, take in tensors.items():
        for shard in shards:
            if kind in shard.tensors:
                shard.tensors[kind].copy_(take(shard.name, shard.box))


def gather_weights(engine: Engine, world: World) -> dict[str, torch.Tensor]:
    """Return the fp32 weights and buffers of the state dict, in CPU memory, on rank 0; {} on other ranks; a collective.

    Parameters that are whole on every rank are not sent.
    """
    state, module, weights = engine.state(), engine.module, {}
    parameters = dict(module.named_parameters())
    for name, shape in state.shapes.items():
        if name not in parameters:  # belongs to another group of ranks
            continue
        whole = parameters[name].detach()
        is_sharded = isinstance(whole, DTensor) or hasattr(parameters[name], "ds_shape") or whole.shape != shape
        if world.replica.size > 1 or is_sharded:
            whole = torch.zeros(shape, device=world.device)
            for shard in state.shards:
                if shard.name == name:
                    whole[shard.box] = shard.tensors[WEIGHTS]
            if world.size > 1:
                with communication():  # each element has its bits on one rank, and is 0 on all others
                    dist.reduce(whole.view(torch.int32), 0)
        if world.is_main:
            weights[name] = torch.empty(shape).copy_(whole)
    weights |= _gather_buffers(module, world)
    if not world.is_main:
        return {}
    # The state dict omits buffers that are not persistent, and has several keys for a module with several names.
    names = {id(tensor): name for name, tensor in (*module.named_parameters(), *module.named_buffers())}
    first_names = {key: names[id(tensor)] for key, tensor in module.state_dict(keep_vars=True).items()}
    return {key: weights[name] if key == name else weights[name].clone() for key, name in first_names.items()}


def _gather_buffers(module: nn.Module, world: World) -> dict[str, torch.Tensor]:
    """Return each buffer from the first rank that has it, in CPU memory on rank 0; a collective."""
    buffers = dict(module.named_buffers())
    if world.replica.size == 1 or not buffers:
        return {name: buffer.detach().to("cpu", copy=True) for name, buffer in buffers.items()}
    has = torch.tensor([not buffer.is_meta for buffer in buffers.values()], dtype=torch.int32, device=world.device)
    firsts = gather_rows(has, world).argmax(0).tolist()
    gathered = {}
    for (name, buffer), first in zip(buffers.items(), firsts, strict=True):
        own = buffer.detach().clone() if world.rank == first else torch.zeros_like(buffer, device=world.device)
        with communication():  # as in `gather_weights`
            dist.reduce(own.view(-1).view(torch.uint8), 0)
        gathered[name] = own.cpu()
    return gathered
