"""A fixed binary tree over the leaves of a step, along which gradients are added on any number of ranks.

A leaf is a micro-batch; a step has L of them, numbered from 0, and each rank computes a contiguous segment. The tree
pairs neighbors from the leaves up: (0, 1), (2, 3), ..., then the pairs, and so on; an odd last node passes up
unchanged. Floating-point addition is commutative but not associative, so all sums along this tree have the same bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

if TYPE_CHECKING:
    from zerovision.training.engines.machine_levels import MachineLevels


class TreeNode(NamedTuple):
    """The sum of the leaves `first` to `end` - 1: a node of the tree."""

    first: int
    end: int


class LeafAdditions(NamedTuple):
    """A rank's operations on its buffers at one leaf.

    Attributes:
        parks: whether the running sum is set aside first, because this leaf begins another.
        joins: number of parked sums, latest first, to add to the running sum after backward.
    """

    parks: bool
    joins: int


class Segment(NamedTuple):
    """A rank's additions in the order of its leaves, and the sums left at the end.

    Attributes:
        additions: one entry per leaf.
        nodes: the remaining sums, in the order of the leaves; the last is the running sum, the others are parked.
        most_parked: largest number of parked sums at any time.
    """

    additions: list[LeafAdditions]
    nodes: list[TreeNode]
    most_parked: int


class StepTree:
    """The tree of a step, and each rank's segment of it.

    Attributes:
        leaves: the tree's leaves.
        segments: the segments by rank.
        rows_sent: largest number of remaining sums on a rank: 1 if its leaves are a power of two, or all leaves.

    Args:
        ranks: the run's ranks.
        leaves_per_rank: accumulation steps.
        levels: levels in which ranks on several machines add their sums; None to send them from each rank to each.
    """

    def __init__(self, ranks: int, leaves_per_rank: int, levels: MachineLevels | None = None) -> None:
        self.leaves, self.levels = ranks * leaves_per_rank, levels
        firsts = range(0, self.leaves, leaves_per_rank)
        self.segments = [plan_segment(first, first + leaves_per_rank, self.leaves) for first in firsts]
        self.rows_sent = max(len(segment.nodes) for segment in self.segments)


class LeafSums:
    """A rank's memory for sums over its leaves: the running sum, to which leaves are added, and a stack of parked sums.

    Args:
        rows: memory [n] for each sum; the running sum is in the first row, parked sums follow in order.
        additions: the additions of this rank's segment.
    """

    def __init__(self, rows: list[torch.Tensor], additions: list[LeafAdditions]) -> None:
        self._rows, self._additions = rows, additions
        self._leaf = self._parked = 0

    def add(self, places: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor | None]) -> None:
        """Add the next leaf, and the parked sums that it completes.

        Args:
            places: views of the running sum, one per parameter.
            gradients: gradients in the shapes of the places; None for zeros.
        """
        parks, joins = self._additions[self._leaf]
        if parks:
            self._parked += 1
            self._rows[self._parked].copy_(self._rows[0])
        is_sum = self._leaf > 0 and not parks
        values = [gradient for gradient in gradients if gradient is not None]
        present = [place for place, gradient in zip(places, gradients, strict=True) if gradient is not None]
        if values and is_sum:
            torch._foreach_add_(present, values)
        elif values:
            torch._foreach_copy_(present, values)
        for place, gradient in zip(places, gradients, strict=True):
            if gradient is None and not is_sum:
                place.zero_()
        for _ in range(joins):
            self._rows[0].add_(self._rows[self._parked])
            self._parked -= 1
        self._leaf += 1

    def clear(self) -> None:
        """Begin the next step."""
        self._leaf = self._parked = 0


def rows_of(segment: Segment) -> list[tuple[TreeNode, int]]:
    """Return a rank's remaining sums, in the order of their leaves, and the row of `LeafSums` of each."""
    *parked, running = segment.nodes
    return [*zip(parked, range(1, len(parked) + 1), strict=True), (running, 0)]


def add_ranks(
    rows: torch.Tensor, segments: Sequence[Segment], leaves: int, out: torch.Tensor
) -> list[tuple[TreeNode, torch.Tensor]]:
    """Add the remaining sums of ranks with neighboring segments, as `add_nodes` does.

    Args:
        rows: [ranks, rows, n], the rows of the ranks' `LeafSums`; overwritten.
        segments: the segments of these ranks, in order.
        leaves: the tree's leaves.
        out: see `add_nodes`.
    """
    sums = [(node, rows[rank, row]) for rank, segment in enumerate(segments) for node, row in rows_of(segment)]
    return add_nodes(sums, leaves, out)


def join(left: TreeNode, right: TreeNode, leaves: int) -> TreeNode | None:
    """Return the node of which these neighbors are the two halves, or None.

    A left half always has a power of two of leaves, 2**k, and begins at a multiple of 2**(k+1). The right half has as
    many, or the rest at the end of the tree.
    """
    size = left.end - left.first
    is_node = left.first % (2 * size) == 0 and right.end == min(left.first + 2 * size, leaves)
    return TreeNode(left.first, right.end) if is_node else None


def plan_segment(first: int, end: int, leaves: int) -> Segment:
    """Plan how a rank adds the leaves `first` to `end` - 1 of a tree over this many leaves.

    Adding a leaf to the running sum gives a sum of the tree if the leaf is the right half of a node whose left half is
    the running sum.
    """
    parked: list[TreeNode] = []
    running = TreeNode(first, first + 1)
    additions = [LeafAdditions(parks=False, joins=0)]
    most_parked = 0
    for leaf in range(first + 1, end):
        joined = join(running, TreeNode(leaf, leaf + 1), leaves)
        if joined is None:
            parked.append(running)
            most_parked = max(most_parked, len(parked))
        running, joins = joined or TreeNode(leaf, leaf + 1), 0
        while parked and (both := join(parked[-1], running, leaves)):
            parked.pop()
            running, joins = both, joins + 1
        additions.append(LeafAdditions(parks=joined is None, joins=joins))
    return Segment(additions, [*parked, running], most_parked)


def add_nodes(
    sums: Iterable[tuple[TreeNode, torch.Tensor]], leaves: int, out: torch.Tensor
) -> list[tuple[TreeNode, torch.Tensor]]:
    """Add the sums of neighboring nodes as far up the tree as possible; the sums [n] are overwritten.

    Args:
        sums: sums of nodes, in the order of their leaves.
        leaves: the tree's leaves.
        out: separate memory [n] for the root, the sum of at least two nodes.

    Returns:
        The remaining sums; only the root if the nodes cover all leaves.
    """
    stack: list[tuple[TreeNode, torch.Tensor]] = []
    for node, total in sums:
        while stack and (both := join(stack[-1][0], node, leaves)):
            _, left = stack.pop()
            # The last addition is the root's: all before stay in the memory of one of their halves.
            total = torch.add(left, total, out=out if both == TreeNode(0, leaves) else left)
            node = both
        stack.append((node, total))
    return stack
