"""Hashes the inputs and results of steps, to compare two runs that should be identical."""

from __future__ import annotations

import hashlib
import zlib
from functools import partial
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from zerovision.training.base.leaves import Leaves
from zerovision.training.base.points import Loggers
from zerovision.training.engines.engine import Engine
from zerovision.training.engines.parameter_shards import gather_weights
from zerovision.training.observe.observer import Observer, Seen, StepDone
from zerovision.training.world.collectives import gather_objects
from zerovision.training.world.world import World

HASHES = "hashes"  # the `kind` of lines with hashes in metrics.jsonl
DIGEST_BYTES = 8
OF_LEAF = ("images", "outputs", "gradients")  # in the order in which a step computes the tensors


def tensor_hash(tensor: torch.Tensor) -> str:
    """Return the BLAKE2b hash of a tensor's values in row-major order, 16 hexadecimal digits; a sync on a GPU."""
    return hashlib.blake2b(_content(tensor), digest_size=DIGEST_BYTES).hexdigest()


def _content(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def hashed_parameters(engine: Engine, world: World) -> dict[str, torch.Tensor]:
    """Return the parameters by name, without buffers; see `gather_weights`; a collective."""
    names = engine.state().shapes.keys()
    return {name: weight for name, weight in gather_weights(engine, world).items() if name in names}


class StepHashes(Observer):
    """Every few steps, hashes each leaf (micro-batch) on the rank that computes it, and all parameters after the step.

    Args:
        every: number of optimizer steps between hashed steps; 0 to hash no step.
        world: the ranks.
        leaves: the step's leaves.
        engine: the engine; if ranks have whole parameters, the gradients of each leaf are hashed before they are added.
        loggers: loggers that receive one line per hashed step.
    """

    span = "logging"

    def __init__(self, every: int, world: World, leaves: Leaves, engine: Engine, loggers: Loggers) -> None:
        self._every, self._world, self._step_leaves = every, world, leaves
        self._engine, self._loggers, self._position = engine, loggers, 0
        named = [*engine.module.named_parameters()]
        # Otherwise, a rank has only the gradients of a part of the network.
        is_whole = world.replica.size == 1 and not any(isinstance(parameter, DTensor) for _, parameter in named)
        self._trained = [item for item in named if item[1].requires_grad and is_whole]
        self._hooks: list[Any] = []
        self._gradients: dict[str, int] = {}
        self._leaves: list[list[str]] = []

    def before_step(self, position: int) -> None:
        """Prepare to hash the gradients if this step is to be hashed."""
        self._position = position

        def hash_gradient(gradient: torch.Tensor, name: str) -> None:
            # CRC-32 detects any change of neighboring bits in a fifth of BLAKE2b's time; a run has many leaves.
            self._gradients[name] = zlib.crc32(_content(gradient))

        if self._is_due():
            self._hooks = [
                parameter.register_hook(partial(hash_gradient, name=name)) for name, parameter in self._trained
            ]

    def seen(self, seen: Seen) -> None:
        """Hash a micro-batch and its outputs, after its backward pass."""
        if self._is_due():
            of_all = hashlib.blake2b(repr(sorted(self._gradients.items())).encode(), digest_size=DIGEST_BYTES)
            gradients = [of_all.hexdigest()] if self._gradients else []
            self._leaves.append(
                [str(self._world.rank), tensor_hash(seen.batch.images), tensor_hash(seen.logits), *gradients]
            )
            self._gradients.clear()

    def after_step(self, done: StepDone) -> None:
        if self._is_due() and (line := self.line()):
            self._loggers.event(HASHES, line)

    def line(self) -> dict[str, Any]:
        """Return the values of a hashed step's line on rank 0, and an empty dict on other ranks; a collective."""
        for hook in self._hooks:
            hook.remove()
        parameters = hashed_parameters(self._engine, self._world)
        by_rank = gather_objects(self._leaves, self._world.data)
        self._leaves = []
        if not self._world.is_main:
            return {}
        numbered = {
            self._step_leaves.number(place, micro_step): {"rank": int(rank), **dict(zip(OF_LEAF, found, strict=False))}
            for place, of_rank in enumerate(by_rank)
            for micro_step, (rank, *found) in enumerate(of_rank)
        }
        kept = {name: tensor_hash(parameter) for name, parameter in parameters.items()}
        return {"step": self._position + 1, "leaves": [numbered[leaf] for leaf in sorted(numbered)], "weights": kept}

    def _is_due(self) -> bool:
        return (self._position + 1) % self._every == 0
