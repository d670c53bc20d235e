"""Divides the ranks into a mesh: ranks that share one copy of the model, and ranks that read different images.

Ranks along the last dimension have consecutive numbers, so they are neighbors on the same machine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import cast

import torch
import torch.distributed as dist

from zerovision.training.world.world import COLLECTIVE_TIMEOUT, World


def form_mesh(world: World, mesh: Mapping[str, int]) -> World:
    """Return the world with groups of ranks that share one copy of the model; a collective.

    Args:
        world: the ranks.
        mesh: setting -> number of ranks that share a model in this way. The product of these numbers must divide the
            number of ranks. If all are 1, the world is returned unchanged.
    """
    mesh = {name: size for name, size in mesh.items() if size > 1}
    if not mesh:
        return world
    numbers = torch.arange(world.size).view(-1, *mesh.values())
    data = along(0, numbers, world)
    dimensions = {name: along(dimension, numbers, world) for dimension, name in enumerate(mesh, 1)}
    replica = next(iter(dimensions.values())) if len(mesh) == 1 else along(1, numbers.flatten(1), world)
    return dataclasses.replace(world, mesh={"data": data, "replica": replica, **dimensions})


def along(dimension: int, numbers: torch.Tensor, world: World) -> World:
    """Return this rank's group along one dimension of a tensor that contains all rank numbers; a collective."""
    rows = numbers.movedim(dimension, -1).reshape(-1, numbers.shape[dimension]).tolist()
    own = next(row for row in rows if world.rank in row)
    if len(own) == 1:
        return world.alone()
    signal_group = _own_group(rows, "gloo")
    group = _own_group(rows, "nccl") if world.device.type == "cuda" else signal_group
    first = world.rank - world.local_rank
    here = [rank for rank in own if first <= rank < first + world.local_size]
    return World(
        own.index(world.rank), here.index(world.rank), len(here), len(own), world.device, signal_group, group=group
    )


def _own_group(rows: list[list[int]], backend: str) -> dist.ProcessGroup:
    """Create groups that together contain all ranks, and return this rank's group; a collective."""
    return cast(dist.ProcessGroup, dist.new_subgroups_by_enumeration(rows, COLLECTIVE_TIMEOUT, backend=backend)[0])
