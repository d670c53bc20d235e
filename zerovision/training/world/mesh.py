"""Division of the ranks into a mesh: which compute the same layers, which consecutive ones, which read other images.

The rank at (data, pipeline, tensor) is number (data * pipelines + pipeline) * tensors + tensor. Ranks of a tensor group
are neighbours, because they exchange activations in every layer, and those of a pipeline are as near as that allows.
"""

from __future__ import annotations

import dataclasses
from typing import cast

import torch
import torch.distributed as dist

from zerovision.training.base.errors import UserError
from zerovision.training.world.collectives import agreed
from zerovision.training.world.mesh_sizes import data_ranks
from zerovision.training.world.world import COLLECTIVE_TIMEOUT, Mesh, World


def form_mesh(world: World, tensor: int, pipeline: int = 1) -> World:
    """Return the world with groups of `tensor` ranks in `pipeline` stages; as it is if both are 1. A collective.

    Args:
        world: the ranks.
        tensor: ranks that share the arithmetic of every layer.
        pipeline: ranks that have consecutive layers.

    Raises:
        UserError: on all ranks, if the ranks cannot be divided so.
    """
    if tensor * pipeline == 1:
        return world
    agreed(lambda: _check(world, tensor, pipeline), world)
    numbers = torch.arange(world.size).view(-1, pipeline, tensor)
    return dataclasses.replace(world, mesh=Mesh(*(along(dimension, numbers, world) for dimension in range(3))))


def _check(world: World, tensor: int, pipeline: int) -> None:
    data_ranks(world.size, tensor, pipeline)
    if world.local_size % tensor:
        raise UserError(
            f"--tensor-parallel {tensor}: its ranks exchange activations in every layer and must be on one machine, "
            f"where {world.local_size} rank(s) are: start a multiple of {tensor} on each."
        )


def along(dimension: int, numbers: torch.Tensor, world: World) -> World:
    """Return this rank's group along a dimension of the ranks' numbers [data, pipeline, tensor]; a collective."""
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
    """Return this rank's group of several that have all ranks; a collective."""
    return cast(dist.ProcessGroup, dist.new_subgroups_by_enumeration(rows, COLLECTIVE_TIMEOUT, backend=backend)[0])
