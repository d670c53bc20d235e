"""ZeRO-1 over flat buffers: every rank has all weights, and updates a part of them.

Parameters are views of a few flat fp32 buffers, one per bucket (Rajbhandari et al. 2020,
https://arxiv.org/abs/1910.02054). Every rank receives the summed gradients of its part while backward still computes
the gradients of other buckets. The rank keeps the optimizer state of its part, and updates the part; then all parts are
gathered again.

Images are in channels_last format, and so are convolution weights, gradients and moments in the flat buffers;
otherwise, kernels would convert them in every step. All other code sees the usual order of dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from zerovision.training.engines.activation_checkpointing import repeated_blocks
from zerovision.training.engines.buckets import BackwardOrder, Bucket, Shared, count_blocks, make_buckets, share_out
from zerovision.training.engines.compilation import compile_network, record, records
from zerovision.training.engines.engine import EngineSetup
from zerovision.training.engines.parameter_shards import (
    CONVOLUTION_DIMENSIONS,
    ModelPart,
    ParameterShard,
    frozen_parameters,
    frozen_shards,
)
from zerovision.training.engines.precision import under_autocast
from zerovision.training.engines.summation_tree import BLOCK, StepTree, SumOfSquares, squares_of_rows
from zerovision.training.engines.tree_reduce_scatter import machine_levels
from zerovision.training.world.collectives import barrier


class Zero1:
    """A model in flat buffers, with gradients and optimizer state cut into one part per rank.

    As with `Fsdp2`, this rank's parts become the parameters in the optimizer's groups.
    """

    reports = True  # whether this rank saves its parts in checkpoints; among ranks with the same parts, only one does

    def __init__(self, setup: EngineSetup) -> None:
        """Move the module's parameters into flat buffers; a collective."""
        self._module, self._optimizer, self._world = setup.module, setup.optimizer, setup.data
        self._network = under_autocast(setup.module, setup.precision, setup.data.device)
        self._accumulation_steps = setup.accumulation_steps
        for parameter in frozen_parameters(self._module).values():
            if parameter.ndim == CONVOLUTION_DIMENSIONS:
                parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
        levels = machine_levels(self._world, setup.leaves, setup.notes)
        tree = StepTree(self._world.size, setup.accumulation_steps, levels)
        shared = share_out(self._module, self._optimizer, self._world.device, setup.part)
        stages = setup.part.stages or [{name for one in shared for name in one.parameters}]
        self._buckets, self._gradients = make_buckets(shared, stages, self._world, tree)
        self._part = setup.part
        self._whole = [bucket for bucket in self._buckets if not any(map(self._part.is_divided, bucket.parameters))]
        self._orders = [
            BackwardOrder(self._module, [bucket for bucket in self._buckets if {*bucket.parameters} <= {*names}])
            for names in stages
        ]
        blocks = _own_blocks(shared, self._buckets, self._world.rank, setup.part)
        self._sum_of_squares = SumOfSquares(blocks, self._world, setup.part.holders)
        if setup.compiles:
            compile_network(self._network, setup)
        self._compute = record(self._network, setup) if records(setup) else self._network
        # Compiled, recorded and divided networks need all weights when forward begins, and buffers in shared memory
        # need no wait in forward.
        is_whole = setup.compiles or self._compute is not self._network or setup.part.holders
        self._waits_in_forward = not is_whole and not any(bucket.buffers.are_shared for bucket in self._buckets)
        if self._waits_in_forward:
            self._await_by_block(repeated_blocks(self._module))

    def _await_by_block(self, blocks: list[nn.Module]) -> None:
        """Make each block's forward wait for the block's weights, and the module's forward for all other weights."""
        block_of = {id(parameter): number for number, block in enumerate(blocks) for parameter in block.parameters()}
        needed = {
            id(bucket): {block_of.get(id(parameter), -1) for parameter in bucket.parameters.values()}
            for bucket in self._buckets
        }
        self._buckets.sort(key=lambda bucket: min(needed[id(bucket)]))
        for number, module in enumerate([self._module, *blocks], -1):
            buckets = [bucket for bucket in self._buckets if number in needed[id(bucket)]]
            module.register_forward_pre_hook(lambda *_, buckets=buckets: _wait_for_weights(buckets))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Run the network on images [B, C, H, W]; a collective if it gathers weights."""
        return self._compute(images)

    def begin_backward(self, leaf: int, stage: int = 0) -> None:
        """Prepare for the backward pass of one of this rank's leaves, which are numbered from 0 in each step."""
        _wait_for_weights(self._buckets)  # also those of skipped blocks
        self._orders[stage].begin(sums_over_ranks=leaf == self._accumulation_steps - 1)

    def end_backward(self, stage: int = 0) -> None:
        """Add the gradients to the sums over the leaves; a collective after the last leaf of a step."""
        self._orders[stage].end()

    def drop_leaf(self) -> None:
        """Discard the first leaf of a step; a collective."""
        if self._accumulation_steps == 1:
            self.sum_gradients()  # the sum has already started
        for bucket in self._buckets:
            bucket.buffers.sums.clear()

    def sum_gradients(self) -> torch.Tensor:
        """Sum the optimizer's gradients over all leaves, and return their sum of squares, float64 []; a collective."""
        self._wait_for_ranks()
        for bucket in self._buckets:
            bucket.sum_gradients()
        self._part.share_gradients(parameter for bucket in self._whole for parameter in bucket.trained)
        # A parameter that is whole on several ranks is counted only once. When this returns, all ranks have read the
        # gradients, so they may be overwritten.
        return self._sum_of_squares(squares_of_rows(self._gradients.view(-1, BLOCK)))

    def scale_gradients(self, factor: torch.Tensor) -> None:
        """Multiply the optimizer's gradients by a scalar tensor [] on this rank's device."""
        self._gradients.mul_(factor)

    def share_weights(self) -> None:
        """Update every rank's model with the current values of the optimizer's parameters; a collective."""
        self._wait_for_ranks()
        for bucket in self._buckets:
            bucket.buffers.start_gather()
        if not self._waits_in_forward:
            _wait_for_weights(self._buckets)

    def settle(self) -> None:
        """Set the optimizer's parameters to the model's values; a collective if ranks share memory."""
        _wait_for_weights(self._buckets)
        self._wait_for_ranks()

    def _wait_for_ranks(self) -> None:
        """Wait until no rank is computing with shared memory; a collective if ranks share memory."""
        if any(bucket.buffers.are_shared for bucket in self._buckets):
            barrier(self._world)

    def shards(self) -> list[ParameterShard]:
        """Return this rank's parts of all parameters, with their optimizer state; not a collective."""
        _wait_for_weights(self._buckets)
        shards = frozen_shards(self._module, self._world)
        return shards + [shard for bucket in self._buckets for shard in bucket.shards(self._optimizer)]


def _wait_for_weights(buckets: Sequence[Bucket]) -> None:
    """Wait until the weights in these buckets are complete; return immediately if they already are."""
    for bucket in buckets:
        bucket.buffers.finish_gather()


def _own_blocks(shared: Sequence[Shared], buckets: Sequence[Bucket], rank: int, part: ModelPart) -> torch.Tensor:
    """Return each block's index among this rank's blocks, int64 [blocks]; -1 for other ranks' blocks."""
    named = (item for every in shared for item in every.parameters.items())
    places = {name: -torch.ones(count_blocks(parameter), dtype=torch.int64) for name, parameter in named}
    start = 0
    for layout in (bucket.layout for bucket in buckets):
        blocks = layout.part // BLOCK
        for name, element in layout.starts.items():
            place = torch.arange(len(places[name])) + element // BLOCK - rank * blocks  # relative to the part
            is_own = (place >= 0) & (place < blocks) & part.counts(name)
            places[name] = torch.where(is_own, start + place, -1)
        start += blocks
    return torch.cat([torch.arange(0), *places.values()])
