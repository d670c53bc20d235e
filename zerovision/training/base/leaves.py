"""Assigns micro-batches to ranks; a step's micro-batches are the leaves of the tree along which gradients are added.

A step has R x A leaves, on R ranks with A micro-steps each. The assignment does not change a bit of the sum, so the
most efficient one is used. If a rank keeps whole gradients, its leaves are neighbors: the rank adds their gradients and
sends one sum. If a rank keeps a part of the gradients, the leaves of each micro-step are neighbors: that part of their
gradients is added after every micro-step.
"""

from __future__ import annotations

from typing import NamedTuple


class Leaves(NamedTuple):
    """The leaves of a step.

    Attributes:
        ranks: number of ranks, R.
        per_rank: number of accumulation steps, A.
        in_turn: number of neighboring ranks, a divisor of R, that take neighboring leaves in turn.
    """

    ranks: int
    per_rank: int
    in_turn: int = 1

    def number(self, rank: int, micro_step: int) -> int:
        """Return the leaf that a rank computes in a micro-step."""
        group, place = divmod(rank, self.in_turn)
        return (group * self.per_rank + micro_step) * self.in_turn + place

    def of(self, rank: int) -> list[int]:
        """Return a rank's leaves in the order of its micro-steps."""
        return [self.number(rank, micro_step) for micro_step in range(self.per_rank)]

    def order(self) -> list[int]:
        """Return, for each leaf in order, its position among the micro-steps of all ranks, listed rank by rank."""
        numbers = [leaf for rank in range(self.ranks) for leaf in self.of(rank)]
        return sorted(range(len(numbers)), key=numbers.__getitem__)
