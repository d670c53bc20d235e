"""`--audit`: every N steps, one rank repeats the first micro-batch of another rank, and the gradients are compared.

Processors that silently compute wrong results are rare, but large clusters have some (Hochschild et al. 2021, "Cores
that don't count", https://doi.org/10.1145/3458336.3465297). The gradient of a leaf (micro-batch) has the same bits on
every rank, so any rank can check any other. If the gradients of two ranks differ, all ranks compute the leaf, the
majority decides which rank was wrong, and the step is repeated; its result has the same bytes as that of a correct
step.
"""

from __future__ import annotations

import dataclasses
import socket
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any

import torch

from zerovision.training.base.errors import WRONG_GRADIENT_EXIT_CODE, RunEnded, UserError, either, printable
from zerovision.training.base.points import Loggers
from zerovision.training.base.units import plural
from zerovision.training.data.batch_transforms import to_device
from zerovision.training.data.reader import Batch
from zerovision.training.engines.engine import Step, StepInput, StepResult, TimedEngine
from zerovision.training.observe.settings import ObserveSettings
from zerovision.training.observe.step_hashes import tensor_hash
from zerovision.training.world.collectives import copy_from_main, gather_objects
from zerovision.training.world.world import World

MOST_FINDINGS = 3  # about one rank; the last of these findings ends the run
SENT = ("images", "labels", "weights", "targets", "loss_weights", "indices")  # fields of a batch, if present

Hashes = dict[str, str]
"""The hashes of a leaf's gradients, by parameter."""


def check_audit(config: ObserveSettings, world: World) -> None:
    """Raise a UserError if gradients cannot be compared: on a single rank, or on GPUs without `--deterministic`."""
    every = config.audit
    if every and world.size == 1:
        raise UserError(
            f"--audit {every}: a single rank has no other to compare with: start two or more, or leave --audit out."
        )
    if every and world.device.type == "cuda" and not config.deterministic:
        raise UserError(f"--audit {every}: a GPU repeats its results only with --deterministic: use both, or neither.")


class _WrongLeafError(Exception):
    """Raised on all ranks if two ranks have computed different gradients of the same leaf."""


class _Watched(TimedEngine):
    """An engine that calls `check` with hashes of the gradients of its first backward pass, before they are used.

    Unless `hashes` is true, there are none, and `check` receives an empty dict. It may raise an error.
    """

    def __init__(self, engine: TimedEngine, check: Callable[[Hashes], None], *, hashes: bool) -> None:
        super().__init__(engine.engine, engine.clock)
        self._check: Callable[[Hashes], None] | None = check
        self._hashes = hashes

    def backward(self, loss: torch.Tensor) -> None:
        if self._check is None:
            return super().backward(loss)
        found: Hashes = {}

        def note(gradient: torch.Tensor, name: str) -> None:
            found[name] = tensor_hash(gradient)

        trained = [item for item in self.engine.module.named_parameters() if item[1].requires_grad and self._hashes]
        hooks = [parameter.register_hook(partial(note, name=name)) for name, parameter in trained]
        super().backward(loss)
        for hook in hooks:
            hook.remove()
        check, self._check = self._check, None
        return check(found)


class _Again(TimedEngine):
    """An engine that hashes the gradients of a backward pass instead of accumulating them, and never updates."""

    def backward(self, loss: torch.Tensor) -> None:
        self.found = {name: tensor_hash(gradient) for name, gradient in self.engine.gradients(loss).items()}

    def step(self) -> None:
        pass


@dataclass(frozen=True)
class Audited:
    """A step function (see `zerovision.training.engines.engine.Step`) that is checked every few steps."""

    step: Step  # calls `backward` once for each micro-batch
    every: int  # number of optimizer steps between checks
    world: World  # at least two ranks
    leaves_per_rank: int  # number of micro-batches that each rank processes in a step
    position: Callable[[], int]  # returns the number of completed steps of the run
    loggers: Loggers
    most_findings: int = MOST_FINDINGS  # number of findings about one rank that ends the run
    findings: Counter[int] = field(default_factory=Counter)  # number of findings so far, by rank

    def __call__(self, engine: TimedEngine, given: StepInput) -> StepResult | None:
        """See `zerovision.training.engines.engine.Step`; raises RunEnded on all ranks if a rank is wrong too often."""
        audit, left = divmod(self.position() + 1, self.every)
        if left:
            return self.step(engine, given)
        batches = iter(given.batches)
        first = next(batches)
        # Each rank is checked in turn, by a different rank every time.
        owner = audit % self.world.size
        checker = (owner + 1 + audit // self.world.size % (self.world.size - 1)) % self.world.size
        given = given._replace(batches=chain([first], batches))
        shared = self._share(first, given.loss_scale, owner)
        if shared is None:
            return self.step(engine, given)
        (batch, owners_scale), kept = shared, engine.buffers.copy()
        offset = (owner - self.world.rank) * self.leaves_per_rank  # of the owner's first leaf from this rank's

        def compute() -> Hashes:
            again = _Again(engine.engine, engine.clock)
            leaf = StepInput([batch], lambda place: given.seed_leaf(place + offset), owners_scale, lambda *_: None)
            self.step(again, leaf)
            engine.buffers.restore(kept)
            return again.found

        def check(hashes: Hashes) -> None:
            rows = gather_objects(again if self.world.rank == checker else hashes, self.world)
            if rows[owner] == rows[checker]:
                self.loggers.event("audit", {"step": self.position() + 1, "rank": owner, "again_on": checker})
                return
            engine.engine.drop_leaf()
            engine.buffers.restore(kept)
            self._blame(rows, gather_objects(compute(), self.world), owner, checker)
            raise _WrongLeafError

        while True:
            again = compute() if self.world.rank == checker else {}
            watched = _Watched(engine, check, hashes=self.world.rank == owner)
            try:
                return self.step(watched, given._replace(batches=chain([first], batches)))
            except _WrongLeafError:
                continue

    def _share(self, own: Batch, loss_scale: float, owner: int) -> tuple[Batch, float] | None:
        """Return the owner's micro-batch and loss scale, or None if a rank has no images; a collective."""
        given = {name: tensor for name in SENT if (tensor := getattr(own, name)) is not None}
        tensors: dict[str, Any] = {name: to_device(tensor, self.world.device) for name, tensor in given.items()}
        form = repr([(name, one.dtype, one.shape, one.stride()) for name, one in tensors.items()])
        rows = gather_objects((form, loss_scale), self.world)
        if len({form for form, _ in rows}) > 1:  # because of an unreadable image: all ranks stop after this step
            return None
        if self.world.rank != owner:
            tensors = {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
        for tensor in tensors.values():
            copy_from_main([tensor], self.world, owner)
        return dataclasses.replace(own, **tensors), rows[owner][1]

    def _blame(self, first: list[Hashes], again: list[Hashes], owner: int, checker: int) -> None:
        """Log which rank was wrong, and end the run if that happened too often; a collective.

        `first` contains the compared hashes by rank, empty for the other ranks; `again`, those of every rank afterward.
        """
        step, ranks = self.position() + 1, range(self.world.size)
        right, votes = Counter(tuple(sorted(hashes.items())) for hashes in again).most_common(1)[0]
        is_decided = 2 * votes > self.world.size
        both = [(first[rank] or again[rank], again[rank]) for rank in ranks]
        wrong = [rank for rank in ranks if not is_decided or any(hashes != dict(right) for hashes in both[rank])]
        hosts = [printable(host) for host in gather_objects(socket.gethostname(), self.world)]
        who = either(f"rank {rank} on {hosts[rank]}" for rank in wrong)
        differing = sorted({name for name, _ in first[owner].items() ^ first[checker].items()})
        self.loggers.message(
            f"step {step}: {who} computed wrong results: rank {owner} and rank {checker} have different gradients of "
            f"the same images in {plural(len(differing), 'layer')}, such as {differing[0]}; the step starts again"
        )
        named = {"ranks": wrong, "hosts": [hosts[rank] for rank in wrong], "parameters": differing}
        self.loggers.event("wrong_gradient", {"step": step} | named)
        self.findings.update(wrong)
        if (most := max(self.findings.values())) >= self.most_findings:
            raise RunEnded(
                f"{who} computed wrong results {most} times since the start (--audit): leave that machine out, and "
                "continue with --resume auto.",
                WRONG_GRADIENT_EXIT_CODE,
                step,
            )
