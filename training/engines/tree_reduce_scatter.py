"""FSDP2's reduce-scatter with sums that do not depend on the number of ranks."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllocMixin

from training.base.timing import communication
from training.engines.summation_tree import LeafSums, StepTree, TreeNode, add_nodes, add_ranks, plan_segment
from training.world.world import World


class TreeReduceScatter(DefaultAllocMixin, ReduceScatter):
    """Adds the gradients of one FSDP2 module along the step's tree: over this rank's leaves, then over the ranks.

    Attributes:
        leaf: number of this rank's leaf whose gradients come next.

    Args:
        tree: of the step.
        mesh: of the shards, or of replicas and shards.
        world: the ranks; those of a replica are neighbours.
    """

    def __init__(self, tree: StepTree, mesh: DeviceMesh, world: World) -> None:
        self._tree, self._segment = tree, tree.segments[world.rank]
        self._shards = mesh["shards"].size()
        self._replica, self._replicas = world.rank // self._shards, world.size // self._shards
        self._among_replicas = mesh.get_group("replicas") if self._replicas > 1 else None
        self._sums = LeafSums([], [])
        self._rows: list[torch.Tensor] = []
        self.leaf = 0

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Set `output_tensor` [n / shards] to its part of the sum of all ranks' `input_tensor` [n]; a collective.

        Before this rank's last leaf of a step it is left as it is, and no message is sent.
        """
        rows = self._add(input_tensor)
        if self.leaf < len(self._segment.additions) - 1:
            return
        received = input_tensor.new_empty(len(rows), self._shards, len(output_tensor))
        with communication():
            for place, row in zip(received, rows, strict=True):
                dist.all_to_all_single(place.view(-1), row, group=group)
        segments = self._tree.segments[self._replica * self._shards :][: self._shards]
        left = add_ranks(received.transpose(0, 1), segments, self._tree.leaves, output_tensor)
        if self._replicas > 1:
            self._add_replicas(left, output_tensor)

    def _add(self, gradients: torch.Tensor) -> list[torch.Tensor]:
        """Add a leaf's gradients [n]; return the rows to be sent."""
        if len(self._segment.additions) == 1:
            return [gradients]
        rows = max(self._tree.rows_sent, self._segment.most_parked + 1)
        if not self._rows or len(self._rows[0]) != len(gradients):  # other parameters are trained now
            self._rows = [torch.zeros_like(gradients) for _ in range(rows)]
            self._sums = LeafSums(self._rows, self._segment.additions)
        if self.leaf == 0:
            self._sums.clear()
        self._sums.add([self._rows[0]], [gradients])
        return self._rows[: self._tree.rows_sent]

    def _add_replicas(self, sums: list[tuple[TreeNode, torch.Tensor]], out: torch.Tensor) -> None:
        """Add the sums of all replicas, each of which has those of its own leaves, into `out` [n]; a collective."""
        leaves, length = self._tree.leaves, self._tree.leaves // self._replicas
        nodes = [plan_segment(first, first + length, leaves).nodes for first in range(0, leaves, length)]
        own = out.new_zeros(max(map(len, nodes)), len(out))
        for row, (_, values) in zip(own, sums, strict=False):
            row.copy_(values)
        every = out.new_empty(self._replicas, *own.shape)
        with communication():
            dist.all_gather_into_tensor(every.view(-1), own.view(-1), group=self._among_replicas)
        pairs = [zip(of_replica, rows, strict=False) for of_replica, rows in zip(nodes, every, strict=True)]
        add_nodes(chain.from_iterable(pairs), leaves, out)
