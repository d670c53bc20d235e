"""Buckets: the flat buffers that parameters lie in, and when backward has finished with each.

Which parameters share a bucket does not depend on the ranks, and so neither do the blocks of a norm.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from training.parallel.block_norms import BLOCK
from training.parallel.flat_buffers import make_buffers
from training.parallel.parameter_shards import (
    CHANNELS_LAST,
    CONVOLUTION_DIMENSIONS,
    WEIGHTS,
    ParameterShard,
    flat_shards,
    from_channels_last,
)
from training.parallel.summation_tree import StepTree
from training.parallel.world import World

ALIGNMENT = 16  # elements: every parameter begins on a cache line
# Of a bucket to which no further parameter is added: 1 MB, as fits a core's cache, or 16 MB, as NCCL needs for its
# rate and a GPU for few kernels.
FEWEST_ELEMENTS, FEWEST_ELEMENTS_ON_GPU = 1 << 18, 1 << 22


class Bucket:
    """Some parameters of one group of the optimizer, in one flat buffer.

    Attributes:
        parameters: by name.
        buffers: weights and gradients; a part is a whole number of blocks.
        elements: of the parameters, with what aligns them; the same on any number of ranks.
        master: this rank's part of the weights [n / ranks], the one parameter that the optimizer sees.

    Args:
        parameters: by name.
        world: the ranks.
        tree: of the step.
        sum_of_part: zeros [n / ranks], for the sum of this rank's part of the gradients.
        is_first: whether it is summed and gathered before the other buckets.
        releasable: whether the other ranks' parts of the weights shall take no memory between the steps.
    """

    def __init__(
        self,
        parameters: dict[str, nn.Parameter],
        world: World,
        tree: StepTree,
        sum_of_part: torch.Tensor,
        *,
        is_first: bool,
        releasable: bool,
    ) -> None:
        self.parameters, self._starts, self.elements = parameters, dict[str, int](), 0
        for name, parameter in parameters.items():
            self._starts[name] = self.elements
            self.elements += _aligned(parameter)
        part = len(sum_of_part)
        self._low, self._high = world.rank * part, (world.rank + 1) * part
        size = part * world.size
        self.buffers = make_buffers(size, world, tree, sum_of_part, is_first=is_first, releasable=releasable)
        self._places = []  # of the gradients
        for name, parameter in parameters.items():
            weight, place = (
                _view(flat, self._starts[name], parameter.shape)
                for flat in (self.buffers.weights, self.buffers.gradients)
            )
            if world.is_main:
                weight.copy_(parameter.detach())
            parameter.data = weight
            self._places.append(place)
        self.buffers.start_from_main()
        self.master = nn.Parameter(self.buffers.part)

    def add_leaf(self) -> None:
        """Add the parameters' gradients to the sum over this rank's leaves, and take them from the parameters.

        Autograd hands over the tensor that it has computed to a parameter without a gradient, and adds one to a
        parameter that has one: a kernel for each.
        """
        parameters = self.parameters.values()
        self.buffers.sums.add(self._places, [parameter.grad for parameter in parameters])
        for parameter in parameters:
            parameter.grad = None

    def shards(self, moments: Mapping[str, torch.Tensor]) -> Iterator[ParameterShard]:
        """Yield the parts of parameters that lie in this rank's part, with the optimizer's state of it."""
        flats = {WEIGHTS: self.master, **moments}
        for name, parameter in self.parameters.items():
            start = self._starts[name]
            low, high = max(start, self._low), min(start + parameter.numel(), self._high)
            shape, is_convolution = parameter.shape, parameter.ndim == CONVOLUTION_DIMENSIONS
            order = [shape[dimension] for dimension in CHANNELS_LAST] if is_convolution else shape
            for shard in flat_shards(name, order, low - start, high - start, flats, low - self._low):
                yield from_channels_last(shard) if is_convolution else shard


class BackwardOrder:
    """Completes every bucket in backward, as soon as all its gradients are there.

    Buckets are completed in one order, which all ranks share: in that of backward, so that their sums over the ranks
    travel while it computes the gradients of earlier layers.

    Args:
        module: whose parameters are in the buckets, in the order of forward, more or less.
        buckets: of the module.
    """

    def __init__(self, module: nn.Module, buckets: list[Bucket]) -> None:
        number_of = {name: number for number, (name, _) in enumerate(module.named_parameters())}
        self._buckets = sorted(
            buckets, key=lambda bucket: min(number_of[name] for name in bucket.parameters), reverse=True
        )
        self._missing: list[int] = []  # gradients of each bucket
        self._completed, self._sums_over_ranks = 0, False
        for position, bucket in enumerate(self._buckets):
            for parameter in bucket.parameters.values():
                parameter.register_post_accumulate_grad_hook(lambda _, position=position: self._count(position))

    def begin(self, *, sums_over_ranks: bool) -> None:
        """Prepare for backward of a leaf.

        Args:
            sums_over_ranks: whether it is this rank's last of the step, so that each bucket's sum is started.
        """
        self._missing = [len(bucket.parameters) for bucket in self._buckets]
        self._completed, self._sums_over_ranks = 0, sums_over_ranks

    def end(self) -> None:
        """Complete the buckets that are left after backward: parameters without a gradient are in them."""
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


def make_buckets(
    module: nn.Module, optimizer: torch.optim.Optimizer, world: World, tree: StepTree, *, releasable: bool
) -> tuple[list[Bucket], torch.Tensor]:
    """Move the optimizer's parameters into buckets, whose masters become its parameters; a collective.

    Returns:
        The buckets, and the gradients of their masters, one after another in one tensor.

    Args:
        module: whose parameters they are.
        optimizer: over them.
        world: the ranks.
        tree: of the step.
        releasable: whether the other ranks' parts of the weights shall take no memory between the steps.
    """
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    fewest = FEWEST_ELEMENTS_ON_GPU if world.device.type == "cuda" else FEWEST_ELEMENTS
    members = [
        (group, cut)
        for group in optimizer.param_groups
        for cut in _cut({names[id(parameter)]: parameter for parameter in group["params"]}, fewest)
    ]
    parts = [_round_up(sum(map(_aligned, cut.values())), BLOCK * world.size) // world.size for _, cut in members]
    gradients = torch.zeros(sum(parts), device=world.device)
    for group in optimizer.param_groups:
        group["params"] = []
    buckets: list[Bucket] = []
    for (group, cut), gradient in zip(members, gradients.split(parts), strict=True):
        buckets.append(Bucket(cut, world, tree, gradient, is_first=not buckets, releasable=releasable))
        group["params"].append(buckets[-1].master)
    return buckets, gradients


def _cut(parameters: Mapping[str, nn.Parameter], fewest: int) -> Iterator[dict[str, nn.Parameter]]:
    """Yield consecutive parameters, each time as few as have so many elements; the last are what is left."""
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
    """Return a view of a flat tensor in a parameter's shape; for a convolution's weights in channels_last."""
    place = flat.narrow(0, start, shape.numel())
    if len(shape) != CONVOLUTION_DIMENSIONS:
        return place.view(shape)
    outputs, inputs, height, width = shape
    return place.view(outputs, height, width, inputs).permute(0, 3, 1, 2)


def _aligned(parameter: torch.Tensor) -> int:
    return _round_up(parameter.numel(), ALIGNMENT)


def _round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
