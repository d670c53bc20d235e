"""Sums of squares over flat buffers that are the same to the bit on any number of ranks.

A buffer is cut into blocks of equal length, and each rank has whole blocks. Their sums are gathered on every rank and
added there, in an order that does not depend on how many ranks there are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from training.parallel.collectives import gather_rows
from training.parallel.parameter_shards import WEIGHTS, EngineState
from training.parallel.world import World

BLOCK = 1024  # elements


def squares_of_rows(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares of each row of float32 [rows, up to `BLOCK`], as float64 [rows].

    Only so few values are added in float32, in which a CPU's single sum loses digits: the norm of 5 million values was
    off by 1e-4, that of 138 million by 1e-2. All in float64 takes 100 times as long.
    """
    return torch.linalg.vector_norm(values, dim=1).double().square()


def sum_of_squares(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares of float32 [N] as float64 [], to about float32's precision for any N."""
    whole = len(values) // BLOCK * BLOCK
    return squares_of_rows(values[:whole].view(-1, BLOCK)).sum() + squares_of_rows(values[None, whole:]).sum()


class BlockSum:
    """The sum of squares over flat buffers that are cut over the ranks.

    Args:
        sizes: of each buffer its elements, after which there are only zeros, and those of a rank's part, which is a
            whole number of blocks.
        world: the ranks.
    """

    def __init__(self, sizes: Sequence[tuple[int, int]], world: World) -> None:
        self._world = world
        row = sum(part for _, part in sizes) // BLOCK  # blocks of a rank
        places, first = [], 0
        for elements, part in sizes:
            blocks = torch.arange(-(-elements // BLOCK))
            places.append(blocks.div(part // BLOCK, rounding_mode="floor") * row + first + blocks % (part // BLOCK))
            first += part // BLOCK
        # Of every block in the gathered rows: their number does not depend on the ranks.
        self._places = torch.cat(places).to(world.device)
        unused = torch.ones(row * world.size, dtype=torch.bool).index_fill_(0, torch.cat(places), False)
        self._zeros = unused.nonzero().view(-1).to(world.device)

    def __call__(self, parts: torch.Tensor) -> torch.Tensor:
        """Return the sum, float64 [], of this rank's parts, one after another, and the others'; a collective."""
        rows = gather_rows(squares_of_rows(parts.view(-1, BLOCK)), self._world).view(-1)
        # The blocks without elements add 0, or NaN if their rank says by it that it gives the step up.
        return rows[self._places].sum() + rows[self._zeros].sum()


class ParameterBlocks:
    """The squared norm of every parameter in flat tensors that are cut over the ranks.

    A flat tensor is cut into pieces that end with a block or a parameter. Their sums are gathered, and added for each
    parameter in the order of the ranks and of their flat tensors.

    Args:
        flat: this rank's part [n] of one group, a whole number of blocks.
        state: the engine's, whose shards say what is in it.
        world: the ranks; building this is a collective.
    """

    def __init__(self, flat: torch.Tensor, state: EngineState, world: World) -> None:
        self._world = world
        numbers = {name: number for number, name in enumerate(state.shapes)}
        owner = torch.full((len(flat),), -1)
        for shard in state.shards:
            weights = shard.tensors[WEIGHTS]
            start = int(weights.storage_offset() - flat.storage_offset())
            if weights.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr() and 0 <= start < len(flat):
                owner[start : start + weights.numel()] = numbers[shard.name]
        is_start = (owner.diff(prepend=owner.new_full((1,), -2)) != 0) | (torch.arange(len(flat)) % BLOCK == 0)
        starts = is_start.nonzero()[:, 0]
        lengths = starts.diff(append=torch.tensor([len(flat)]))
        # Whole blocks are rows of the flat tensor; the other pieces are copied, each to a row that ends with zeros.
        is_whole = lengths == BLOCK
        self._blocks = (starts[is_whole] // BLOCK).to(flat.device)
        inside = torch.arange(BLOCK) < lengths[~is_whole, None]
        places = torch.where(inside, starts[~is_whole, None] + torch.arange(BLOCK), len(flat))  # where there is a 0
        self._places = places.to(flat.device)
        self._order = torch.cat([is_whole.nonzero()[:, 0], (~is_whole).nonzero()[:, 0]]).argsort().to(flat.device)
        self._most_pieces = int(gather_rows(torch.tensor([len(starts)], device=world.device), world).max())
        owners = gather_rows(self._padded(owner[starts], -1).to(world.device), world).view(-1)
        self._by_parameter = owners.argsort(stable=True)[(owners < 0).sum() :]
        self._counts = owners[owners >= 0].bincount(minlength=len(numbers))

    def squares(self, values: torch.Tensor) -> torch.Tensor:
        """Return the squared norm, float64 [parameters], of each parameter in all ranks' values [n]; a collective."""
        rows = values.view(-1, BLOCK)[self._blocks]
        others = torch.cat([values, values.new_zeros(1)])[self._places]
        own = torch.cat([squares_of_rows(rows), squares_of_rows(others)])[self._order]
        pieces = gather_rows(self._padded(own, 0).to(self._world.device), self._world).view(-1)
        # Unchecked: a check of the lengths would wait for the device.
        return torch.segment_reduce(pieces[self._by_parameter], "sum", lengths=self._counts, unsafe=True)

    def _padded(self, values: torch.Tensor, filling: int) -> torch.Tensor:
        return torch.nn.functional.pad(values, (0, self._most_pieces - len(values)), value=filling)
