"""Where a run's files are: logs/training.log, logs/tensorboard/<run>/ and logs/runs/<run>/."""

from __future__ import annotations

import contextlib
import dataclasses
import shutil
import time
from collections.abc import Collection
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import IO

from training.checkpoint.atomic_write import check_renames, remove_leftovers
from training.config import REPO_ROOT, TrainConfig
from training.errors import UserError, one_line, shown
from training.observe.run_lock import LOCK, Origin, lock_run

# In a run's own folder.
CONFIG = "config.json"
ENVIRONMENT = "environment.json"
METRICS = "metrics.jsonl"
LEARNING_RATE = "learning_rate.json"  # of a search for one
IMAGES = "images.csv.gz"  # what was trained on
BATCH_SIZE = "batch_size.json"  # of a search for one
PREDICTION = "prediction.json"  # written by planning.run_memory
WEIGHTS = "model.safetensors"
EVALUATION, TEST_EVALUATION = "evaluation", "evaluation-test"
EXPORT = "export"
CHECKPOINTS = "checkpoints"
REPORT = "report.html"
CARD = "README.md"
# In its folder of checkpoints.
LAST = "last"  # names the newest
# In its evaluation folder.
SCORES = "scores.json"
WORST = "worst"  # folder of the worst samples, one picture each


@dataclass(frozen=True)
class RunFolder:
    """The paths of one run; its other files are `path / CONFIG` and so on."""

    log_dir: Path
    name: str

    @property
    def path(self) -> Path:
        """The run's own folder."""
        return self.log_dir / "runs" / self.name

    @property
    def text_log(self) -> Path:
        """The text log that all runs share."""
        return self.log_dir / "training.log"

    @property
    def tensorboard(self) -> Path:
        """The run's TensorBoard event files."""
        return self.log_dir / "tensorboard" / self.name

    @property
    def metrics(self) -> Path:
        """One JSON object per logging point and epoch."""
        return self.path / METRICS

    @property
    def weights(self) -> Path:
        """The trained model: the best epoch's weights."""
        return self.path / WEIGHTS

    @property
    def checkpoints(self) -> Path:
        """What resume reads."""
        return self.path / CHECKPOINTS

    @property
    def has_checkpoint(self) -> bool:
        """Whether a checkpoint of the run was saved."""
        return (self.checkpoints / LAST).exists()


def run_folder(config: TrainConfig, name: str = "") -> RunFolder:
    """Return the folder of a configuration's run, which has this name if it was given none.

    Raises:
        UserError: if `--log-dir` is no possible folder.
    """
    folder = RunFolder(REPO_ROOT / "logs", config.run_name or name)
    try:
        if config.log_dir:
            folder = dataclasses.replace(folder, log_dir=Path(config.log_dir).expanduser().resolve())
        folder.metrics.exists()
    except (OSError, RuntimeError, ValueError) as error:
        reason = one_line(getattr(error, "strerror", "") or error)
        raise UserError(f"--log-dir {shown(config.log_dir)}: {reason.rstrip('.')}. Give another folder.") from None
    return folder


def refuse_existing(config: TrainConfig, folder: RunFolder) -> None:
    """Raise a UserError if a run is in the folder that is not to be resumed."""
    if config.resume == "never" and folder.metrics.exists():
        raise UserError(
            f"--run-name {folder.name}: {folder.path} already contains a run. Give another name, or --resume auto to "
            "continue it."
        )


def create_run_folder(config: TrainConfig, origin: Origin) -> tuple[RunFolder, IO[bytes]]:
    """Create the folders of a run and lock it; called on rank 0 alone.

    Args:
        config: the configuration.
        origin: what started the training; one that the launcher started again continues in its own folder.

    Returns:
        The paths, and the file whose lock keeps other trainings away until it is closed.

    Raises:
        UserError: if a folder cannot be written, or a run of that name exists and is not resumed, or is being trained.
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
        for path in (folder.path, folder.tensorboard, folder.checkpoints):
            path.mkdir(parents=True, exist_ok=True)
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
        raise UserError(
            f"--log-dir {folder.log_dir}: cannot be written ({error.strerror}: {error.filename}). "
            "Give a folder that you may write to."
        ) from None
    return folder, lock


def new_name(log_dir: Path, name: str) -> str:
    """Create the folder of a run whose name nobody chose; return the name, ending in -2, -3, ... if others have it."""
    runs = log_dir / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        one = name if number == 1 else f"{name}-{number}"
        with contextlib.suppress(FileExistsError):
            (runs / one).mkdir()
            break
    return one


def _check_renames(folder: RunFolder) -> None:
    try:
        check_renames(folder.checkpoints)
    except OSError as error:
        if error.filename2 is None:  # it was no renaming: no room, or no rights
            raise
        raise UserError(
            f"--log-dir {folder.log_dir}: nothing can be renamed there ({error.strerror}), and every checkpoint is. "
            "Give a folder on a disk or a file server, and copy the run when it is done."
        ) from None


def remove_leftovers_of_run(run: Path, ours: Collection[str] = ()) -> None:
    """Remove what dead processes left unfinished in a run's own folders, see `remove_leftovers`."""
    checkpoints = run / CHECKPOINTS
    for folder in (run, run / EXPORT, checkpoints, *checkpoints.glob("step-*")):
        remove_leftovers(folder, ours, of_library=True)


def shown_path(path: Path) -> str:
    """Return a path relative to the current folder if it is inside."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
