"""Hashes of what a step was given and of what it left, by which two runs that should be equal are compared."""

from __future__ import annotations

import hashlib
import zlib
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from zerovision.training.base.leaves import Leaves
from zerovision.training.engines.engine import Engine
from zerovision.training.engines.parameter_shards import gather_weights
from zerovision.training.world.collectives import gather_objects
from zerovision.training.world.world import World

HASHES = "hashes"  # the kind of their lines in metrics.jsonl
DIGEST_BYTES = 8
OF_LEAF = ("images", "outputs", "gradients")  # in the order in which a step computes them


def tensor_hash(tensor: torch.Tensor) -> str:
    """Return BLAKE2b of a tensor's values in the order of its dimensions, 16 hexadecimal digits; a sync on a GPU."""
    return hashlib.blake2b(_content(tensor), digest_size=DIGEST_BYTES).hexdigest()


def _content(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def hashed_parameters(engine: Engine, world: World) -> dict[str, torch.Tensor]:
    """Return the parameters by name, without buffers, as of `gather_weights`; a collective."""
    names = engine.state().shapes.keys()
    return {name: weight for name, weight in gather_weights(engine, world).items() if name in names}


class StepHashes:
    """Hashes of every so many steps: of each leaf, on the rank that has it, and of all parameters after the step.

    Args:
        every: optimizer steps from one to the next; 0 for none.
        world: the ranks.
        leaves: of a step.
        module: whose gradients are hashed leaf by leaf, before they are added up, where a rank has whole parameters;
            None for outputs alone.
    """

    def __init__(self, every: int, world: World, leaves: Leaves, module: nn.Module | None) -> None:
        self._every, self._world, self._step_leaves = every, world, leaves
        named = [*module.named_parameters()] if module is not None and every else []
        is_whole = not any(isinstance(parameter, DTensor) for _, parameter in named)
        self._trained = [item for item in named if item[1].requires_grad and is_whole]
        self._hooks: list[Any] = []
        self._gradients: dict[str, int] = {}
        self._leaves: list[list[str]] = []

    def before_step(self, position: int) -> None:
        """Prepare for the step at `position`."""

        def hash_gradient(gradient: torch.Tensor, name: str) -> None:
            # CRC-32 sees each change of neighbouring bits, in a fifth of the time; a run has many leaves.
            self._gradients[name] = zlib.crc32(_content(gradient))

        if self._is_due(position):
            self._hooks = [
                parameter.register_hook(partial(hash_gradient, name=name)) for name, parameter in self._trained
            ]

    def note(self, images: torch.Tensor, outputs: torch.Tensor, position: int) -> None:
        """Take a micro-batch [B, C, H, W] of the step at `position` and its outputs [B, K], after its backward."""
        if self._is_due(position):
            of_all = hashlib.blake2b(repr(sorted(self._gradients.items())).encode(), digest_size=DIGEST_BYTES)
            gradients = [of_all.hexdigest()] if self._gradients else []
            self._leaves.append([str(self._world.rank), tensor_hash(images), tensor_hash(outputs), *gradients])
            self._gradients.clear()

    def after_step(self, engine: Engine, position: int) -> dict[str, Any] | None:
        """Return the values of a line on rank 0 if the step that ended is due; then a collective."""
        if not self._is_due(position):
            return None
        for hook in self._hooks:
            hook.remove()
        parameters = hashed_parameters(engine, self._world)
        by_rank = gather_objects(self._leaves, self._world.data)
        self._leaves = []
        if not self._world.is_main:
            return None
        numbered = {
            self._step_leaves.number(place, micro_step): {"rank": int(rank), **dict(zip(OF_LEAF, found, strict=False))}
            for place, of_rank in enumerate(by_rank)
            for micro_step, (rank, *found) in enumerate(of_rank)
        }
        leaves = [numbered[leaf] for leaf in sorted(numbered)]
        kept = {name: tensor_hash(parameter) for name, parameter in parameters.items()}
        return {"step": position + 1, "leaves": leaves, "weights": kept}

    def _is_due(self, position: int) -> bool:
        return self._every > 0 and (position + 1) % self._every == 0
