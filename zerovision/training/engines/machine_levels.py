"""Adds the gradients of ranks on several machines at two levels: first within each machine, then across machines.

If every rank sent its own gradients to every other rank, a machine with L ranks would send L times the model's
gradients to the other machines. The ranks of a machine have neighboring leaves, so their sum is one node of the step's
tree, and the machine sends this sum only once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from zerovision.training.base.leaves import Leaves
from zerovision.training.base.timing import communication
from zerovision.training.engines.summation_tree import TreeNode, add_nodes
from zerovision.training.world.collectives import gather_objects
from zerovision.training.world.mesh import along
from zerovision.training.world.world import World


class MachineLevels:
    """The ranks on this machine, and the ranks at the same position on other machines.

    Args:
        world: all ranks, with the same number on each machine.
    """

    def __init__(self, world: World) -> None:
        """Form the groups; a collective."""
        numbers = torch.arange(world.size).view(-1, world.local_size)
        self._here, self._elsewhere = along(1, numbers, world), along(0, numbers, world)

    def start(self, row: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Send each rank on this machine its parts of this rank's gradients [n].

        A rank's parts are its own part and the parts of the ranks at its position on other machines.

        Returns:
            The received tensors, and the pending work.
        """
        ranks, machines = self._here.size, self._elsewhere.size
        by_rank = row.view(machines, ranks, -1).transpose(0, 1).contiguous()
        received = torch.empty_like(by_rank)
        group = self._here.group
        return received, dist.all_to_all_single(received.view(-1), by_rank.view(-1), group=group, async_op=True)

    def finish(
        self, received: torch.Tensor, node_of: Callable[[int], TreeNode], leaves: int, out: torch.Tensor
    ) -> list[tuple[TreeNode, torch.Tensor]]:
        """Add this rank's part of the gradients over all ranks; a collective.

        Args:
            received: the tensors from `start`, once they are complete; overwritten.
            node_of: function that returns the tree node of a rank's gradients.
            leaves: number of leaves of the tree.
            out: memory [n / ranks] for the root of the tree.

        Returns:
            The sums; see `add_nodes`.
        """
        ranks, machines = self._here.size, self._elsewhere.size
        first = self._elsewhere.rank * ranks
        rows = ((node_of(first + place), row.view(-1)) for place, row in enumerate(received))
        [(_, own)] = add_nodes(rows, leaves, out)
        every = torch.empty_like(own).view(machines, -1)
        with communication():
            dist.all_to_all_single(every.view(-1), own, group=self._elsewhere.group)
        ends = ((node_of(one * ranks), node_of((one + 1) * ranks - 1)) for one in range(machines))
        nodes = (TreeNode(begin.first, end.end) for begin, end in ends)
        return add_nodes(zip(nodes, every, strict=True), leaves, out)


def machine_levels(world: World, leaves: Leaves, notes: list[str]) -> MachineLevels | None:
    """Return the levels for several machines; None for one machine, or if the machines do not fit the tree.

    This is a collective.

    Args:
        world: the ranks.
        leaves: the step's leaves.
        notes: notes for the log; a note is added if the machines do not fit the tree.
    """
    if world.size == world.local_size or world.group is not None:
        return None
    sizes = {*gather_objects(world.local_size, world)}
    added = world.local_size * (leaves.per_rank if leaves.in_turn == 1 else 1)
    if sizes == {1}:
        return None
    if len(sizes) == 1 and added.bit_count() == 1:
        return MachineLevels(world)
    notes.append(
        "each rank sends gradients to every other rank; if every machine had the same number of ranks, a power of 2 "
        "(times the accumulation steps, under ddp), a machine would send them once"
    )
    return None
