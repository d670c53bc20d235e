"""Collectives of small values: JSON in tensors, whose form the receiver checks. Nothing received is ever unpickled.

`torch.distributed.all_gather_object` unpickles what the other ranks send, and unpickling can run code: a process that
impersonates a rank could run code on every other machine. Here the worst it can send is a message that is refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from zerovision.training.base.timing import communication

Value = TypeVar("Value")
Parser = Callable[[Any], Value]

LARGEST_BYTES = 16 << 20  # of one message; a receiver allocates no more
CPU = torch.device("cpu")


class ForeignMessageError(Exception):
    """A received message is not of the form that the ranks of a run send."""


def gather(
    value: Any, parse: Parser[Value], group: dist.ProcessGroup | None, device: torch.device = CPU
) -> list[Value]:
    """Return every rank's value, in rank order, on every rank; a collective of the group.

    Args:
        value: of this rank, representable in JSON; floats keep their bits.
        parse: checks and converts a received value; one of the parsers below, or composed of them.
        group: the ranks; None for all.
        device: of the group's messages.

    Raises:
        ForeignMessageError: on every rank, for a message that is too long, not JSON, or not of this form.
    """
    message = _encode(value)
    size = dist.get_world_size(group)
    lengths = torch.empty(size, dtype=torch.int64, device=device)
    with communication():
        dist.all_gather_into_tensor(lengths, torch.tensor([len(message)], device=device), group=group)
    sizes = [_checked_length(length, rank) for rank, length in enumerate(lengths.tolist())]
    own = torch.zeros(max(sizes), dtype=torch.uint8)
    own[: len(message)] = torch.frombuffer(message, dtype=torch.uint8)
    rows = torch.empty(size * max(sizes), dtype=torch.uint8, device=device)
    with communication():
        dist.all_gather_into_tensor(rows, own.to(device), group=group)
    received = rows.view(size, -1).cpu().numpy()
    return [_decode(received[rank, :length].tobytes(), parse, rank) for rank, length in enumerate(sizes)]


def broadcast(value: Any, parse: Parser[Value], group: dist.ProcessGroup | None) -> Value:
    """Return rank 0's value on every rank; the other ranks' are ignored. A collective of a group on CPUs.

    The other arguments and errors are those of `gather`.
    """
    is_first = dist.get_rank(group) == 0
    message = _encode(value if is_first else None)
    length = torch.tensor([len(message)])
    with communication():
        dist.broadcast(length, group=group, group_src=0)
    content = torch.zeros(_checked_length(int(length), 0), dtype=torch.uint8)
    if is_first:
        content.copy_(torch.frombuffer(message, dtype=torch.uint8))
    with communication():
        dist.broadcast(content, group=group, group_src=0)
    return _decode(content.numpy().tobytes(), parse, 0)


def as_received(value: Any, parse: Parser[Value]) -> Value:
    """Return a value as another rank would receive it, tuples as lists; for a single rank."""
    return _decode(bytes(_encode(value)), parse, 0)


def exactly(kind: type[Value]) -> Parser[Value]:
    """Return the parser of values of this type; it raises TypeError for any other, also for a bool if int is wanted."""

    def parse(value: Any) -> Value:
        if type(value) is not kind:
            raise TypeError(f"{kind.__name__} expected, {type(value).__name__} found")
        return value

    return parse


text, whole_number, number, flag = exactly(str), exactly(int), exactly(float), exactly(bool)


def optional(parse: Parser[Value]) -> Parser[Value | None]:
    """Return the parser of a value that may be None."""
    return lambda value: None if value is None else parse(value)


def list_of(parse: Parser[Value]) -> Parser[list[Value]]:
    """Return the parser of a list of any length."""
    return lambda value: [parse(one) for one in exactly(list)(value)]


def row_of(*parsers: Parser[Any]) -> Parser[tuple[Any, ...]]:
    """Return the parser of a list with one value per parser; it raises ValueError for another length."""
    return lambda value: tuple(parse(one) for parse, one in zip(parsers, exactly(list)(value), strict=True))


def _encode(value: Any) -> bytearray:
    message = bytearray(json.dumps(value), "ascii")  # floats as their repr, which restores the same bits
    if len(message) > LARGEST_BYTES:
        raise ValueError(f"a message of {len(message)} bytes to the other ranks: at most {LARGEST_BYTES}")
    return message


def _decode(message: bytes, parse: Parser[Value], rank: int) -> Value:
    try:
        return parse(json.loads(message.decode("ascii")))
    except (TypeError, ValueError, RecursionError) as error:
        raise _foreign(rank, f"{type(error).__name__}, {str(error)[:100]}") from None


def _checked_length(length: int, rank: int) -> int:
    if not 0 < length <= LARGEST_BYTES:
        raise _foreign(rank, f"{length} bytes")
    return length


def _foreign(rank: int, what: str) -> ForeignMessageError:
    return ForeignMessageError(f"rank {rank} sent a message that no rank of this run sends ({what})")
