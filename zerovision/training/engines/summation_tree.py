"""A fixed binary tree for sums of gradients, and norms that are bit-identical on any number of ranks.

A leaf is a micro-batch. A step has L leaves, numbered from 0; `Leaves` says which of them a rank computes. The tree
pairs neighbors from the leaves up: (0, 1), (2, 3), ..., then the pairs, and so on; an odd last node moves up unchanged.
Floating-point addition is commutative but not associative, so only sums along this tree are guaranteed to be
bit-identical.

For a norm, gradients are cut into pieces, each of which belongs to one rank: blocks or rows of a parameter. Every rank
receives the sums of all pieces, and adds them in an order that does not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from zerovision.training.world.collectives import sum_over_ranks
from zerovision.training.world.world import World

if TYPE_CHECKING:
    from zerovision.training.engines.tree_reduce_scatter import MachineLevels


class TreeNode(NamedTuple):
    """The sum of the leaves `first` to `end` - 1: a node of the tree."""

    first: int
    end: int


class Segment(NamedTuple):
    """A rank's leaves, and the rank's sums over them."""

    first: int
    nodes: list[TreeNode]  # of the remaining sums, in the order of the leaves: the parked sums, then the running sum
    most_parked: int  # largest number of parked sums at any time


class StepTree:
    """The tree of a step, and each rank's segment of it.

    Attributes:
        leaves: number of leaves of the tree.
        segments: the segments, by rank.
        rows_sent: largest number of remaining sums on any rank; 1 if the number of leaves per rank is a power of two,
            or if a single rank has all leaves.

    Args:
        ranks: number of ranks.
        leaves_per_rank: number of leaves per rank, which is the number of accumulation steps.
        levels: levels at which ranks on several machines add their sums; None if each rank sends its sums to every
            other rank.
    """

    def __init__(self, ranks: int, leaves_per_rank: int, levels: MachineLevels | None = None) -> None:
        self.leaves, self.levels = ranks * leaves_per_rank, levels
        firsts = range(0, self.leaves, leaves_per_rank)
        self.segments = [plan_segment(first, first + leaves_per_rank, self.leaves) for first in firsts]
        self.rows_sent = max(len(segment.nodes) for segment in self.segments)

    def add_ranks(self, rows: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Add the ranks' `LeafSums` rows, [ranks, rows, n], which are overwritten; return the total in `out` [n].

        `out` is separate memory; for a single rank, it is the rank's row, which is already the total.
        """
        if len(rows) > 1:
            sums = [
                (node, rows[rank, (place + 1) % len(segment.nodes)])  # the last sum, the running sum, is in row 0
                for rank, segment in enumerate(self.segments)
                for place, node in enumerate(segment.nodes)
            ]
            add_nodes(sums, self.leaves, out)
        return out


class LeafSums:
    """A rank's memory for sums over its leaves: the running sum, to which leaves are added, and a stack of parked sums.

    The running sum is in the first of the rows [n], and parked sums follow in order. `first` is the rank's first leaf,
    and `leaves` is the number of leaves of the tree.
    """

    def __init__(self, rows: list[torch.Tensor], first: int, leaves: int) -> None:
        self._rows, self._first, self._leaves = rows, first, leaves
        self._nodes: list[TreeNode] = []  # nodes of the sums; the last belongs to the running sum

    def add(self, places: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
        """Add the next leaf to the running sum, and then the parked sums that now join the running sum.

        `places` are views of the running sum, in the shapes of the parameters; a gradient of None is zero.
        """
        sums, leaf = len(self._nodes), self._nodes[-1].end if self._nodes else self._first
        joins = add_leaf(self._nodes, leaf, self._leaves)  # the first join is with the running sum
        if sums and not joins:
            self._rows[sums].copy_(self._rows[0])
        values = [gradient for gradient in gradients if gradient is not None]
        present = [place for place, gradient in zip(places, gradients, strict=True) if gradient is not None]
        if values and joins:
            torch._foreach_add_(present, values)
        elif values:
            torch._foreach_copy_(present, values)
        for place, gradient in zip(places, gradients, strict=True):
            if gradient is None and not joins:
                place.zero_()
        for row in range(sums - 1, sums - joins, -1):
            self._rows[0].add_(self._rows[row])

    def clear(self) -> None:
        """Discard all sums, to begin the next step."""
        self._nodes = []


def join(left: TreeNode, right: TreeNode, leaves: int) -> TreeNode | None:
    """Return the node that has these neighbors as its two halves, or None if there is no such node.

    A left half always has 2**k leaves, and begins at a multiple of 2**(k+1). The right half has as many leaves, or, at
    the end of the tree, all that remain.
    """
    size = left.end - left.first
    is_node = left.first % (2 * size) == 0 and right.end == min(left.first + 2 * size, leaves)
    return TreeNode(left.first, right.end) if is_node else None


def add_leaf(nodes: list[TreeNode], leaf: int, leaves: int) -> int:
    """Append a leaf to a rank's nodes, and join the last two while they are halves of a node; return how often."""
    nodes.append(TreeNode(leaf, leaf + 1))
    joins = 0
    while len(nodes) > 1 and (both := join(nodes[-2], nodes[-1], leaves)):
        nodes[-2:] = [both]
        joins += 1
    return joins


def plan_segment(first: int, end: int, leaves: int) -> Segment:
    """Return how a rank adds the leaves `first` to `end` - 1 of a tree with this many leaves."""
    nodes, most_parked = list[TreeNode](), 0
    for leaf in range(first, end):
        add_leaf(nodes, leaf, leaves)
        most_parked = max(most_parked, len(nodes) - 1)
    return Segment(first, nodes, most_parked)


def add_nodes(
    sums: Iterable[tuple[TreeNode, torch.Tensor]], leaves: int, out: torch.Tensor
) -> list[tuple[TreeNode, torch.Tensor]]:
    """Add sums [n] of nodes, in the order of their leaves, as far up the tree as possible; return the remaining sums.

    The given sums are overwritten. The root, if it joins at least two nodes, is stored in separate memory, `out` [n].
    """
    stack: list[tuple[TreeNode, torch.Tensor]] = []
    for node, total in sums:
        while stack and (both := join(stack[-1][0], node, leaves)):
            _, left = stack.pop()
            # The last addition computes the root; all earlier results stay in the memory of their left half.
            total = torch.add(left, total, out=out if both == TreeNode(0, leaves) else left)
            node = both
        stack.append((node, total))
    return stack


BLOCK = 1024  # elements


def squares_of_rows(values: torch.Tensor) -> torch.Tensor:
    """Return the sum of squares of each row of float32 [rows, up to `BLOCK`], as float64 [rows].

    Only a few values at a time are added in float32, because a long sum loses digits on a CPU: the norm of 138 million
    values was off by 1e-2. Using float64 for all values takes 100 times as long.
    """
    return torch.linalg.vector_norm(values, dim=1).double().square()


def pieces_per_row(row_elements: int) -> int:
    """Return the number of equal pieces, of at most `BLOCK` elements, in a row of a parameter."""
    return next(pieces for pieces in range(-(-row_elements // BLOCK), row_elements + 1) if row_elements % pieces == 0)


class SumOfSquares:
    """Adds the sums of squares of all pieces, in a fixed order.

    `places`, int64 [pieces], is each piece's index among this rank's pieces, or -1 for other ranks' pieces. The ranks
    of `world` share this rank's part of the model; for `holders`, see `ModelPart`.
    """

    def __init__(self, places: torch.Tensor, world: World, holders: World | None = None) -> None:
        self._places, self._groups = places.to(world.device), [world, *([holders] if holders else [])]

    def __call__(self, own: torch.Tensor, mark: int = 0) -> torch.Tensor:
        """Return the sum over all ranks' pieces, float64 [], or NaN if the ranks' marks (< 2**53) differ; a collective.

        `own`, float64 [n], are the sums of squares of this rank's pieces.
        """
        world = self._groups[0]
        squares = torch.nn.functional.pad(own.to(world.device), (0, 1))[self._places]  # the last place, -1, is 0
        marks = torch.nn.functional.pad(squares.new_full((1,), mark), (world.rank, world.size - world.rank - 1))
        every = torch.cat([squares, marks])
        for ranks in self._groups:  # exact in any order: each element is 0 on all ranks but one
            every = sum_over_ranks(every, ranks)
        squares, marks = every.split([len(squares), len(marks)])
        return torch.where((marks == mark).all(), squares.sum(), torch.nan)
