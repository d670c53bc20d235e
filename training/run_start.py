"""Where a run begins: its folder, and the checkpoint that it goes on from."""

from __future__ import annotations

from dataclasses import dataclass

from training.checkpoint.store import FoundCheckpoint, choose, find_candidates, set_aside
from training.config import TrainConfig
from training.distributed import World, agreed, broadcast_object
from training.errors import AgreedError
from training.launch_folder import RankReport
from training.run_folder import RunFolder, create_run_folder, name_run


@dataclass(frozen=True)
class RunStart:
    """Which start of a run this is.

    Attributes:
        restarts: how often the launcher has started it again.
        report: what the launcher is told.
    """

    restarts: int
    report: RankReport


FIRST_START = RunStart(0, RankReport(None, 0, 0.0))


def create_folder(config: TrainConfig, start: RunStart, world: World) -> RunFolder:
    """Create the run's folders on rank 0, and tell all ranks where they are; a collective."""

    def create() -> RunFolder | None:
        if not world.is_main:
            return None
        return create_run_folder(config, name_run(config), is_restart=start.restarts > 0)

    folder = broadcast_object(agreed(create, world), world)
    if world.is_main:
        start.report.run_name(folder.name)
    return folder


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
