"""The folder of a run: found by its name, or created and locked."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import os
import shutil
import time
from collections.abc import Collection, Iterator
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

from zerovision.training.base.atomic_write import check_renames, remove_leftovers
from zerovision.training.base.errors import AnotherStartNeededError, UserError, one_line, shown
from zerovision.training.base.places import log_folder
from zerovision.training.base.run_folder import CHECKPOINTS, EXPORT, LAST, WEIGHTS, RunFolder, slug
from zerovision.training.base.run_lock import LOCK, Origin, lock_run
from zerovision.training.observe.settings import ObserveSettings

if TYPE_CHECKING:
    from zerovision.training.config import TrainConfig

LONGEST_NAME = 60  # of data, in the name of a run
FULL = (errno.ENOSPC, errno.EDQUOT)


def run_folder(config: ObserveSettings, name: str = "") -> RunFolder:
    """Return the folder of the run that a configuration names; `name` is used if it has none.

    Raises:
        UserError: if `--log-dir` cannot be a folder.
    """
    folder = RunFolder(log_folder(), config.run_name or name)
    try:
        if config.log_dir:
            folder = dataclasses.replace(folder, log_dir=Path(config.log_dir).expanduser().resolve())
        folder.metrics.exists()
    except (OSError, RuntimeError, ValueError) as error:
        reason = one_line(getattr(error, "strerror", "") or error)
        raise UserError(f"--log-dir {shown(config.log_dir)}: {reason.rstrip('.')}. Give another folder.") from None
    return folder


def refuse_existing(config: ObserveSettings, folder: RunFolder) -> None:
    """Raise a UserError if the folder contains a run that is not to be resumed.

    Files of a start that failed before it wrote a line of metrics.jsonl are not a run.
    """
    if config.resume == "never" and folder.metrics.exists() and folder.metrics.stat().st_size:
        raise UserError(
            f"--run-name {folder.name}: {folder.path} already contains a run. Give another name, or --resume auto to "
            "continue it."
        )


def create_run_folder(config: ObserveSettings, origin: Origin) -> RunFolder:
    """Create the folders of a run and lock it; only called on rank 0.

    Args:
        config: the configuration.
        origin: what started the training; a training restarted by the launcher continues in its own folder.

    Returns:
        The paths, with the file whose lock keeps other trainings out until it is closed.

    Raises:
        UserError: if a folder cannot be written, or a run of that name exists and is not resumed, or is being trained.
        AnotherStartNeededError: if the disk is full for a training that the launcher restarted.
    """
    folder = run_folder(config)

    def refuse_another_run() -> None:
        if not origin.restarts:
            refuse_existing(config, folder)

    try:
        if not config.run_name:
            model = config.model_type.replace(":", "-").replace("/", "-")
            name = f"{time.strftime('%Y%m%d-%H%M%S')}-{model}-{config.strategy}"
            folder = RunFolder(folder.log_dir, new_name(folder.log_dir, name))
        made = make_folders(folder)
        folder = dataclasses.replace(folder, made=made if config.run_name else (folder.path, *made))
        refuse_another_run()
        lock = lock_run(folder.path / LOCK, origin)
        refuse_another_run()  # one that was being trained until now
        remove_leftovers_of_run(folder.path, ours=(WEIGHTS, LAST))
        for left in folder.checkpoints.glob(".step-*.tmp"):  # a checkpoint that no living training writes
            shutil.rmtree(left, ignore_errors=True)
        _check_renames(folder)
        with folder.text_log.open("a", encoding="utf-8"), folder.metrics.open("a", encoding="utf-8"):
            pass
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        said = f"--log-dir {folder.log_dir}: cannot be written ({error.strerror}{where})"
        if origin.restarts and error.errno in FULL:
            raise AnotherStartNeededError(f"{said}; the run goes on when there is room.") from None
        raise UserError(f"{said}. Give a folder that you may write to.") from None
    return dataclasses.replace(folder, lock=lock)


def make_folders(folder: RunFolder) -> tuple[Path, ...]:
    """Create the missing folders of a run; return them."""
    made = []
    for path in (folder.path, folder.tensorboard, folder.checkpoints):
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            made.append(path)
    return tuple(made)


@contextlib.contextmanager
def removed_if_refused(folder: RunFolder) -> Iterator[None]:
    """Remove the folders that this start created if a user's mistake ends it before the first step."""
    try:
        yield
    except UserError:
        for path in folder.made:
            shutil.rmtree(path, ignore_errors=True)
        raise


def new_name(log_dir: Path, name: str) -> str:
    """Create the folder of an unnamed run; return its name, ending in -2, -3, ... if the name is taken."""
    runs = log_dir / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        one = name if number == 1 else f"{name}-{number}"
        with contextlib.suppress(FileExistsError):
            (runs / one).mkdir()
            break
    return one


def named_after_data(config: TrainConfig) -> TrainConfig:
    """Return the configuration with a run name: if none was chosen, that of its data, for which a folder is created."""
    if config.run_name:
        return config
    stem = Path(os.path.expanduser(config.data.rstrip("/"))).name.partition(".")[0]
    name = slug(stem.rpartition(":")[2]).strip("-_")[:LONGEST_NAME] or "run"
    return dataclasses.replace(config, run_name=new_name(run_folder(config, name).log_dir, name))


def _check_renames(folder: RunFolder) -> None:
    try:
        check_renames(folder.checkpoints)
    except OSError as error:
        if error.filename2 is None:  # it was no renaming: no room, or no rights
            raise
        raise UserError(
            f"--log-dir {folder.log_dir}: files cannot be renamed there ({error.strerror}), which checkpoints need. "
            "Give a folder on a disk or a file server, and copy the run when it is done."
        ) from None


def remove_leftovers_of_run(run: Path, ours: Collection[str] = ()) -> None:
    """Remove unfinished files of dead processes in a run's own folders, see `remove_leftovers`."""
    checkpoints = run / CHECKPOINTS
    for folder in (run, run / EXPORT, checkpoints, *checkpoints.glob("step-*")):
        remove_leftovers(folder, ours, of_library=True)
