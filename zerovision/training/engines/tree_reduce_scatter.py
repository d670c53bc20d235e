"""Adds gradients within machines, then across machines, with sums that do not depend on the number of ranks.

If every rank sent its own gradients to every other rank, a machine with L ranks would send L times the model's
gradients to the other machines. The ranks of a machine have neighboring leaves, so their sum is one node of the step's
tree, and the machine sends this sum only once.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllocMixin

from zerovision.training.base.leaves import Leaves
from zerovision.training.base.timing import communication
from zerovision.training.engines.summation_tree import TreeNode, add_nodes, plan_segment
from zerovision.training.world.collectives import gather_objects
from zerovision.training.world.world import World, along


class MachineLevels:
    """The ranks on this machine, and the ranks at the same position on other machines.

    All machines must have the same number of ranks.
    """

    def __init__(self, world: World) -> None:
        """Form the groups; a collective."""
        numbers = torch.arange(world.size).view(-1, world.local_size)
        self._here, self._elsewhere = along(1, numbers, world), along(0, numbers, world)

    def start(self, row: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Send each rank on this machine its parts of this rank's gradients [n]; a collective of these ranks.

        A rank's parts are its own part and the parts of the ranks at its position on other machines. Return the
        received tensors and the pending work.
        """
        ranks, machines = self._here.size, self._elsewhere.size
        by_rank = row.view(machines, ranks, -1).transpose(0, 1).contiguous()
        received = torch.empty_like(by_rank)
        group = self._here.group
        return received, dist.all_to_all_single(received.view(-1), by_rank.view(-1), group=group, async_op=True)

    def finish(
        self, received: torch.Tensor, node_of: Callable[[int], TreeNode], leaves: int, out: torch.Tensor
    ) -> list[tuple[TreeNode, torch.Tensor]]:
        """Add this rank's part of the gradients over all ranks, and return the sums as `add_nodes` does; a collective.

        `received`, from `start`, must be complete, and is overwritten. `node_of` returns the tree node of a rank's
        gradients, and `out` [n / ranks] is memory for the root.
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
    """Return the levels for several machines that fit the tree and have several ranks each, or None; a collective."""
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


class TreeReduceScatter(DefaultAllocMixin, ReduceScatter):
    """Adds the gradients of one FSDP2 module along the step's tree; each rank adds its own part.

    After every micro-step, a rank has its part of the neighboring leaves that the ranks of its replica computed. The
    rank adds these leaves up to one node of the tree if the number of ranks is a power of two, and otherwise to a few
    nodes. A rank keeps at most log2(A) + 1 nodes for A micro-steps.

    The ranks of a replica must be neighbors. Without `levels`, each rank sends gradients to every other rank.
    """

    def __init__(self, leaves: Leaves, mesh: DeviceMesh, world: World, levels: MachineLevels | None) -> None:
        self._leaves, self._total, self._levels = leaves, leaves.ranks * leaves.per_rank, levels
        self._first_rank, self._replicas = world.rank // leaves.in_turn * leaves.in_turn, world.size // leaves.in_turn
        self._among_replicas = mesh.get_group("replicas") if self._replicas > 1 else None
        self._sums: list[tuple[TreeNode, torch.Tensor]] = []
        self.leaf = 0  # index of the micro-step whose gradients come next

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Add `input_tensor` [n] of all ranks, and write this rank's part to `output_tensor` [n / ranks]; a collective.

        `output_tensor` does not change before the last micro-step, when it becomes the sum over all micro-steps.
        """
        added = self._add_ranks(input_tensor, output_tensor, group)
        before = self._sums if self.leaf else []
        self._sums = add_nodes([*before, *added], self._total, output_tensor)
        if self.leaf < self._leaves.per_rank - 1:
            own = {id(values) for _, values in before}  # received tensors are freed
            self._sums = [(node, values if id(values) in own else values.clone()) for node, values in self._sums]
            return
        if self._replicas > 1:
            self._add_replicas(output_tensor)
        self._sums = []

    def _node_of(self, rank: int) -> TreeNode:
        """Return the node of the leaf that a rank computed in this micro-step."""
        leaf = self._leaves.number(rank, self.leaf)
        return TreeNode(leaf, leaf + 1)

    def _add_ranks(
        self, gradients: torch.Tensor, out: torch.Tensor, group: dist.ProcessGroup
    ) -> list[tuple[TreeNode, torch.Tensor]]:
        """Add the gradients [n] that a replica's ranks computed in this micro-step; return sums like `add_nodes`."""
        if self._levels is not None:
            received, work = self._levels.start(gradients)
            with communication():
                work.wait()
            return self._levels.finish(received, self._node_of, self._total, out)
        received = gradients.new_empty(self._leaves.in_turn, len(out))
        with communication():
            dist.all_to_all_single(received.view(-1), gradients, group=group)
        nodes = (self._node_of(rank) for rank in range(self._first_rank, self._first_rank + self._leaves.in_turn))
        return add_nodes(zip(nodes, received, strict=True), self._total, out)

    def _add_replicas(self, out: torch.Tensor) -> None:
        """Add the sums of all replicas, each over the replica's own leaves, into `out` [n]; a collective.

        Each replica adds one piece of `out`, so a rank sends at most twice its size, for any number of replicas.
        """
        length = self._total // self._replicas
        nodes = [plan_segment(first, first + length, self._total).nodes for first in range(0, self._total, length)]
        piece = -(-len(out) // self._replicas)
        own = out.new_zeros(max(map(len, nodes)), self._replicas * piece)
        for row, (_, values) in zip(own, self._sums, strict=False):
            row[: len(out)].copy_(values)
        own = own.view(len(own), self._replicas, piece).transpose(0, 1).contiguous()
        received, total, whole = torch.empty_like(own), out.new_empty(piece), out.new_empty(self._replicas * piece)
        with communication():
            dist.all_to_all_single(received.view(-1), own.view(-1), group=self._among_replicas)
        pairs = [zip(of_replica, rows, strict=False) for of_replica, rows in zip(nodes, received, strict=True)]
        add_nodes(chain.from_iterable(pairs), self._total, total)
        with communication():
            dist.all_gather_into_tensor(whole, total, group=self._among_replicas)
        out.copy_(whole[: len(out)])
