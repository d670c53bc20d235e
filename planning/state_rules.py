"""What of a training state a rank has, by engine and ZeRO stage, in fp32 values per trained parameter."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StateRule:
    """fp32 values per trained parameter on a rank; sharded ones are divided among the ranks of a replica."""

    weights: float = 0
    sharded_weights: float = 0
    sharded_copy: float = 0
    """Of the weights, for the optimizer."""
    gradients: float = 0
    """Whole gradients, once for each sum that accumulation sets aside if `parks_sums`."""
    sharded_gradients: float = 0
    sums: float = 0
    """Sharded sums of the gradients over the ranks, if there is more than one rank."""
    received: float = 0
    """Other ranks' sums of this rank's part, if there is more than one rank."""
    parks_sums: bool = False
    """Whether gradients are added along the tree of PyTorch's engine."""
    accumulates_whole: bool = False
    """Whether accumulation keeps whole sums of gradients, as the tree says, that are otherwise sharded."""
    gradients_stay: bool = False
    """Whether the gradients' memory stays taken between the steps; else backward takes it as it computes them."""
    step: float = 0
    """Sharded values that the optimizer's step needs temporarily."""
    buckets: int = 0
    """Communication buckets, which stay if the gradients do. A CPU gives memory to what is written of them."""
    flattens: bool = False
    """Whether the gradients of a bucket are copied into one tensor to be sent, and their norm is taken in fp64."""
    gathered: float = 0
    """Whole weights that forward and backward gather temporarily, if there is more than one rank."""
    gathered_blocks: float = 0
    """The same of the largest block, beside what is in no block."""
    gathers_twice: bool = False
    """Whether CPU ranks gather into memory that is copied, up to a bucket of weights at once."""
    channels_last: bool = False
    """Whether the weights of convolutions are in the images' order of dimensions."""
    block_gradients: float = 0
    """Whole gradients of the largest block, and a copy of them, while they are sent; those of what is in no block are
    sent when backward ends."""


# By engine and ZeRO stage. DeepSpeed keeps a copy of the weights for the optimizer at every stage.
STATE_RULES: dict[tuple[str, int], StateRule] = {
    ("deepspeed", 1): StateRule(weights=1, sharded_copy=1, gradients=1, step=1, flattens=True),
    ("deepspeed", 2): StateRule(weights=1, sharded_copy=1, sharded_gradients=1, step=1, buckets=2, flattens=True),
    ("deepspeed", 3): StateRule(
        sharded_weights=1,
        sharded_copy=1,
        sharded_gradients=1,
        gradients_stay=True,
        step=1,
        buckets=1,
        flattens=True,
        gathered=1,
        gathers_twice=True,
    ),
    ("torch", 1): StateRule(
        weights=1, gradients=1, sums=1, received=1, parks_sums=True, gradients_stay=True, channels_last=True
    ),
    ("torch", 2): StateRule(
        sharded_weights=1, sharded_gradients=1, accumulates_whole=True, gathered=1, block_gradients=2
    ),
    ("torch", 3): StateRule(
        sharded_weights=1, sharded_gradients=1, accumulates_whole=True, gathered_blocks=2, block_gradients=2
    ),
}
# At stage 1 PyTorch's engine shares one copy of the weights between a machine's CPU ranks: each is charged its part.
SHARED = StateRule(sharded_weights=1, gradients=1, sums=1, parks_sums=True, gradients_stay=True, channels_last=True)
# One rank has plain parameters under PyTorch's engine at stages 2 and 3.
ALONE = StateRule(weights=1, gradients=1, accumulates_whole=True)
