"""A rank's part of parameters that several ranks divide, and where it lies in the whole ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from zerovision.training.engines.parameter_shards import WEIGHTS, ParameterShard
from zerovision.training.world.collectives import copy_from_main, gather_rows
from zerovision.training.world.world import World


@dataclass(frozen=True)
class Cut:
    """A rank's part of a parameter: pieces of it along one dimension, one after another.

    Attributes:
        shape: of the whole parameter.
        dimension: that is cut.
        pieces: first index and length of each piece along it.
    """

    shape: tuple[int, ...]
    dimension: int
    pieces: tuple[tuple[int, int], ...]

    def take(self, whole: torch.Tensor) -> torch.Tensor:
        """Return a copy of the part of a whole parameter."""
        return torch.cat([whole.narrow(self.dimension, *piece) for piece in self.pieces], self.dimension)

    def boxes(self, shard: ParameterShard) -> Iterator[ParameterShard]:
        """Yield a shard of the part as shards of the whole parameter: one in each piece that it lies in."""
        low = shard.offsets[self.dimension]
        high, start = low + shard.tensors[WEIGHTS].shape[self.dimension], 0
        for first, length in self.pieces:
            begin, end = max(low, start), min(high, start + length)
            if begin < end:
                offsets = list(shard.offsets)
                offsets[self.dimension] = first + begin - start
                box = {
                    kind: tensor.narrow(self.dimension, begin - low, end - begin)
                    for kind, tensor in shard.tensors.items()
                }
                yield ParameterShard(shard.name, tuple(offsets), box)
            start += length


@dataclass(frozen=True)
class TensorSplit:
    """What this rank has of the parameters that its tensor group divides; all others every rank of it has whole.

    Attributes:
        world: the tensor group.
        cuts: by name, of the parameters that are divided.
    """

    world: World
    cuts: Mapping[str, Cut] = field(default_factory=dict)

    def counts(self, name: str) -> bool:
        """Return whether this rank's values of a parameter count: of what all have whole, those of the first rank."""
        return self.world.is_main or name in self.cuts

    def share_gradients(self, parameters: Iterable[torch.Tensor]) -> None:
        """Replace the gradients of parameters that all ranks have whole by the first rank's; a collective.

        They are the same but for rounding: each GPU may choose other kernels, and the weights would drift apart.
        """
        copy_from_main([parameter.grad for parameter in parameters if parameter.grad is not None], self.world)

    def sum(self, squares: torch.Tensor) -> torch.Tensor:
        """Return the sum of the ranks' numbers [], the same on all; a collective."""
        return gather_rows(squares.view(1), self.world).sum()

    def shapes(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the whole parameters for those of a rank's."""
        return {name: self.cuts[name].shape if name in self.cuts else shape for name, shape in shapes.items()}

    def of_whole(self, shards: Iterable[ParameterShard]) -> list[ParameterShard]:
        """Return shards of this rank's parameters as shards of the whole ones."""
        return [
            box
            for shard in shards
            for box in (self.cuts[shard.name].boxes(shard) if shard.name in self.cuts else (shard,))
        ]


WHOLE = TensorSplit(World(0, 0, 1, 1, torch.device("cpu")))  # of a model that is not divided
