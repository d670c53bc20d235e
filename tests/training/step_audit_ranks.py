"""What the tests of `--audit` run on each rank: steps in which one bit of a gradient is flipped."""

from __future__ import annotations

import hashlib
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch

from tests.kit import Recorder
from tests.training.engine_ranks import configuration, make_batch, make_engine, make_model, weights_of
from tests.training.no_shared_memory import without_shared_memory
from zerovision.training.base.errors import RunEnded
from zerovision.training.base.points import Loggers
from zerovision.training.base.timing import SpanClock
from zerovision.training.data.reader import Batch
from zerovision.training.engines.engine import StepInput, TimedEngine
from zerovision.training.loop import Accumulate, seed_dropout
from zerovision.training.steps.audit import Audited
from zerovision.training.tasks.labels import build_loss
from zerovision.training.world.world import World


class Flips:
    """Flips a bit of a gradient in the first backward of a step, or in every one, wherever autograd computes it."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.left, self._generator = 0, torch.Generator()
        for number, parameter in enumerate(module.parameters()):
            parameter.register_hook(partial(self._flip, number=number))
        self._number, self._parameters = 0, number + 1

    def arm(self, step: int, times: int) -> None:
        """Flip another bit of another element in every step, in its next `times` backwards."""
        self._generator.manual_seed(step)
        self.left, self._number = times, self._draw(self._parameters)

    def _draw(self, most: int) -> int:
        return int(torch.randint(most, (), generator=self._generator))

    def _flip(self, gradient: torch.Tensor, number: int) -> torch.Tensor | None:
        if not self.left or number != self._number:
            return None
        self.left -= 1
        values = gradient.flatten().clone()
        content = values.view(torch.uint8)
        content[self._draw(len(content))] ^= 1 << self._draw(8)
        return values.view(gradient.shape)


def audited_steps(
    world: World,
    steps: int,
    wrong: str,
    every: int = 1,
    accumulation: int = 1,
    over_collectives: bool = False,
    times: int = 1,
    most: int = 10**9,
    audit: bool = True,
) -> dict[str, Any]:
    """Train; in every step the rank that is checked, the one that checks ("owner", "checker"), or rank "1" is wrong."""
    with without_shared_memory() if over_collectives else nullcontext():
        engine = make_engine(world, make_model(True), configuration(gradient_accumulation_steps=accumulation))
    flips, log, timed = Flips(engine.module), Recorder(), TimedEngine(engine, SpanClock())
    position, culprits, ended = 0, [], ""
    step = Accumulate(build_loss(configuration(), [], [], world.device))
    audited = Audited(step, every, world, accumulation, lambda: position, Loggers([log]), most_findings=most)
    for position in range(steps):
        number = (position + 1) // every
        owner = number % world.size
        checker = (owner + 1 + number // world.size % (world.size - 1)) % world.size
        culprits.append({"owner": owner, "checker": checker, "1": 1}.get(wrong))
        if world.rank == culprits[-1]:
            flips.arm(position, times)
        batches = []
        for micro_step in range(accumulation):
            images, labels = make_batch(position, world.rank * accumulation + micro_step)
            images = images.contiguous(memory_format=torch.channels_last)
            batches.append(Batch(images, labels, torch.ones(len(labels)) / len(labels), torch.arange(len(labels))))

        def seed_leaf(micro_step: int, position: int = position) -> None:
            seed_dropout(0, position, world.rank * accumulation + micro_step, world.device)

        try:
            (audited if audit else step)(timed, StepInput(iter(batches), seed_leaf, 1.0, lambda *_: None))
        except RunEnded as error:
            ended = f"{error.exit_code}: {error}"
            break
    flips.left = 0
    weights = hashlib.sha256(repr(weights_of(engine)).encode()).hexdigest()
    engine.close()
    events = {kind: [values for name, values in log.events if name == kind] for kind, _ in log.events}
    return {"weights": weights, "events": events, "culprits": culprits, "ended": ended, "messages": log.messages}


def unlike_batches(world: World) -> dict[str, Any]:
    """Train a step in which rank 1 has other images than it should, as after one that it cannot read."""
    engine = make_engine(world, make_model(True), configuration())
    log, step = Recorder(), Accumulate(build_loss(configuration(), [], [], world.device))
    audited = Audited(step, 1, world, 1, lambda: 0, Loggers([log]))
    images, labels = make_batch(0, world.rank)
    if world.rank == 0:
        images = images.contiguous(memory_format=torch.channels_last)
    batch = Batch(images, labels, torch.ones(len(labels)), torch.arange(len(labels)))
    result = audited(TimedEngine(engine, SpanClock()), StepInput(iter([batch]), lambda _: None, 1.0, lambda *_: None))
    engine.close()
    return {"events": log.events, "applied": bool(result.applied)}
