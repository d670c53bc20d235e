"""Flat buffers that sum gradients over the ranks, and divide weights into one part per rank for the update.

Each bucket of parameters has its own buffers, which are cut into one equal part per rank. CPU ranks on one machine
share memory: a rank reads other ranks' gradients in place, and there is one copy of the weights. Otherwise, collectives
transfer gradients and weights, and a bucket's gradients are sent while backward computes those of other buckets. Either
way, gradients are added along one tree over the leaves of the step (see `zerovision.training.engines.summation_tree`),
so the results are bit-identical on any number of ranks.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist

from zerovision.training.base.run_folder import SHARED_MEMORY
from zerovision.training.base.timing import communication
from zerovision.training.engines.summation_tree import LeafSums, StepTree
from zerovision.training.world.collectives import barrier, broadcast_object, error_on_any_rank
from zerovision.training.world.world import World

LARGEST_SHARE = 0.5  # of the free shared memory, because data loader workers also need some


class FlatBuffers(ABC):
    """The fp32 weights and gradients of one bucket on all ranks, cut into one equal part per rank.

    The parameters are views of `weights`, zeros [n], where n is a multiple of the number of ranks. `rows` are zeros
    [n], one tensor for each sum that this rank sends in the tree. The sum of this rank's part of the gradients is
    stored in `out` [n / ranks].
    """

    are_shared = False  # whether the ranks share one copy of the weights

    def __init__(
        self, weights: torch.Tensor, rows: Sequence[torch.Tensor], out: torch.Tensor, world: World, tree: StepTree
    ) -> None:
        self.weights, self._rows, self._sum, self._world, self._tree = weights, rows, out, world, tree
        segment = tree.segments[world.rank]
        parked = [torch.zeros_like(weights) for _ in range(segment.most_parked + 1 - len(rows))]
        # The sums of the gradients over this rank's leaves; `gradients` is the running sum.
        self.sums, self.gradients = LeafSums([*rows, *parked], segment.first, tree.leaves), rows[0]
        self._part = slice(world.rank * len(out), (world.rank + 1) * len(out))
        self.part = weights[self._part]  # of this rank, [n / ranks]

    def start_sum(self) -> None:
        """Start the sum that `sum_own_part` waits for, once this rank's gradients are final; a collective."""
        return

    @abstractmethod
    def sum_own_part(self) -> torch.Tensor:
        """Return this rank's part of the gradients summed over all leaves, [n / ranks]; a collective.

        The sum is stored in `out`. No rank may write gradients again before all ranks have returned from this call.
        """

    @abstractmethod
    def start_from_main(self) -> None:
        """Copy the weights from rank 0 to all ranks; a collective."""

    def start_gather(self) -> None:
        """Start filling `weights` with every rank's part; a collective."""
        return

    def finish_gather(self) -> None:
        """Wait until `weights` is complete."""
        return


class SharedMemoryBuffers(FlatBuffers):
    """Buffers in memory that all ranks map: for CPU ranks on one machine, or a single rank on any device.

    The caller must wait for the other ranks before it sums or gathers buffers; a single wait covers all buffers.
    `every_row` is zeros [ranks, rows, n], the rows of all ranks; for a single rank, its row is also `out`.
    """

    are_shared = True

    def __init__(
        self, weights: torch.Tensor, every_row: torch.Tensor, out: torch.Tensor, world: World, tree: StepTree
    ) -> None:
        super().__init__(weights, [*every_row[world.rank]], out, world, tree)
        self._every_row = every_row

    def sum_own_part(self) -> torch.Tensor:
        # This also overwrites other ranks' rows, but no other rank reads this part of them.
        return self._tree.add_ranks(self._every_row[:, :, self._part], self._sum)

    def start_from_main(self) -> None:
        barrier(self._world)


class CollectiveBuffers(FlatBuffers):
    """Buffers that NCCL or gloo transfers."""

    _received = torch.zeros(0)
    _works: Sequence[dist.Work | None] = ()  # pending transfers

    def start_sum(self) -> None:
        if self._tree.levels is not None:
            self._received, work = self._tree.levels.start(self._rows[0])
            self._works = [work]
            return
        # If a rank has only one sum to send, this transfer sends half as many bytes as an all-reduce.
        self._received = self.gradients.new_empty(len(self._rows), self._world.size, len(self.part))
        self._works = [
            dist.all_to_all_single(place.view(-1), row, group=self._world.group, async_op=True)
            for place, row in zip(self._received, self._rows, strict=True)
        ]

    def sum_own_part(self) -> torch.Tensor:
        self.finish_gather()
        if self._tree.levels is None:
            return self._tree.add_ranks(self._received.transpose(0, 1), self._sum)
        nodes = [segment.nodes[0] for segment in self._tree.segments]
        self._tree.levels.finish(self._received, nodes.__getitem__, self._tree.leaves, self._sum)
        return self._sum

    def start_from_main(self) -> None:
        dist.broadcast(self.weights, group=self._world.group, group_src=0)

    def start_gather(self) -> None:
        self._works = [dist.all_gather_into_tensor(self.weights, self.part, group=self._world.group, async_op=True)]

    def finish_gather(self) -> None:
        if self._works:
            with communication():
                for work in self._works:
                    work.wait()  # type: ignore[union-attr]  # None only outside a group
            self._works = ()


def make_buffers(size: int, world: World, tree: StepTree, out: torch.Tensor) -> FlatBuffers:
    """Create buffers [size] of the kind that suits the ranks, with zeros [size / ranks] as `out`; a collective."""
    if world.size == 1:
        return SharedMemoryBuffers(torch.zeros_like(out), out.view(1, 1, -1), out, world, tree)
    if world.device.type == "cpu" and world.local_size == world.size:
        memory = _map_shared_memory(size * (world.size * tree.rows_sent + 1), world)
        if memory is not None:
            rows = memory[size:].view(world.size, tree.rows_sent, size)
            return SharedMemoryBuffers(memory[:size], rows, out, world, tree)
    weights, *rows_sent = (torch.zeros(size, device=world.device) for _ in range(1 + tree.rows_sent))
    return CollectiveBuffers(weights, rows_sent, out, world, tree)


def _map_shared_memory(numel: int, world: World) -> torch.Tensor | None:
    """Map zeroed float32 memory [numel] that all ranks share, or return None if there is not enough; a collective."""
    path = SHARED_MEMORY / f"zerovision-{broadcast_object(secrets.token_hex(8), world)}"
    problem, memory = None, None
    try:
        if world.is_main:
            free, size = shutil.disk_usage(SHARED_MEMORY).free, numel * torch.float32.itemsize
            if size > LARGEST_SHARE * free:
                raise OSError(f"{free} bytes free")
            with open(path, "xb", opener=partial(os.open, mode=0o600)) as file:
                # Reserve the memory now: a later write to memory that is not available would end in SIGBUS.
                os.posix_fallocate(file.fileno(), 0, size)
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
            path.unlink(missing_ok=True)  # so that the memory is freed no matter how the ranks end
    return None if problem else memory
