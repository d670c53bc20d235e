"""The interface of the two engines, DeepSpeed ZeRO and our own flat buffers, and the description of a rank's shard.

An engine is a model with its optimizer, sharded over the ranks. Only the engines' own modules know which one it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from training.parallel.precision import DynamicLossScale
from training.parallel.world import World

CONVOLUTION_DIMENSIONS = 4  # of its weights: outputs, inputs, height, width


@dataclass(frozen=True)
class StepResult:
    """What an optimizer step did.

    Attributes:
        applied: whether the weights were updated; they are not if the gradient is not finite. A bool, or a bool
            tensor [] on the device that has not been synchronized.
        gradient_norm: global L2 norm before clipping, None if it was not computed.
    """

    applied: bool | torch.Tensor
    gradient_norm: float | torch.Tensor | None


class Piece(NamedTuple):
    """`length` elements of the flattened parameter `name`, from `offset` on, at `start` in a flat tensor."""

    name: str
    offset: int
    start: int
    length: int


@dataclass(frozen=True)
class FlatShard:
    """This rank's part of one parameter group, or of a frozen parameter: live tensors, not copies.

    Attributes:
        weights: fp32 [n].
        moments: kind -> fp32 [n]; none of frozen parameters.
        pieces: which part of which parameter lies where; elements in no piece are padding.
        names: of all parameters of the group, in the same order on all ranks; none of frozen parameters.
        channels_last: names of the parameters whose elements are in the order of `channels_last`, offsets included.
    """

    weights: torch.Tensor
    moments: dict[str, torch.Tensor]
    pieces: tuple[Piece, ...]
    names: tuple[str, ...] = ()
    channels_last: frozenset[str] = frozenset()


class Engine(Protocol):
    """A sharded model with its optimizer.

    Attributes:
        module: the model; at ZeRO 3 its parameters may be empty outside forward and backward.
        loss_scale: of fp16, else None.
    """

    module: nn.Module
    loss_scale: DynamicLossScale | None

    @property
    def parameter_groups(self) -> list[dict[str, Any]]:
        """The optimizer's groups, whose 'lr' the schedule sets before each step."""

    def compile(self, mode: str | None) -> None:
        """Compile the model at its first forward; mode as of `torch.compile`."""

    def train(self, mode: bool = True) -> None:
        """Set training or evaluation mode of the model."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return logits [B, classes] in float32 for images [B, 3, H, W]; a collective at ZeRO 3."""

    def backward(self, loss: torch.Tensor) -> None:
        """Accumulate the gradient of a scalar loss; a collective, because an engine may reduce it here."""

    def step(self) -> StepResult | None:
        """Count a micro-step, and update the weights after the last one of an accumulation; a collective.

        Returns:
            None between the updates. An update is skipped on all ranks when the gradient's norm is not finite.
        """

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every parameter in full and in fp32, and every buffer, as CPU tensors; a collective."""

    def applied_steps(self) -> int:
        """Return how many updates the optimizer has applied, for Adam's bias correction; may synchronize a GPU."""

    def write_state(
        self, weights: Mapping[str, torch.Tensor], moments: Mapping[str, Mapping[str, torch.Tensor]], applied_steps: int
    ) -> None:
        """Load the state of another engine, of any strategy, into a new one; a collective.

        Args:
            weights: parameters by name, read one at a time.
            moments: kind -> parameter name -> tensor; may be empty for an engine that has applied no step.
            applied_steps: updates applied so far.
        """

    def parameter_shapes(self) -> dict[str, list[int]]:
        """Return the full shape of every parameter, also if it is sharded."""

    def flat_shards(self) -> list[FlatShard]:
        """Return this rank's part of weights and moments as live tensors, frozen parameters last; no collective."""

    def close(self) -> None:
        """Release hooks and buffers."""


def frozen_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return by name the parameters that the optimizer does not update; a checkpoint contains them."""
    return {name: parameter for name, parameter in module.named_parameters() if not parameter.requires_grad}


def frozen_shards(module: nn.Module, world: World) -> list[FlatShard]:
    """Return the frozen parameters as shards of rank 0: they are whole, and the same, on all ranks."""
    if not world.is_main:
        return []
    return [
        FlatShard(parameter.detach().flatten().float(), {}, (Piece(name, 0, 0, parameter.numel()),))
        for name, parameter in frozen_parameters(module).items()
    ]


def fill_shard(
    shard: FlatShard, weights: Mapping[str, torch.Tensor], moments: Mapping[str, Mapping[str, torch.Tensor]]
) -> None:
    """Copy a shard's elements from whole tensors; arguments as of `Engine.write_state`."""
    pairs = [(shard.weights, weights)]
    if moments:
        pairs += [(flat, moments[kind]) for kind, flat in shard.moments.items()]
    for piece in shard.pieces:
        for flat, tensors in pairs:
            whole = tensors[piece.name]
            if piece.name in shard.channels_last:
                whole = whole.permute(0, 2, 3, 1)
            part = whole.reshape(-1).narrow(0, piece.offset, piece.length)
            flat.detach().narrow(0, piece.start, piece.length).copy_(part)


def gather_weights(engine: Engine, world: World) -> dict[str, torch.Tensor]:
    """Return all fp32 weights and buffers by name on rank 0, nothing on the others; a collective."""
    kept = {}
    for name, tensor in engine.weights():
        if world.is_main:
            kept[name] = tensor
    return kept
