"""Buckets: flat buffers of parameters, whose gradients backward completes one bucket after another.

The assignment of parameters to buckets does not depend on the ranks. Each rank updates an equal part of a bucket: an
arbitrary piece, or, for optimizer rules that need whole parameters, the parameters that are assigned to the rank. If a
model is cut into stages, each stage has its own part of each bucket.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from zerovision.training.engines.flat_buffers import make_buffers
from zerovision.training.engines.parameter_shards import (
    CHANNELS_LAST,
    CONVOLUTION_DIMENSIONS,
    WEIGHTS,
    ModelPart,
    ParameterShard,
    flat_shards,
    from_channels_last,
)
from zerovision.training.engines.summation_tree import BLOCK, StepTree
from zerovision.training.recipe.optimizer import moments_of
from zerovision.training.world.world import World

# A bucket with this many elements is full: 1 MB, which fits into a core's cache, or 16 MB on a GPU, so that NCCL
# reaches its full rate and few kernels are launched.
FEWEST_ELEMENTS, FEWEST_ELEMENTS_ON_GPU = 1 << 18, 1 << 22


@dataclass(frozen=True)
class BucketLayout:
    """The positions of parameters in a flat buffer, which is cut into one equal part per rank."""

    starts: dict[str, int]  # parameter name -> index of its first element, where a block begins
    part: int  # number of elements in a rank's part, a whole number of blocks
    owners: dict[str, int]  # parameter name -> rank whose part has all of it; empty if parts may begin inside one


def count_blocks(parameter: torch.Tensor) -> int:
    """Return the number of blocks that a parameter occupies."""
    return -(-parameter.numel() // BLOCK)


def deal(costs: Mapping[Any, float], ranks: int) -> list[list[Any]]:
    """Assign keys to ranks, the most expensive first, each to the rank with the lowest total cost at that point.

    The highest total cost is at most 4/3 of the optimum (Graham 1969).
    """
    dealt: list[list[Any]] = [[] for _ in range(ranks)]
    loads = [0.0] * ranks
    for key in sorted(costs, key=lambda key: (-costs[key], key)):
        rank = loads.index(min(loads))
        dealt[rank].append(key)
        loads[rank] += costs[key]
    return dealt


class Bucket:
    """The parameters of one optimizer group in one flat buffer [n].

    `sum_of_part` is zeros [n / ranks], the memory for the sum of this rank's part of the gradients.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        layout: BucketLayout,
        world: World,
        tree: StepTree,
        sum_of_part: torch.Tensor,
    ) -> None:
        self.parameters, self.layout = parameters, layout
        self._low = world.rank * layout.part
        self.buffers = make_buffers(layout.part * world.size, world, tree, sum_of_part)
        self._places = []  # views of the gradients
        for name, parameter in parameters.items():
            weight = _view(self.buffers.weights, layout.starts[name], parameter.shape)
            if world.is_main:
                weight.copy_(parameter.detach())
            parameter.data = weight
            self._places.append(_view(self.buffers.gradients, layout.starts[name], parameter.shape))
        self.buffers.start_from_main()
        owned = {name: parameters[name] for name, owner in layout.owners.items() if owner == world.rank}
        self._owned = {name: nn.Parameter(parameter.data) for name, parameter in owned.items()}
        # The optimizer updates these: whole parameters, or this rank's part [n / ranks].
        self.trained = [*self._owned.values()] if layout.owners else [nn.Parameter(self.buffers.part)]

    def add_leaf(self) -> None:
        """Move the parameters' gradients into the sum over this rank's leaves."""
        parameters = self.parameters.values()
        self.buffers.sums.add(self._places, [parameter.grad for parameter in parameters])
        for parameter in parameters:
            parameter.grad = None  # otherwise, autograd would run one kernel per parameter to add to it

    def sum_gradients(self) -> None:
        """Set the gradients of the optimizer's parameters to the sum over all leaves; a collective."""
        total = self.buffers.sum_own_part()
        self.buffers.sums.clear()
        for name, parameter in self._owned.items():
            parameter.grad = _view(total, self.layout.starts[name] - self._low, parameter.shape)
        if not self.layout.owners:
            self.trained[0].grad = total

    def shards(self, optimizer: torch.optim.Optimizer) -> Iterator[ParameterShard]:
        """Yield shards for the parameters in this rank's part, with their optimizer state."""
        for name, parameter in self._owned.items():
            tensors = {WEIGHTS: parameter.detach(), **moments_of(optimizer, parameter)}
            yield ParameterShard(name, (0,) * parameter.ndim, tensors)
        if self.layout.owners:
            return
        flats = {WEIGHTS: self.trained[0], **moments_of(optimizer, self.trained[0])}
        for name, parameter in self.parameters.items():
            start = self.layout.starts[name]
            low, high = max(start, self._low), min(start + parameter.numel(), self._low + self.layout.part)
            shape, is_convolution = parameter.shape, parameter.ndim == CONVOLUTION_DIMENSIONS
            order = [shape[dimension] for dimension in CHANNELS_LAST] if is_convolution else shape
            for shard in flat_shards(name, order, low - start, high - start, flats, low - self._low):
                yield from_channels_last(shard) if is_convolution else shard


class BackwardOrder:
    """Completes each bucket during backward, once all its gradients are computed, in the same order on all ranks.

    If the module defines its parameters roughly in the order of forward, gradients are summed over the ranks while
    backward computes the gradients of earlier layers.
    """

    def __init__(self, module: nn.Module, buckets: list[Bucket]) -> None:
        number_of = {name: number for number, (name, _) in enumerate(module.named_parameters())}
        self._buckets = sorted(
            buckets, key=lambda bucket: min(number_of[name] for name in bucket.parameters), reverse=True
        )
        self._missing: list[int] = []  # number of missing gradients in each bucket
        self._completed, self._sums_over_ranks = 0, False
        for position, bucket in enumerate(self._buckets):
            for parameter in bucket.parameters.values():
                parameter.register_post_accumulate_grad_hook(lambda _, position=position: self._count(position))

    def begin(self, *, sums_over_ranks: bool) -> None:
        """Prepare for the backward pass of a leaf; set `sums_over_ranks` for the rank's last leaf of the step."""
        self._missing = [len(bucket.parameters) for bucket in self._buckets]
        self._completed, self._sums_over_ranks = 0, sums_over_ranks

    def end(self) -> None:
        """After backward, complete the remaining buckets, which have parameters without a gradient."""
        while self._completed < len(self._buckets):
            self._complete_next()

    def _count(self, position: int) -> None:
        self._missing[position] -= 1
        while self._completed < len(self._buckets) and not self._missing[self._completed]:
            self._complete_next()

    def _complete_next(self) -> None:
        bucket = self._buckets[self._completed]
        self._completed += 1
        bucket.add_leaf()
        if self._sums_over_ranks:
            bucket.buffers.start_sum()


@dataclass(frozen=True)
class Shared:
    """Parameters of one optimizer group that share one bucket, or one bucket per stage."""

    group: dict[str, Any]  # of the optimizer
    parameters: dict[str, nn.Parameter]  # of all stages, by name

    def layout(self, stage: Collection[str], ranks: int) -> BucketLayout:
        """Return the layout of a stage's parameters, given their names and the number of ranks that share the stage.

        Parameters follow one another, regardless of where the ranks' parts begin, unless the optimizer's rule needs
        whole parameters.
        """
        parameters = {name: parameter for name, parameter in self.parameters.items() if name in stage}
        if not self.group.get("whole_parameters"):
            *firsts, blocks = accumulate(map(count_blocks, parameters.values()), initial=0)
            starts = {name: BLOCK * first for name, first in zip(parameters, firsts, strict=True)}
            return BucketLayout(starts, BLOCK * -(-blocks // ranks), {})
        cost = _products if "use_muon" in self.group else torch.Tensor.numel
        costs = {name: cost(parameter) for name, parameter in parameters.items()}
        owners: dict[str, int] = {name: rank for rank, names in enumerate(deal(costs, ranks)) for name in names}
        ends, offsets = [0] * ranks, dict[str, int]()
        for name, parameter in parameters.items():
            offsets[name] = ends[owners[name]]
            ends[owners[name]] += BLOCK * count_blocks(parameter)
        starts = {name: owners[name] * max(ends) + offset for name, offset in offsets.items()}
        return BucketLayout(starts, max(ends), owners)


def share_out(
    module: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, part: ModelPart
) -> list[Shared]:
    """Group the optimizer's parameters by the bucket that they share, independently of ranks and stages."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    fewest = FEWEST_ELEMENTS_ON_GPU if device.type == "cuda" else FEWEST_ELEMENTS
    shared = []
    for group in optimizer.param_groups:
        parameters = {names[id(parameter)]: parameter for parameter in group["params"]}
        if group.get("whole_parameters"):  # all in one bucket, to balance the ranks
            cuts = [parameters]
        else:
            divided = {name: parameter for name, parameter in parameters.items() if part.is_divided(name)}
            others = {name: parameter for name, parameter in parameters.items() if not part.is_divided(name)}
            cuts = [*_cut(divided, fewest), *_cut(others, fewest)]
        shared += [Shared(group, cut) for cut in cuts]
    return shared


def make_buckets(
    shared: Sequence[Shared], stages: Sequence[Collection[str]], world: World, tree: StepTree
) -> tuple[list[Bucket], torch.Tensor]:
    """Move the optimizer's parameters into buckets, and replace them with this rank's parts; a collective.

    `stages` names the parameters in each of this rank's stages, and `world` contains the ranks that share these stages.
    The result includes the gradients of the buckets' parts, concatenated in one tensor [n].
    """
    every = [(one, one.layout(names, world.size)) for one in shared for names in stages]
    own = [(one, layout) for one, layout in every if layout.starts]
    for one in shared:
        one.group["params"] = []
    lengths = [layout.part for _, layout in own]
    gradients = torch.zeros(sum(lengths), device=world.device)
    buckets: list[Bucket] = []
    for (one, layout), part in zip(own, gradients.split(lengths) if lengths else [], strict=True):
        buckets.append(Bucket({name: one.parameters[name] for name in layout.starts}, layout, world, tree, part))
        one.group["params"] += buckets[-1].trained
    return buckets, gradients


def _cut(parameters: Mapping[str, nn.Parameter], fewest: int) -> Iterator[dict[str, nn.Parameter]]:
    """Yield groups of consecutive parameters, each but the last as small as possible with `fewest` elements or more."""
    members: dict[str, nn.Parameter] = {}
    elements = 0
    for name, parameter in parameters.items():
        members[name] = parameter
        elements += parameter.numel()
        if elements >= fewest:
            yield members
            members, elements = {}, 0
    if members:
        yield members


def _view(flat: torch.Tensor, start: int, shape: torch.Size) -> torch.Tensor:
    """Return a view of a flat tensor in a parameter's shape; convolution weights are in channels_last."""
    place = flat.narrow(0, start, shape.numel())
    if len(shape) != CONVOLUTION_DIMENSIONS:
        return place.view(shape)
    outputs, inputs, height, width = shape
    return place.view(outputs, height, width, inputs).permute(0, 3, 1, 2)


def _products(parameter: torch.Tensor) -> int:
    """Return the number of multiplications in a matrix [n, m] times its transpose; for vectors, their length."""
    rows = len(parameter) if parameter.ndim > 1 else 1
    return parameter.numel() * min(rows, parameter.numel() // rows)
