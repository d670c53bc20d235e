"""Where a run begins: its folder, and the checkpoint that it goes on from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import IO

from training.checkpoint.store import FoundCheckpoint, choose, find_candidates, set_aside
from training.config import TrainConfig
from training.errors import AgreedError
from training.observe.heartbeat import HeartbeatWriter
from training.observe.run_folder import RunFolder, create_run_folder, name_run
from training.observe.run_lock import Origin
from training.parallel.collectives import agreed, broadcast_object
from training.parallel.exchange import row_of, text
from training.parallel.world import World


@dataclass(frozen=True)
class RunStart:
    """Which start of a run this is.

    Attributes:
        origin: what started it, and how often it has started it again.
        heartbeat: signs of life for the launcher.
    """

    origin: Origin
    heartbeat: HeartbeatWriter

    @property
    def restarts(self) -> int:
        """How often the launcher has started the run again."""
        return self.origin.restarts


FIRST_START = RunStart(Origin(), HeartbeatWriter(None, 0, 0.0))


def create_folder(config: TrainConfig, start: RunStart, world: World) -> tuple[RunFolder, IO[bytes] | None]:
    """Create the run's folders on rank 0, and tell all ranks where they are; a collective.

    Returns:
        The folders, and on rank 0 the file that holds the run as long as it is open.
    """

    def create() -> tuple[RunFolder | None, IO[bytes] | None]:
        if not world.is_main:
            return None, None
        return create_run_folder(config, name_run(config), start.origin)

    created, lock = agreed(create, world)
    place = [str(created.log_dir), created.name] if created else None
    log_dir, name = broadcast_object(place, row_of(text, text), world)
    folder = RunFolder(Path(log_dir), name)
    if world.is_main:
        start.heartbeat.run_name(folder.name)
    return folder, lock


def find_checkpoint(
    config: TrainConfig, folder: RunFolder, start: RunStart, world: World
) -> tuple[FoundCheckpoint | None, list[str]]:
    """Find the checkpoint to go on from, and what the user should know about it; a collective.

    Raises:
        UserError: on all ranks, where the user asked for one and there is no good one.
    """
    is_restart = start.restarts > 0
    candidates, notes = agreed(lambda: find_candidates(config.resume, folder.checkpoints, is_restart=is_restart), world)
    found, refused = choose(candidates, world)
    if refused and found is None:
        if config.resume not in ("auto", "never"):
            raise AgreedError(f"--resume {config.resume}: no good checkpoint. {next(iter(refused.values()))}")
        notes.append("no good checkpoint is left: starting from the beginning")
    if world.is_main:
        set_aside(folder.checkpoints, refused)
    return found, notes + [f"checkpoint {path} is passed over: {reason}" for path, reason in refused.items()]
