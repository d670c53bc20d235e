"""Collectives for tensors, small values and errors."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from zerovision.training.base.errors import AgreedError, UserError
from zerovision.training.base.timing import communication
from zerovision.training.world.world import World

Result = TypeVar("Result")

BROADCAST_BYTES = 32 * 2**20  # size of a broadcast that combines several tensors


def barrier(world: World) -> None:
    """Wait for all ranks; a collective."""
    if world.size > 1:
        with communication():
            dist.barrier(group=world.group)


def sum_over_ranks(values: torch.Tensor, world: World) -> torch.Tensor:
    """Return the elementwise sum of a tensor over all ranks; a collective."""
    return _reduced(values, world, dist.ReduceOp.SUM)


def largest_over_ranks(values: torch.Tensor, world: World) -> torch.Tensor:
    """Return the elementwise maximum of a tensor over all ranks; a collective."""
    return _reduced(values, world, dist.ReduceOp.MAX)


def _reduced(values: torch.Tensor, world: World, operation: dist.ReduceOp.RedOpType) -> torch.Tensor:
    result = values.clone()
    if world.size > 1:
        with communication():
            dist.all_reduce(result, operation, group=world.group)
    return result


def gather_rows(values: torch.Tensor, world: World) -> torch.Tensor:
    """Gather every rank's values [n] into a tensor [ranks, n] on every rank; a collective."""
    rows = values.new_empty(world.size, values.numel())
    if world.size == 1:
        return rows.copy_(values)
    with communication():
        dist.all_gather_into_tensor(rows.view(-1), values, group=world.group)
    return rows


def mean_over_ranks(values: torch.Tensor, world: World) -> torch.Tensor:
    """Return the elementwise mean of a tensor [n] over all ranks; a collective.

    Values are added in fp32 and in rank order for any n, whereas an all-reduce would add some elements in a different
    order. The mean has the dtype of `values`.
    """
    if world.size == 1:
        return values
    part = -(-len(values) // world.size)
    padded = torch.nn.functional.pad(values, (0, part * world.size - len(values)))
    rows, result = values.new_empty(world.size, part), torch.empty_like(padded)
    with communication():
        dist.all_to_all_single(rows.view(-1), padded, group=world.group)
    mean = rows[0].float()
    for row in rows[1:]:
        mean += row
    with communication():
        dist.all_gather_into_tensor(result, mean.div_(world.size).to(values.dtype), group=world.group)
    return result[: len(values)]


def copy_from_main(tensors: list[torch.Tensor], world: World, source: int = 0) -> None:
    """Overwrite tensors of one dtype with those of rank 0, or of the rank `source`; a collective.

    The tensors may be on the CPU even if the ranks use GPUs. Each broadcast sends about 32 MB, or one larger tensor, so
    a whole model is never copied into one buffer.
    """
    if world.size == 1:
        return
    ends = itertools.accumulate(tensor.nbytes for tensor in tensors)
    for _, places in itertools.groupby(zip(ends, tensors, strict=True), lambda place: place[0] // BROADCAST_BYTES):
        together = [tensor.detach() for _, tensor in places]
        flat = torch.cat([tensor.reshape(-1) for tensor in together]).to(world.device)
        with communication():
            dist.broadcast(flat, group=world.group, group_src=source)
        for tensor, part in zip(together, flat.split([tensor.numel() for tensor in together]), strict=True):
            tensor.copy_(part.view_as(tensor))


def ranks_per_machine(world: World, flag: str = "--replicate-across nodes") -> int:
    """Return the number of ranks per machine, which the given flag requires to be equal; a collective.

    Raises:
        UserError: on all ranks, if machines have different numbers of ranks.
    """
    sizes = {*gather_objects(world.local_size, world)}
    if len(sizes) > 1:
        raise AgreedError(
            f"{flag}: the machines have {' and '.join(map(str, sorted(sizes)))} ranks: start the same number on each."
        )
    return world.local_size


def error_on_any_rank(error: str | None, world: World, group: dist.ProcessGroup | None = None) -> str | None:
    """Return, on every rank, the error message of the lowest rank that has an error; a collective."""
    return next((message for message in gather_objects(error, world, group) if message is not None), None)


def agreed(action: Callable[[], Result], world: World) -> Result:
    """Run an action on every rank, and if any rank raises a `UserError`, raise it on all ranks; a collective."""
    message = None
    result: Any = None
    try:
        result = action()
    except UserError as error:
        message = str(error)
    message = error_on_any_rank(message, world)
    if message is not None:
        raise AgreedError(message)
    return result


def gather_objects(value: Any, world: World, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the small values of all ranks, in rank order; a collective over `group` (default: `world.signal_group`).

    Values are sent as JSON, so tuples arrive as lists, and floats keep every bit. Received data is never unpickled,
    because that could run arbitrary code. A value that JSON does not support raises a TypeError.
    """
    message = _encode(value)
    if world.size == 1:
        return [_decode(message)]
    group = group or world.signal_group
    size = dist.get_world_size(group)
    lengths = torch.empty(size, dtype=torch.int64)
    with communication():
        dist.all_gather_into_tensor(lengths, torch.tensor([len(message)]), group=group)
    longest = int(lengths.max())
    rows = torch.empty(size * longest, dtype=torch.uint8)
    with communication():
        dist.all_gather_into_tensor(rows, torch.nn.functional.pad(message, (0, longest - len(message))), group=group)
    return [_decode(row[:length]) for row, length in zip(rows.view(size, -1), lengths.tolist(), strict=True)]


def broadcast_object(value: Any, world: World) -> Any:
    """Return rank 0's small value on every rank; see `gather_objects` for allowed values; a collective."""
    message = _encode(value)
    if world.size > 1:
        length = torch.tensor([len(message)])
        with communication():
            dist.broadcast(length, group=world.signal_group, group_src=0)
        message = message if world.is_main else torch.empty(int(length), dtype=torch.uint8)
        with communication():
            dist.broadcast(message, group=world.signal_group, group_src=0)
    return _decode(message)


def _encode(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(json.dumps(value), "ascii"), dtype=torch.uint8)


def _decode(message: torch.Tensor) -> Any:
    return json.loads(message.numpy().tobytes())
