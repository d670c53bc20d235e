"""Flat buffers across ranks: sums of gradients, and weights, of which each rank updates one part.

Each bucket of parameters has one, cut into one equal part per rank. CPU ranks on one machine share memory: a rank reads
the others' gradients in place, and there is one copy of the weights. Otherwise collectives transfer both, gradients
while backward computes those of other buckets. Both kinds add along one tree over the leaves of the step, see
`zerovision.training.engines.summation_tree`, so the results are bit-identical on any number of ranks.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from typing import Protocol

import torch
import torch.distributed as dist

from zerovision.training.base.places import SHARED_MEMORY
from zerovision.training.base.timing import communication
from zerovision.training.engines.summation_tree import LeafSums, StepTree
from zerovision.training.world.collectives import barrier, broadcast_object, error_on_any_rank
from zerovision.training.world.world import World

LARGEST_SHARE = 0.5  # of its free space: the data loaders' workers need some too
BYTES = 4  # of a float32


class FlatBuffers(Protocol):
    """Weights and gradients of one bucket on all ranks: fp32, cut into one equal part per rank.

    Attributes:
        are_shared: whether the ranks share one copy of the weights.
        weights: [n]; the parameters are views of it.
        gradients: [n], the running sum of `sums`.
        sums: sums of the gradients over this rank's leaves.
        part: this rank's part of the weights, [n / ranks].
    """

    are_shared: bool
    weights: torch.Tensor
    gradients: torch.Tensor
    sums: LeafSums
    part: torch.Tensor

    def start_sum(self) -> None:
        """Start the sum that `sum_own_part` waits for, once the gradients of this rank's leaves are final.

        This is a collective.
        """

    def sum_own_part(self) -> torch.Tensor:
        """Return this rank's part of the gradients summed over all leaves, [n / ranks]; a collective.

        The sum is in the memory that was given for it. No rank may write gradients again before all have returned from
        this call.
        """

    def start_from_main(self) -> None:
        """Copy the weights that rank 0 wrote to all ranks; a collective."""

    def start_gather(self) -> None:
        """Start to fill `weights` with every rank's part; a collective."""

    def finish_gather(self) -> None:
        """Wait until `weights` are complete."""


class SharedMemoryBuffers(FlatBuffers):
    """Buffers in memory that all ranks map: for CPU ranks on one machine, or a single rank on any device.

    Args:
        weights: [n], zeros; n is a multiple of the number of ranks.
        shared_rows: [ranks, rows, n], zeros; a rank has as many rows of gradients as it sends in the tree.
        out: [n / ranks], for the sum of this rank's part; for a single rank, its row.
        world: the ranks.
        tree: the step's tree.
        synchronizes: whether summing and gathering wait for the other ranks. All buckets are summed, and gathered, in
            direct succession, so it is enough that the first one waits.
    """

    are_shared = True

    def __init__(
        self,
        weights: torch.Tensor,
        shared_rows: torch.Tensor,
        out: torch.Tensor,
        world: World,
        tree: StepTree,
        *,
        synchronizes: bool,
    ) -> None:
        self._world, self._tree, self._synchronizes = world, tree, synchronizes
        self.weights, self._shared_rows, self._sum = weights, shared_rows, out
        self.sums, self.gradients = _leaf_sums([*shared_rows[world.rank]], world, tree)
        self._part = _part(len(weights), world)
        self.part = weights[self._part]

    def start_sum(self) -> None: ...

    def sum_own_part(self) -> torch.Tensor:
        if self._synchronizes:
            barrier(self._world)
        # The other ranks' rows are written to as well: no other rank reads this part of them.
        return self._tree.add_ranks(self._shared_rows[:, :, self._part], self._sum)

    def start_from_main(self) -> None:
        barrier(self._world)

    def start_gather(self) -> None:
        if self._synchronizes:
            barrier(self._world)

    def finish_gather(self) -> None: ...


class CollectiveBuffers(FlatBuffers):
    """Buffers that NCCL or gloo transfers.

    Args:
        size: n, a multiple of the number of ranks.
        world: the ranks.
        tree: the step's tree.
        out: [n / ranks], for the sum of this rank's part.
    """

    are_shared = False

    def __init__(self, size: int, world: World, tree: StepTree, out: torch.Tensor) -> None:
        self._world, self._tree, self._sum = world, tree, out
        self.weights = torch.zeros(size, device=world.device)
        self._rows = [torch.zeros(size, device=world.device) for _ in range(tree.rows_sent)]
        self.sums, self.gradients = _leaf_sums(self._rows, world, tree)
        self._part = _part(size, world)
        self.part = self.weights[self._part]
        self._received = torch.zeros(0)
        self._works: list[dist.Work | None] = []  # under way

    def start_sum(self) -> None:
        if self._tree.levels is not None:
            self._received, work = self._tree.levels.start(self._rows[0])
            self._works = [work]
            return
        # Half of the bytes of an all-reduce, if a rank has one sum to send.
        self._received = self.gradients.new_empty(len(self._rows), self._world.size, len(self.part))
        self._works = [
            dist.all_to_all_single(place.view(-1), row, group=self._world.group, async_op=True)
            for place, row in zip(self._received, self._rows, strict=True)
        ]

    def sum_own_part(self) -> torch.Tensor:
        self._wait()
        if self._tree.levels is not None:
            nodes = [segment.nodes[0] for segment in self._tree.segments]
            self._tree.levels.finish(self._received, nodes.__getitem__, self._tree.leaves, self._sum)
            return self._sum
        return self._tree.add_ranks(self._received.transpose(0, 1), self._sum)

    def start_from_main(self) -> None:
        dist.broadcast(self.weights, group=self._world.group, group_src=0)

    def start_gather(self) -> None:
        self._works = [dist.all_gather_into_tensor(self.weights, self.part, group=self._world.group, async_op=True)]

    def finish_gather(self) -> None:
        self._wait()

    def _wait(self) -> None:
        if not self._works:
            return
        with communication():
            for work in self._works:
                work.wait()  # type: ignore[union-attr]  # None outside a group only
        self._works = []


def make_buffers(size: int, world: World, tree: StepTree, out: torch.Tensor, *, is_first: bool) -> FlatBuffers:
    """Create the buffers of one bucket in the right kind for the ranks; a collective.

    Args:
        size: n, a multiple of the number of ranks.
        world: the ranks.
        tree: the step's tree.
        out: zeros [n / ranks], for the sum of this rank's part of the gradients.
        is_first: whether the bucket is summed and gathered first, directly before the others.
    """
    if world.size == 1:
        return SharedMemoryBuffers(torch.zeros_like(out), out.view(1, 1, -1), out, world, tree, synchronizes=False)
    if world.device.type == "cpu" and world.local_size == world.size:
        memory = _map_shared_memory(size * (world.size * tree.rows_sent + 1), world)
        if memory is not None:
            rows = memory[size:].view(world.size, tree.rows_sent, size)
            return SharedMemoryBuffers(memory[:size], rows, out, world, tree, synchronizes=is_first)
    return CollectiveBuffers(size, world, tree, out)


def _leaf_sums(rows: list[torch.Tensor], world: World, tree: StepTree) -> tuple[LeafSums, torch.Tensor]:
    """Return a rank's sums, in the rows [n] that it sends and additional rows, and the running sum."""
    segment = tree.segments[world.rank]
    rows = rows + [torch.zeros_like(rows[0]) for _ in range(segment.most_parked + 1 - len(rows))]
    return LeafSums(rows, segment.first, tree.leaves), rows[0]


def _part(size: int, world: World) -> slice:
    length = size // world.size
    return slice(world.rank * length, (world.rank + 1) * length)


def _map_shared_memory(numel: int, world: World) -> torch.Tensor | None:
    """Map zeroed memory, float32 [numel], that all ranks share; None if there is not enough. This is a collective.

    The file is unlinked before this returns, so the memory is freed however the ranks end.
    """
    path = SHARED_MEMORY / f"zerovision-{broadcast_object(secrets.token_hex(8), world)}"

    def create() -> None:
        free = shutil.disk_usage(SHARED_MEMORY).free
        if numel * BYTES > LARGEST_SHARE * free:
            raise OSError(f"{free} bytes free")
        descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            # Reserved now: a write to memory that is not available later would end in SIGBUS.
            os.posix_fallocate(descriptor, 0, numel * BYTES)
        finally:
            os.close(descriptor)

    problem, memory = None, None
    try:
        if world.is_main:
            create()
    except OSError as error:
        problem = str(error)
    problem = error_on_any_rank(problem, world)
    try:
        if problem is None:
            memory = torch.from_file(str(path), shared=True, size=numel, dtype=torch.float32)
    except RuntimeError as error:
        problem = str(error)
    problem = error_on_any_rank(problem, world)
    if world.is_main:
        with contextlib.suppress(OSError):  # nothing to remove on a read-only file system
            path.unlink(missing_ok=True)
    return None if problem else memory
