"""Hashes of what a step was given and of what it left, by which two runs that should be equal are compared."""

from __future__ import annotations

import hashlib
from typing import Any

import torch

from training.engines.engine import Engine
from training.engines.parameter_shards import gather_weights
from training.world.world import World

HASHES = "hashes"  # the kind of their lines in metrics.jsonl
DIGEST_BYTES = 8


def tensor_hash(tensor: torch.Tensor) -> str:
    """Return BLAKE2b of a tensor's values in the order of its dimensions, 16 hexadecimal digits; a sync on a GPU."""
    values = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.blake2b(values.numpy().data, digest_size=DIGEST_BYTES).hexdigest()


def hashed_parameters(engine: Engine, world: World) -> dict[str, torch.Tensor]:
    """Return the parameters by name, without buffers, as of `gather_weights`; a collective."""
    names = engine.state().shapes.keys()
    return {name: weight for name, weight in gather_weights(engine, world).items() if name in names}


class StepHashes:
    """Hashes of every so many steps: of the first leaf's images, and of all parameters after the step.

    The first leaf is rank 0's on any number of ranks.

    Args:
        every: optimizer steps from one to the next; 0 for none.
        world: the ranks.
    """

    def __init__(self, every: int, world: World) -> None:
        self._every, self._world = every, world
        self._images: dict[str, str] = {}

    def note(self, images: torch.Tensor, position: int) -> None:
        """Take a micro-batch [B, C, H, W] of the step at `position`, the first of which counts."""
        if self._is_due(position) and self._world.is_main and not self._images:
            self._images = {"images": tensor_hash(images)}

    def after_step(self, engine: Engine, position: int) -> dict[str, Any] | None:
        """Return the values of a line on rank 0 if the step that ended is due; then a collective."""
        if not self._is_due(position):
            return None
        parameters = hashed_parameters(engine, self._world)
        images, self._images = self._images, {}
        if not self._world.is_main:
            return None
        kept = {name: tensor_hash(parameter) for name, parameter in parameters.items()}
        return {"step": position + 1, **images, "weights": kept}

    def _is_due(self, position: int) -> bool:
        return self._every > 0 and (position + 1) % self._every == 0
