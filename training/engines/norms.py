"""Sums of squares that are the same to the bit on any number of ranks.

Gradients are cut into pieces that no rank shares with another: blocks of a flat buffer, or rows of a parameter. The
sums of the pieces are gathered on every rank and added there, in an order that does not depend on how many ranks there
are.
"""

from __future__ import annotations

import torch

from training.world.collectives import gather_rows
from training.world.world import World

BLOCK = 1024  # elements


def squares_of_rows(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares of each row of float32 [rows, up to `BLOCK`], as float64 [rows].

    Only so few values are added in float32, in which a CPU's single sum loses digits: the norm of 5 million values was
    off by 1e-4, that of 138 million by 1e-2. All in float64 takes 100 times as long.
    """
    return torch.linalg.vector_norm(values, dim=1).double().square()


def pieces_per_row(row_elements: int) -> int:
    """Return into how many equal pieces of at most `BLOCK` elements a row of a parameter is cut."""
    return next(pieces for pieces in range(-(-row_elements // BLOCK), row_elements + 1) if row_elements % pieces == 0)


class SumOfSquares:
    """The sum over all ranks' pieces in one order.

    Args:
        places: int64 [pieces], of every piece in the order of the sum its place in the ranks' rows, one after another.
        row_length: of a rank's row: the most pieces of any rank.
        world: the ranks that share a stage, or the whole model.
        pipeline: the ranks that have its stages; None for a whole model.
    """

    def __init__(self, places: torch.Tensor, row_length: int, world: World, pipeline: World | None = None) -> None:
        self._places, self._row_length, self._world = places.to(world.device), row_length, world
        self._pipeline = pipeline

    def __call__(self, own: torch.Tensor, more: torch.Tensor | None = None, mark: int = 0) -> torch.Tensor:
        """Return the sum, float64 [], over this rank's pieces' squares, float64 [n], and the others'; a collective.

        Args:
            own: this rank's.
            more: float64 [k] that every rank has, whose places come after the ranks' rows.
            mark: below 2**53; if ranks have different ones, the sum is NaN.
        """
        row = torch.nn.functional.pad(own.to(self._world.device), (0, self._row_length - len(own)))
        rows = gather_rows(torch.nn.functional.pad(row, (0, 1), value=mark), self._world)
        if self._pipeline is not None:
            rows = gather_rows(rows.view(-1), self._pipeline)
        rows = rows.view(-1, self._row_length + 1)
        values = rows[:, :-1].reshape(-1)
        total = (values if more is None else torch.cat([values, more]))[self._places].sum()
        return torch.where((rows[:, -1] == mark).all(), total, torch.nan)
