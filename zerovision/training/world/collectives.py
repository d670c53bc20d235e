"""Collectives of tensors, of small values, and of errors."""

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

BROADCAST_BYTES = 32 * 2**20  # of many tensors at a time


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
    """Return every rank's values [n] as [ranks, n] on every rank; a collective."""
    rows = values.new_empty(world.size, values.numel())
    if world.size == 1:
        return rows.copy_(values)
    with communication():
        dist.all_gather_into_tensor(rows.view(-1), values, group=world.group)
    return rows


def mean_over_ranks(values: torch.Tensor, world: World) -> torch.Tensor:
    """Return the elementwise mean of a tensor [n] over all ranks; a collective.

    They are added as fp32 in rank order for any n, whereas an all-reduce would add some elements in another order.
    16-bit values are returned as 16-bit values.
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
    """Replace tensors of one dtype by rank 0's, or another rank's, in place; a collective.

    The tensors may be on the CPU for any device of the ranks. Each broadcast has about 32 MB, or one tensor, so a whole
    model is never copied at once.
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
    """Return the number of ranks per machine, which a flag requires to be equal; a collective.

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
    """Return the error message of the lowest rank that has one, on every rank; a collective."""
    if world.size == 1:
        return error
    messages = gather_objects(error, world, group)
    return next((message for message in messages if message is not None), None)


def agreed(action: Callable[[], Result], world: World) -> Result:
    """Run an action on every rank; if any raises a `UserError`, raise it on all; a collective."""
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
    """Return every rank's small value, in rank order, on every rank; a collective of `world.signal_group` or `group`.

    Values are sent as JSON, so tuples arrive as lists, and floats keep their bits. Nothing received is unpickled, which
    could run code. A value that JSON does not support raises TypeError.
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
    """Return rank 0's small value on every rank; for allowed values, see `gather_objects`; a collective."""
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
