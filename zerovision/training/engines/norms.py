"""Sums of squares that are bit-identical on any number of ranks.

Gradients are cut into pieces that belong to one rank each: blocks of a parameter, or its rows. Every rank gets the sums
of all pieces, and adds them in an order that does not depend on the number of ranks.
"""

from __future__ import annotations

import torch

from zerovision.training.world.collectives import sum_over_ranks
from zerovision.training.world.world import World

BLOCK = 1024  # elements


def squares_of_rows(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares of each row of float32 [rows, up to `BLOCK`], as float64 [rows].

    Few values are added in float32, because a CPU's single sum loses digits: the norm of 5 million values was off by
    1e-4, that of 138 million by 1e-2. Using float64 for everything takes 100 times as long.
    """
    return torch.linalg.vector_norm(values, dim=1).double().square()


def pieces_per_row(row_elements: int) -> int:
    """Return the number of equal pieces, of at most `BLOCK` elements, in a row of a parameter."""
    return next(pieces for pieces in range(-(-row_elements // BLOCK), row_elements + 1) if row_elements % pieces == 0)


class SumOfSquares:
    """The sum over all pieces, in order.

    Args:
        places: int64 [pieces], each piece's index among this rank's pieces; -1 if it is another rank's.
        world: the ranks that share this rank's part of the model.
        holders: see `ModelPart.holders`.
    """

    def __init__(self, places: torch.Tensor, world: World, holders: World | None = None) -> None:
        self._places, self._groups = places.to(world.device), [world, *([holders] if holders else [])]

    def __call__(self, own: torch.Tensor, mark: int = 0) -> torch.Tensor:
        """Return the sum, float64 [], over all ranks' pieces; a collective.

        Args:
            own: the sums of squares of this rank's pieces, float64 [n].
            mark: a number below 2**53; if ranks have different marks, the sum is NaN.
        """
        world = self._groups[0]
        squares = torch.nn.functional.pad(own.to(world.device), (0, 1))[self._places]  # the last place, -1, is 0
        marks = torch.nn.functional.pad(squares.new_full((1,), mark), (world.rank, world.size - world.rank - 1))
        every = torch.cat([squares, marks])
        for ranks in self._groups:  # exact in any order: an element is one rank's, and 0 on the others
            every = sum_over_ranks(every, ranks)
        squares, marks = every.split([len(squares), len(marks)])
        return torch.where((marks == mark).all(), squares.sum(), torch.nan)
