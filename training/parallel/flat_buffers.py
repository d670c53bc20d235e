"""Flat buffers that ranks exchange: sums of gradients, and weights of which each rank has updated a part.

A buffer is cut into one equal part per rank. CPU ranks of one machine share memory: a rank reads the others' gradients
where they lie, and the weights are one copy for all. Elsewhere collectives carry them. Both add in the order of the
ranks, so the way makes no difference to a bit.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from training.observe.timing import communication
from training.parallel.collectives import barrier, broadcast_object, error_on_any_rank
from training.parallel.exchange import text
from training.parallel.world import World

SHARED_MEMORY = Path("/dev/shm")
LARGEST_SHARE = 0.5  # of what is free there: the data loaders' workers need some too
BYTES = 4  # of a float32


class FlatBuffers(Protocol):
    """Weights and gradients of one parameter group on all ranks: fp32, cut into one equal part per rank.

    Attributes:
        weights: [n], of which the parameters are views.
        gradients: [n], to which this rank's backward adds.
        part: this rank's part of the weights, [n / ranks].
    """

    weights: torch.Tensor
    gradients: torch.Tensor
    part: torch.Tensor

    def sum_own_part(self) -> torch.Tensor:
        """Return this rank's part of the gradients summed over all ranks, [n / ranks]; a collective.

        The same memory each time. The caller sees to it that no rank writes gradients again before all have returned.
        """

    def start_from_main(self) -> None:
        """Bring the weights that rank 0 has written to all ranks; a collective."""

    def gather_weights(self) -> None:
        """Fill `weights` with every rank's part; a collective."""

    def release_weights(self) -> None:
        """Give back the memory of the other ranks' parts, if they take any."""


class OneRankBuffers:
    """A world of one: nothing to exchange."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.weights = torch.zeros(size, device=device)
        self.gradients = torch.zeros(size, device=device)
        self.part = self.weights

    def sum_own_part(self) -> torch.Tensor:
        """Return the gradients."""
        return self.gradients

    def start_from_main(self) -> None:
        """They are here."""

    def gather_weights(self) -> None:
        """All weights are here."""

    def release_weights(self) -> None:
        """There are no others' parts."""


class SharedMemoryBuffers:
    """Buffers of CPU ranks on one machine, in memory that all of them map.

    Args:
        size: n, a multiple of the number of ranks.
        world: the ranks.
        memory: what all ranks map, float32 [n x (ranks + 1)].
        meets: whether summing and gathering wait for the other ranks. All groups are summed, and gathered, one right
            after the other, so the first group's wait serves all.
    """

    def __init__(self, size: int, world: World, memory: torch.Tensor, *, meets: bool) -> None:
        self._world, self._meets = world, meets
        self.weights = memory[:size]
        self._all_gradients = memory[size:].view(world.size, size)
        self.gradients = self._all_gradients[world.rank]
        self._part = _part(size, world)
        self.part = self.weights[self._part]
        self._sum = torch.zeros_like(self.part)

    def sum_own_part(self) -> torch.Tensor:
        """Read the others' gradients where they lie."""
        if self._meets:
            barrier(self._world)
        return _sum_rows(self._all_gradients[:, self._part], self._sum)

    def start_from_main(self) -> None:
        """Wait until rank 0 has written."""
        barrier(self._world)

    def gather_weights(self) -> None:
        """Wait until all ranks have written: there is one copy for all."""
        if self._meets:
            barrier(self._world)

    def release_weights(self) -> None:
        """There is one copy for all."""


class CollectiveBuffers:
    """Buffers that NCCL or gloo carries.

    Args:
        size: n, a multiple of the number of ranks.
        world: the ranks.
        releasable: whether this rank's part of the weights lies apart, so that the others' can be given back.
    """

    def __init__(self, size: int, world: World, *, releasable: bool) -> None:
        self._world = world
        self.weights = torch.zeros(size, device=world.device)
        self.gradients = torch.zeros(size, device=world.device)
        self._part = _part(size, world)
        self._releasable = releasable
        self.part = self.weights[self._part].clone() if releasable else self.weights[self._part]
        self._sum = torch.zeros_like(self.part)

    def sum_own_part(self) -> torch.Tensor:
        """Send each rank its part: half of what an all-reduce moves."""
        received = torch.empty_like(self.gradients)
        with communication():
            dist.all_to_all_single(received, self.gradients)
        return _sum_rows(received.view(self._world.size, -1), self._sum)

    def start_from_main(self) -> None:
        """Broadcast rank 0's."""
        dist.broadcast(self.weights, 0)
        self.part.copy_(self.weights[self._part])

    def gather_weights(self) -> None:
        """Gather the parts, in place where they lie in the whole."""
        storage = self.weights.untyped_storage()
        if self._releasable:
            storage.resize_(self.weights.numel() * BYTES)
        if self._world.device.type == "cuda":
            with communication():
                dist.all_gather_into_tensor(self.weights, self.part)
            return
        if self._releasable:
            self.weights[self._part].copy_(self.part)
        # On gloo, broadcasts of the parts take 2.8 ms where an all-gather of 6 MB takes 4.7.
        with communication():
            for rank, part in enumerate(self.weights.view(self._world.size, -1)):
                dist.broadcast(part, rank)

    def release_weights(self) -> None:
        """Keep this rank's part alone."""
        if self._releasable:
            self.weights.untyped_storage().resize_(0)


def make_buffers(size: int, world: World, *, is_first: bool, releasable: bool) -> FlatBuffers:
    """Make the buffers of one parameter group as they suit the ranks; a collective.

    Args:
        size: n, a multiple of the number of ranks.
        world: the ranks.
        is_first: whether the group is summed and gathered before the others, which follow at once.
        releasable: whether the others' parts of the weights should take no memory between the steps.
    """
    if world.size == 1:
        return OneRankBuffers(size, world.device)
    if world.device.type == "cpu" and world.local_size == world.size:
        memory = _map_shared_memory(size * (world.size + 1), world)
        if memory is not None:
            return SharedMemoryBuffers(size, world, memory, meets=is_first)
    return CollectiveBuffers(size, world, releasable=releasable)


def _sum_rows(rows: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """Add the rows [ranks, k] in their order into `out` [k]; `torch.sum` may take another order."""
    torch.add(rows[0], rows[1], out=out)
    for row in rows[2:]:
        out.add_(row)
    return out


def _drawn_name(value: Any) -> str:
    if not re.fullmatch(r"[0-9a-f]{16}", text(value)):
        raise ValueError("no drawn name")
    return value


def _part(size: int, world: World) -> slice:
    length = size // world.size
    return slice(world.rank * length, (world.rank + 1) * length)


def _map_shared_memory(numel: int, world: World) -> torch.Tensor | None:
    """Map zeroed memory, float32 [numel], that all ranks share; None where there is not enough. A collective.

    The file's name is gone before this returns: however the ranks end, the memory ends with them.
    """
    # A name drawn by rank 0 and never a path: a false rank 0 could have the others write into any file of the user's.
    drawn = broadcast_object(secrets.token_hex(8), _drawn_name, world)
    path, problem = SHARED_MEMORY / f"zerovision-{drawn}", None
    if world.is_main:
        try:
            free = shutil.disk_usage(SHARED_MEMORY).free
            if numel * BYTES > LARGEST_SHARE * free:
                raise OSError(f"{free} bytes free")
            descriptor = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
            try:
                # Reserved now: writing to memory that is not there later on would end in SIGBUS.
                os.posix_fallocate(descriptor, 0, numel * BYTES)
            finally:
                os.close(descriptor)
        except OSError as error:
            problem = str(error)
    problem = error_on_any_rank(problem, world)
    memory = None
    if problem is None:
        try:
            memory = torch.from_file(str(path), shared=True, size=numel, dtype=torch.float32)
        except RuntimeError as error:
            problem = str(error)
    problem = error_on_any_rank(problem, world)
    if world.is_main:
        with contextlib.suppress(OSError):  # on a read-only file system there is nothing to remove
            path.unlink(missing_ok=True)
    return None if problem else memory
