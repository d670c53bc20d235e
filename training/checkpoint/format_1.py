"""Reading checkpoints of format 1, whose files have one flat tensor per parameter group instead of shards.

A group is `weights.<group>` and `<moment>.<group>`, one-dimensional; the metadata maps pieces of it to ranges of
flattened parameters. Elements of a parameter are counted as the usual shape has them, or in the memory order of
channels_last if the metadata names it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from training.parallel.parameter_shards import (
    CHANNELS_LAST,
    CONVOLUTION_DIMENSIONS,
    USUAL_FROM_CHANNELS_LAST,
    boxes,
)


class FlatPlace(NamedTuple):
    """Where a shard is in a group's flat tensor: start, sizes in memory, and whether those are in channels_last."""

    start: int
    sizes: tuple[int, ...]
    is_channels_last: bool

    def read(self, stored: Any) -> torch.Tensor:
        """Return the shard in the usual order of dimensions from a slice of safetensors."""
        shard = stored[self.start : self.start + math.prod(self.sizes)].view(self.sizes)
        return shard.permute(USUAL_FROM_CHANNELS_LAST) if self.is_channels_last else shard


def is_format_1(layout: Mapping[str, Any]) -> bool:
    """Return whether a file's metadata is of format 1."""
    return "groups" in layout


def shards_of_format_1(
    layout: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], group_sizes: Sequence[tuple[int, ...]]
) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...], int, FlatPlace]]:
    """Yield name, offsets, sizes, group and place of the shards in a rank's file.

    Args:
        layout: the file's metadata.
        shapes: of every parameter.
        group_sizes: of the groups' tensors.

    Raises:
        KeyError, TypeError, ValueError: for a piece that is outside of its group or on another.
    """
    channels_last = {*layout.get("channels_last", ())}
    if any(len(shapes[name]) != CONVOLUTION_DIMENSIONS for name in channels_last):
        raise ValueError("a parameter in channels_last is no convolution's")
    for group, pieces in enumerate(layout["groups"]):
        (size,) = group_sizes[group]
        end = 0
        whole_pieces = [(name, offset, start, length) for name, offset, start, length in pieces]
        for name, offset, start, length in sorted(whole_pieces, key=lambda piece: piece[2]):
            if any(type(number) is not int for number in (offset, start, length)):
                raise TypeError(f"a piece of {name} has no whole numbers")
            shape, is_channels_last = shapes[name], name in channels_last
            # Slices beyond the end of a tensor are cut silently, and one element would then fill many.
            if min(offset, length) < 0 or not end <= start <= size - length or offset + length > math.prod(shape):
                raise ValueError(f"a piece of {name} is outside of group {group}, or on another")
            end = start + length
            order = [shape[dimension] for dimension in CHANNELS_LAST] if is_channels_last else shape
            for offsets, sizes in boxes(order, offset, offset + length):
                place = FlatPlace(start, sizes, is_channels_last)
                if is_channels_last:
                    offsets, sizes = (tuple(o[d] for d in USUAL_FROM_CHANNELS_LAST) for o in (offsets, sizes))
                yield name, offsets, sizes, group, place
                start += math.prod(sizes)
