"""The mean over ranks of tensors that cross the links in fewer bits than they have.

What rounding takes from a rank's values is returned to it, to be added to its next ones: error feedback (Seide et al.
2014; Karimireddy et al. 2019, https://arxiv.org/abs/1901.09847), with which it is late, not lost.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist

from zerovision.training.base.timing import communication
from zerovision.training.engines.norms import BLOCK
from zerovision.training.world.collectives import gather_rows
from zerovision.training.world.world import World

LARGEST_CODE = 127  # of int8; -128 is not used


class Encoding(NamedTuple):
    """From fp32 [n, BLOCK] to bytes, uint8 [n, bytes of a block], and back."""

    pack: Callable[[torch.Tensor], torch.Tensor]
    unpack: Callable[[torch.Tensor], torch.Tensor]


def _pack_bf16(values: torch.Tensor) -> torch.Tensor:
    return values.bfloat16().view(torch.uint8)


def _unpack_bf16(packed: torch.Tensor) -> torch.Tensor:
    return packed.view(torch.bfloat16).float()


def _pack_int8(values: torch.Tensor) -> torch.Tensor:
    """Return the codes of each block, and after them its step: a 127th of its largest value."""
    steps = values.abs().amax(1, keepdim=True) / LARGEST_CODE
    codes = (values / torch.where(steps > 0, steps, 1.0)).round().clamp(-LARGEST_CODE, LARGEST_CODE)
    return torch.cat([codes.to(torch.int8).view(torch.uint8), steps.view(torch.uint8)], 1)


def _unpack_int8(packed: torch.Tensor) -> torch.Tensor:
    steps = packed[:, BLOCK:].contiguous().view(torch.float32)
    return packed[:, :BLOCK].view(torch.int8).float() * steps


ENCODINGS = {"bf16": Encoding(_pack_bf16, _unpack_bf16), "int8": Encoding(_pack_int8, _unpack_int8)}


def compressed_mean(blocks: torch.Tensor, precision: str, world: World) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Return the mean of fp32 blocks [n, BLOCK] over all ranks, in bf16's values; a collective.

    Every rank adds a part of the blocks up, in the order of the ranks, and sends its mean in bf16: int8 would round it
    to nothing where a block has larger values beside it, and no rank could make up for that.

    Args:
        blocks: of this rank.
        precision: in which they travel, a key of `ENCODINGS`.
        world: the ranks.

    Returns:
        The mean, what the blocks have more than was sent of them, and the bytes that this rank sent.
    """
    if world.size == 1:
        return blocks, torch.zeros_like(blocks), 0
    pack, unpack = ENCODINGS[precision]
    packed = pack(blocks)
    part = -(-len(blocks) // world.size)
    padded = torch.nn.functional.pad(packed, (0, 0, 0, part * world.size - len(blocks)))
    received = torch.empty_like(padded)
    with communication():
        dist.all_to_all_single(received, padded, group=world.group)
    total = torch.zeros(part, BLOCK, device=blocks.device)
    for own in received.split(part):
        total += unpack(own)
    mean = _pack_bf16(total.div_(world.size)).reshape(-1)
    rows = gather_rows(mean, world).view(-1, mean.numel() // part)
    sent_bytes = (world.size - 1) * (padded.nbytes // world.size + mean.nbytes)
    return _unpack_bf16(rows)[: len(blocks)], blocks - unpack(packed), sent_bytes
