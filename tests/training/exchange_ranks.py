"""What arrives of small values, and over which group; run on real ranks."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from zerovision.training.world.collectives import agreed, broadcast_object, gather_objects
from zerovision.training.world.world import World


def exchange_floats(world: World) -> list[Any]:
    """Return what arrives of floats, as hexadecimal digits, from all ranks and from rank 0."""
    own = [0.1 + world.rank, -0.0, 5e-324, 1e308, float("inf"), float("-inf"), float("nan")]
    gathered = gather_objects(own, world)
    broadcast = broadcast_object(own, world)
    return [[value.hex() for value in values] for values in (*gathered, broadcast)]


def groups_of_small_values(world: World) -> list[bool]:
    """Return of every collective of `agreed`, `gather_objects` and `broadcast_object` whether it keeps to gloo."""
    groups = []
    plain = {name: getattr(dist, name) for name in ("all_gather_into_tensor", "broadcast")}

    def noting(name: str) -> Any:
        def call(*tensors: Any, group: dist.ProcessGroup | None = None, **source: int) -> None:
            groups.append(group is world.signal_group and tensors[0].device.type == "cpu")
            plain[name](*tensors, group=group, **source)

        return call

    try:
        for name in plain:
            setattr(dist, name, noting(name))
        agreed(lambda: None, world)
        gather_objects(0.0, world)
        broadcast_object("", world)
    finally:
        for name, function in plain.items():
            setattr(dist, name, function)
    return groups
