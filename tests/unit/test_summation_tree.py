"""The tree of sums: every number of ranks adds the same pairs, whatever part of the leaves a rank has."""

from __future__ import annotations

import math

import pytest
import torch

from zerovision.training.engines.summation_tree import (
    LeafSums,
    StepTree,
    TreeNode,
    add_leaf,
    join,
    plan_segment,
)

SHARINGS = [(leaves, ranks) for leaves in range(1, 41) for ranks in range(1, leaves + 1) if leaves % ranks == 0]


def tree_over(leaves: list, add):
    """The definition: pair neighbours, level by level; an odd last node passes up."""
    while len(leaves) > 1:
        pairs = [add(*pair) for pair in zip(leaves[::2], leaves[1::2], strict=False)]
        leaves = pairs + leaves[len(pairs) * 2 :]
    return leaves[0]


def sums_of_rank(first: int, end: int, leaves: int, values: list, add):
    """Add `values` for the leaves of a rank as `LeafSums` does; `add` stands for backward, too."""
    plan = plan_segment(first, end, leaves)
    nodes, sums = [], []
    for leaf in range(first, end):
        joins = add_leaf(nodes, leaf, leaves)
        sums.append(values[leaf])
        for _ in range(joins):
            running = sums.pop()
            sums[-1] = add(sums[-1], running)
        assert len(sums) - 1 <= plan.most_parked
    assert nodes == plan.nodes
    return list(zip(nodes, sums, strict=True))


@pytest.mark.parametrize(("leaves", "ranks"), SHARINGS)
def test_any_number_of_ranks_adds_the_same_pairs(leaves, ranks):
    """A sum is written as the unordered pair of its two halves."""
    names, count = list(range(leaves)), leaves // ranks
    pair = lambda left, right: frozenset((left, right))  # noqa: E731
    stack: list = []
    for rank in range(ranks):
        for node, total in sums_of_rank(rank * count, (rank + 1) * count, leaves, names, pair):
            while stack and (both := join(stack[-1][0], node, leaves)):
                node, total = both, pair(stack.pop()[1], total)
            stack.append((node, total))
    assert stack == [(TreeNode(0, leaves), tree_over(names, pair))]


@pytest.mark.parametrize(("leaves", "ranks"), SHARINGS)
def test_what_a_rank_keeps_and_sends(leaves, ranks):
    count = leaves // ranks
    plans = [plan_segment(rank * count, (rank + 1) * count, leaves) for rank in range(ranks)]
    for plan in plans:
        assert plan.most_parked <= 2 * math.log2(count)
        if ranks == 1 or count & (count - 1) == 0:
            assert len(plan.nodes) == 1, "no extra byte travels"
    if count & (count - 1) == 0:
        assert {plan.most_parked for plan in plans} == {max(int(math.log2(count)) - 1, 0)}
    nodes = [node for plan in plans for node in plan.nodes]
    assert [node.first for node in nodes] == [0, *(node.end for node in nodes[:-1])]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 12])
def test_the_bits_of_float32_sums_in_the_rows_that_ranks_send(ranks):
    """Leaves of very different sizes: another order of the same twelve numbers gives other bits.

    A parameter without a gradient in a leaf counts as zeros.
    """
    leaves, count = 12, 12 // ranks
    generator = torch.Generator().manual_seed(0)
    values = (
        torch.randn(leaves, 2, 1000, generator=generator) * 10.0 ** torch.arange(leaves).remainder(5)[:, None, None]
    )
    missing = {(0, 1), (3, 0), (7, 1)}  # leaf and parameter
    for leaf, parameter in missing:
        values[leaf, parameter] = 0
    expected = tree_over(list(values), torch.add).flatten()
    assert not torch.equal(expected, sum(values[1:], values[0]).flatten()), "the numbers must tell the orders apart"
    tree = StepTree(ranks, count)
    rows = torch.zeros(ranks, max(tree.rows_sent, 1 + max(one.most_parked for one in tree.segments)), 2000)
    for rank, segment in enumerate(tree.segments):
        sums = LeafSums([*rows[rank]], segment.first, leaves)
        for _step in range(2):
            sums.clear()
            for leaf in range(rank * count, (rank + 1) * count):
                gradients = [None if (leaf, one) in missing else values[leaf, one] for one in range(2)]
                sums.add(rows[rank, 0].split(1000), gradients)
    out = rows[0, 0] if ranks == 1 else torch.empty(2000)
    assert torch.equal(tree.add_ranks(rows, out).view(torch.int32), expected.view(torch.int32))
