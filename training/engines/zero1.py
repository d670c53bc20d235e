"""ZeRO-1 over flat buffers: all weights on every rank, of which each rank updates a part.

Parameters are views of a few flat fp32 buffers, a bucket each (Rajbhandari et al. 2020,
https://arxiv.org/abs/1910.02054). Every rank receives the sum of its part's gradients, while backward still computes
those of other buckets, keeps the optimizer's state of it and updates it; then the parts are gathered again.

Images are channels_last, and so are the weights of convolutions, their gradients and moments in the flat buffers:
kernels would otherwise convert them in every step. Everything else sees the usual order of dimensions.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from training.engines.buckets import BackwardOrder, Placed, Shared, make_buckets, place, share_out
from training.engines.compilation import compile_network
from training.engines.cuda_graphs import record, records
from training.engines.engine import Distribution, EngineSetup
from training.engines.machine_levels import machine_levels
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
from training.world.collectives import barrier, sum_over_ranks
from training.world.world import World


@dataclass(frozen=True)
class Stages:
    """The stages that a model is cut into.

    Attributes:
        names: of each stage's parameters.
        pipeline: the ranks that have them, one after another and round again.
    """

    names: Sequence[Collection[str]]
    pipeline: World

    def of_rank(self, rank: int) -> Sequence[Collection[str]]:
        """Return the stages of a rank of the pipeline."""
        return self.names[rank :: self.pipeline.size]


class Zero1(Distribution):
    """A model in flat buffers, whose gradients and optimizer state are cut into one part per rank."""

    reports = True

    def __init__(self, setup: EngineSetup, stages: Stages | None = None) -> None:
        """Take over the parameters; a collective.

        Args:
            setup: the model with its optimizer; `world` are the ranks that have this rank's stages.
            stages: of the model; None for a whole one.
        """
        self._module, self._optimizer, self._world = setup.module, setup.optimizer, setup.world
        self._network = under_autocast(setup.module, setup.precision, setup.world.device)
        self._accumulation_steps = setup.accumulation_steps
        for parameter in frozen_parameters(self._module).values():
            if parameter.ndim == CONVOLUTION_DIMENSIONS:
                parameter.data = parameter.data.contiguous(memory_format=torch.channels_last)
        levels = machine_levels(self._world, setup.leaves, setup.notes)
        tree = StepTree(self._world.size, setup.accumulation_steps, levels)
        shared = share_out(self._module, self._optimizer, self._world.device, setup.split)
        if stages is None:
            stages = Stages([{name for one in shared for name in one.parameters}], self._world.alone())
        pipeline, ranks = stages.pipeline, range(stages.pipeline.size)
        placed = [place(shared, stages.of_rank(rank), self._world.size) for rank in ranks]
        own = placed[pipeline.rank]
        self._buckets, self._gradients = make_buckets(shared, own, self._world, tree)
        self._split = setup.split
        self._whole = [bucket for bucket in self._buckets if bucket.parameters.keys().isdisjoint(self._split.cuts)]
        self._orders = [
            BackwardOrder(self._module, [b for b, one in zip(self._buckets, own, strict=True) if one.stage == stage])
            for stage in range(len(stages.of_rank(pipeline.rank)))
        ]
        self._blocks = _Blocks(shared, placed, self._world, pipeline, setup.split)
        if setup.compiles:
            compile_network(self._network, setup)
        self._compute = record(self._network, setup) if records(setup) else self._network

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self._compute(images)

    def begin_backward(self, leaf: int, stage: int = 0) -> None:
        self._orders[stage].begin(sums_over_ranks=leaf == self._accumulation_steps - 1)

    def end_backward(self, stage: int = 0) -> None:
        self._orders[stage].end()

    def drop_leaf(self) -> None:
        """Forget the first leaf of a step; a collective."""
        if self._accumulation_steps == 1:
            self.sum_gradients()  # which is under way
        for bucket in self._buckets:
            bucket.buffers.sums.clear()

    def sum_gradients(self) -> torch.Tensor:
        for bucket in self._buckets:
            bucket.sum_gradients()
        self._split.share_gradients(parameter for bucket in self._whole for parameter in bucket.trained)
        # All ranks have read the gradients when this returns: they may be written again.
        return self._blocks.sum_of_squares(self._gradients.view(-1, BLOCK))

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


class _Blocks:
    """The blocks of the whole model's buckets, wherever they are.

    Args:
        shared: the parameters of each bucket.
        placed: the buckets of each rank of the pipeline.
        world: the ranks that have this rank's stages.
        pipeline: the ranks that have the stages.
        tensor_split: decides which blocks count on this rank of a tensor group.
    """

    def __init__(
        self,
        shared: Sequence[Shared],
        placed: Sequence[Sequence[Placed]],
        world: World,
        pipeline: World,
        tensor_split: TensorSplit,
    ) -> None:
        self._world, self._pipeline = world, pipeline
        first, firsts = 0, []  # number of each bucket's first block
        counted = [torch.ones(0, dtype=torch.bool)]  # of each block, whether it counts
        for one in shared:
            firsts.append(first)
            length = len(one.layout([*one.parameters], 1).numbers)
            first += length
            counted.append(torch.full((length,), all(map(tensor_split.counts, one.parameters))))
        row = max(sum(one.layout.part for one in of_rank) for of_rank in placed) // BLOCK
        none = torch.arange(0)
        found = [(none, none)]  # numbers of blocks, and their places in the ranks' rows, one after another
        for rank, of_rank in enumerate(placed):
            start = rank * world.size * row
            for number, _, layout in of_rank:
                blocks_of_part = layout.part // BLOCK
                owners = layout.blocks.div(blocks_of_part, rounding_mode="floor")
                found.append((firsts[number] + layout.numbers, start + owners * row + layout.blocks % blocks_of_part))
                start += blocks_of_part
        numbers, places = (torch.cat(parts) for parts in zip(*found, strict=True))
        is_split = torch.bincount(numbers, minlength=first) > 1  # over several stages
        split = is_split.nonzero().view(-1)
        place_of = torch.empty(first, dtype=torch.int64).scatter_(0, numbers, places)
        place_of[split] = pipeline.size * world.size * row + torch.arange(len(split))
        own_row = pipeline.rank * world.size + world.rank
        is_own = is_split[numbers] & (places.div(max(row, 1), rounding_mode="floor") == own_row)
        self._own = (places[is_own] % max(row, 1)).to(world.device)
        self._own_split = torch.searchsorted(split, numbers[is_own]).to(world.device)
        self._split = len(split)
        self._sum = SumOfSquares(place_of[torch.cat(counted)], row, world, pipeline if pipeline.size > 1 else None)

    def sum_of_squares(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the sum of the squares of all blocks, float64 [], given this rank's [n, BLOCK]; a collective."""
        if not self._split:
            return self._sum(squares_of_rows(rows))
        whole = rows.new_zeros(self._split, BLOCK).index_add_(0, self._own_split, rows[self._own])
        for ranks in (self._world, self._pipeline):  # every element is one rank's, and 0 on the others
            whole = sum_over_ranks(whole, ranks)
        return self._sum(squares_of_rows(rows), squares_of_rows(whole))
