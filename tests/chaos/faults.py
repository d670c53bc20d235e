"""The table of faults: what each does to a training that runs, and how the launch may end after it."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Literal

import psutil

from tests.chaos.damage import DAMAGES, Damage, newest_checkpoint
from tests.chaos.disk import fill
from tests.chaos.processes import NODE_LAUNCHER, Seen, freeze, processes_of, ranks_of, workers_of
from zerovision.launch.process_tree import is_alive, send

FILL_SECONDS = (0.2, 6.0)


class NothingToHitError(Exception):
    """What the fault would hit is not there: the training is just ending, or starting."""


@dataclass(frozen=True)
class Target:
    """What a fault may touch.

    Attributes:
        mark: what the training's processes carry.
        launcher: the process that was started: the launcher's shell, then the supervisor.
        checkpoints: the run's checkpoints folder.
        disk: where the small disk is mounted, if the run has one.
        rng: decides what is hit.
    """

    mark: str
    launcher: psutil.Process
    checkpoints: Path
    disk: Path | None
    rng: Random

    def ranks(self) -> list[Seen]:
        """Return the live ranks, at least one."""
        return _some(ranks_of(self.mark), "rank")


@dataclass(frozen=True)
class Fault:
    """One line of the table.

    Attributes:
        inject: does it, and returns what it did.
        ends_with: the exit codes with which the launch may end after it; without any, it has to go on by itself.
        must_end: whether the launch has to end.
        needs: what not every training has.
        spares_ranks: whether the ranks may live on.
        at_start_up: whether it may come before the training has made progress.
    """

    inject: Callable[[Target], str]
    ends_with: frozenset[int] = frozenset()
    must_end: bool = False
    needs: Literal["", "workers", "disk", "checkpoint"] = ""
    spares_ranks: bool = False
    at_start_up: bool = True


def _some(found: list[Seen], kind: str) -> list[Seen]:
    if not found:
        raise NothingToHitError(f"no {kind} lives")
    return found


def _describe(seen: Seen) -> str:
    return f"rank {seen.number} (pid {seen.process.pid})"


def _signal_rank(number: signal.Signals, target: Target) -> str:
    rank = target.rng.choice(target.ranks())
    send(rank.process, number)
    return f"kill -{number.name} {_describe(rank)}"


def _kill_all_ranks(target: Target) -> str:
    ranks = target.ranks()
    for rank in ranks:
        send(rank.process, signal.SIGKILL)
    return f"kill -SIGKILL {', '.join(map(_describe, ranks))}"


def _signal_launcher(number: signal.Signals, target: Target) -> str:
    if not is_alive(target.launcher):
        raise NothingToHitError("the launcher has ended")
    send(target.launcher, number)
    return f"kill -{number.name} the launcher (pid {target.launcher.pid})"


def _kill_node_launcher(target: Target) -> str:
    found = [seen for seen in processes_of(target.mark) if seen.is_node_launcher]
    chosen = target.rng.choice(_some(found, "node launcher"))
    send(chosen.process, signal.SIGKILL)
    return f"kill -SIGKILL {NODE_LAUNCHER} (pid {chosen.process.pid})"


def _kill_worker(target: Target) -> str:
    worker = target.rng.choice(_some(workers_of(target.mark), "data worker"))
    send(worker.process, signal.SIGKILL)
    return f"kill -SIGKILL data worker (pid {worker.process.pid})"


def _fill_disk(target: Target) -> str:
    if target.disk is None:
        raise NothingToHitError("no small disk")
    seconds = target.rng.uniform(*FILL_SECONDS)
    fill(target.disk, seconds)
    return f"fill the disk for {seconds:.1f} s"


def _damage(damage: Damage, target: Target) -> str:
    """Damage the newest checkpoint under ranks that stand still, and kill them: the restart has to read it."""
    ranks = [rank.process for rank in target.ranks()]
    if newest_checkpoint(target.checkpoints) is None:
        raise NothingToHitError("no checkpoint")
    try:
        freeze(ranks)
        checkpoint = newest_checkpoint(target.checkpoints)  # a save may just have ended
        assert checkpoint is not None
        what = damage(checkpoint, target.rng)
    finally:
        for rank in ranks:
            send(rank, signal.SIGKILL)
    return f"{checkpoint.name}: {what}, kill -SIGKILL all ranks"


def _on_rank(number: signal.Signals) -> Callable[[Target], str]:
    return functools.partial(_signal_rank, number)


def _on_launcher(number: signal.Signals) -> Callable[[Target], str]:
    return functools.partial(_signal_launcher, number)


FAULTS: dict[str, Fault] = {
    "kill_rank": Fault(_on_rank(signal.SIGKILL)),
    "kill_all_ranks": Fault(_kill_all_ranks),
    "kill_launcher": Fault(_on_launcher(signal.SIGKILL), frozenset({128 + signal.SIGKILL}), must_end=True),
    "kill_node_launcher": Fault(_kill_node_launcher),
    "kill_worker": Fault(_kill_worker, needs="workers", spares_ranks=True),
    # Not at start-up: a rank may take minutes for its imports before it counts as hung.
    "stop_rank": Fault(_on_rank(signal.SIGSTOP), at_start_up=False),
    "sigterm_rank": Fault(_on_rank(signal.SIGTERM), frozenset({128 + signal.SIGTERM}), must_end=True),
    "sigterm_launcher": Fault(_on_launcher(signal.SIGTERM), frozenset({128 + signal.SIGTERM}), must_end=True),
    "sigusr1_rank": Fault(_on_rank(signal.SIGUSR1), frozenset({128 + signal.SIGUSR1}), must_end=True),
    "fill_disk": Fault(_fill_disk, needs="disk", spares_ranks=True),
    **{
        name: Fault(functools.partial(_damage, damage), needs="checkpoint", at_start_up=False)
        for name, damage in DAMAGES.items()
    },
}
