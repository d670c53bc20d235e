"""What the tests of a mesh run on each rank."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from training.base.errors import UserError
from training.world.collectives import (
    barrier,
    broadcast_object,
    copy_from_main,
    gather_objects,
    gather_rows,
    largest_over_ranks,
    sum_over_ranks,
)
from training.world.exchange import whole_number
from training.world.mesh import form_mesh
from training.world.world import World


def neighbours(world: World, tensor: int, pipeline: int, per_machine: int = 0) -> dict[str, Any]:
    """Return the rank's group along each dimension by what every collective of it says; or the error of the mesh."""
    try:
        mesh = form_mesh(dataclasses.replace(world, local_size=per_machine or world.local_size), tensor, pipeline)
    except UserError as error:
        return {"error": str(error)}
    found: dict[str, Any] = {"text": mesh.describe()}
    for name, group in (("data", mesh.data), ("pipeline", mesh.pipeline), ("tensor", mesh.tensor)):
        own, mains = torch.tensor([float(world.rank)]), torch.tensor([float(world.rank)])
        barrier(group)
        copy_from_main([mains], group)
        found[name] = {
            "place": [group.rank, group.size],
            "local": [group.local_rank, group.local_size],
            "rows": gather_rows(own, group)[:, 0].tolist(),
            "objects": gather_objects(world.rank, whole_number, group),
            "sum and largest": [sum_over_ranks(own, group).item(), largest_over_ranks(own, group).item()],
            "of main": [mains.item(), broadcast_object(world.rank, whole_number, group)],
        }
    return found
