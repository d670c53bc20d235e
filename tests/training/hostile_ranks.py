"""What a false rank 1 sends in the place of a message, and what rank 0 makes of it; run on real ranks."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zerovision.training.world import exchange
from zerovision.training.world.collectives import agreed, broadcast_object, gather_objects
from zerovision.training.world.exchange import ForeignMessageError, list_of, number, text
from zerovision.training.world.world import World

KINDS = {
    "no JSON": b"{",
    "no ASCII": "\N{SNOWMAN}".encode(),
    "another type": b"7",
    "deeply nested": b"[" * 100_000,
    "a long number": b"9" * 10_000,
}


class Canary:
    """Creates a file where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def exchange_with_a_false_rank(world: World, kind: str, canary: str) -> str:
    """Agree with the other rank on an error; return what comes of it, '' where it was taken for good."""
    encode = exchange._encode
    if world.rank == 1 and kind == "pickle":
        exchange._encode = lambda _: bytearray(pickle.dumps(Canary(Path(canary))))
    elif world.rank == 1:
        exchange._encode = lambda _: bytearray(KINDS[kind])
    try:
        agreed(lambda: None, world)
    except ForeignMessageError as error:
        return str(error)
    finally:
        exchange._encode = encode
    return ""


def announce_a_length(world: World, length: int) -> str:
    """Let rank 1 announce a message of another length than there is; return rank 0's error."""
    if world.rank == 1:
        lengths = torch.empty(2, dtype=torch.int64)
        dist.all_gather_into_tensor(lengths, torch.tensor([length]), group=world.signal_group)
        return ""
    try:
        gather_objects("", text, world)
    except ForeignMessageError as error:
        return str(error)
    return "taken for good"


def exchange_floats(world: World) -> list[Any]:
    """Return what arrives of floats, as hexadecimal digits, from all ranks and from rank 0."""
    own = [0.1 + world.rank, -0.0, 5e-324, 1e308, float("inf"), float("-inf"), float("nan")]
    gathered = gather_objects(own, list_of(number), world)
    broadcast = broadcast_object(own, list_of(number), world)
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
        gather_objects(0.0, number, world)
        broadcast_object("", text, world)
    finally:
        for name, function in plain.items():
            setattr(dist, name, function)
    return groups
