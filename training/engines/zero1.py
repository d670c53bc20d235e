"""ZeRO-1 over flat buffers: all weights on every rank, of which each rank updates a part.

Parameters are views of a few flat fp32 buffers, a bucket each (Rajbhandari et al. 2020,
https://arxiv.org/abs/1910.02054). Every rank receives the sum of its part's gradients, while backward still computes
those of other buckets, keeps the optimizer's state of it and updates it; then the parts are gathered again.

Images are channels_last, and so are the weights of convolutions, their gradients and moments in the flat buffers:
kernels would otherwise convert them in every step. Everything else sees the usual order of dimensions.
"""

from __future__ import annotations

import torch

from training.engines.buckets import BackwardOrder, make_buckets
from training.engines.compilation import compile_network
from training.engines.distribution import Distribution
from training.engines.engine import EngineSetup
from training.engines.norms import BLOCK, SumOfSquares, squares_of_rows
from training.engines.parameter_shards import (
    CONVOLUTION_DIMENSIONS,
    ParameterShard,
    frozen_parameters,
    frozen_shards,
)
from training.engines.precision import under_autocast
from training.engines.summation_tree import StepTree
from training.engines.tensor_split import TensorSplit
from training.world.collectives import barrier


class Zero1(Distribution):
    """A model in flat buffers, whose gradients and optimizer state are cut into one part per rank."""

    reports = True

    def __init__(self, setup: EngineSetup) -> None:
        """Take over the parameters; a collective."""
        self._module, self._optimizer, self._world = setup.module, setup.optimizer, setup.world
        self._network = under_autocast(setup.module, setup.precision, setup.world.device)
        self._accumulation_steps = setup.accumulation_steps
        for parameter in frozen_parameters(self._module).values():
            if parameter.ndim == CONVOLUTION_DIMENSIONS:
                parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
        tree = StepTree(self._world.size, setup.accumulation_steps)
        self._buckets, self._gradients = make_buckets(self._module, self._optimizer, self._world, tree, setup.split)
        self._split = setup.split
        self._whole = [bucket for bucket in self._buckets if bucket.parameters.keys().isdisjoint(self._split.cuts)]
        self._order = BackwardOrder(self._module, self._buckets)
        self._sum_of_squares = SumOfSquares(self._places(setup.split), len(self._gradients) // BLOCK, self._world)
        if setup.compiles:
            compile_network(self._network, setup)

    def _places(self, split: TensorSplit) -> torch.Tensor:
        """Return where every block with elements that count is among the ranks' rows of blocks; see `SumOfSquares`."""
        row, first, places = len(self._gradients) // BLOCK, 0, []
        for bucket in self._buckets:
            layout = bucket.layout
            blocks_of_part = layout.part // BLOCK
            ranks = layout.blocks.div(blocks_of_part, rounding_mode="floor")
            if all(map(split.counts, bucket.parameters)):
                places.append(ranks * row + first + layout.blocks % blocks_of_part)
            first += blocks_of_part
        return torch.cat(places)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self._network(images)

    def begin_backward(self, leaf: int) -> None:
        self._order.begin(sums_over_ranks=leaf == self._accumulation_steps - 1)

    def end_backward(self) -> None:
        self._order.end()

    def sum_gradients(self) -> torch.Tensor:
        for bucket in self._buckets:
            bucket.sum_gradients()
        self._split.share_gradients(parameter for bucket in self._whole for parameter in bucket.trained)
        # All ranks have read the gradients when this returns: they may be written again.
        return self._sum_of_squares(squares_of_rows(self._gradients.view(-1, BLOCK)))

    def scale_gradients(self, factor: torch.Tensor) -> None:
        self._gradients.mul_(factor)

    def share_weights(self) -> None:
        for bucket in self._buckets:
            bucket.buffers.start_gather()
        for bucket in self._buckets:
            bucket.buffers.finish_gather()

    def settle(self) -> None:
        if any(bucket.buffers.are_shared for bucket in self._buckets):
            barrier(self._world)  # no rank computes any more with weights that all share

    def shards(self) -> list[ParameterShard]:
        shards = frozen_shards(self._module, self._world)
        return shards + [shard for bucket in self._buckets for shard in bucket.shards(self._optimizer)]
