"""Finds the folder of a run by its name, or creates and locks it.

Only one training job at a time may use a run's folder: rank 0 holds a lock that the kernel releases when the process
dies. It is a byte-range lock (`fcntl.lockf`), which an NFS server manages, so it works across machines; `flock` does
not work everywhere. A process loses a byte-range lock as soon as it closes *any* descriptor of the file, so no other
code in the process may open the lock file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import shutil
import socket
import sys
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import IO, TYPE_CHECKING

from zerovision.training.base.errors import AnotherStartNeededError, UserError, one_line, shown
from zerovision.training.base.files import remove_leftovers, unfinished
from zerovision.training.base.heartbeat import LAUNCH_VARIABLE, RESTARTS_VARIABLE
from zerovision.training.base.run_folder import CHECKPOINTS, EXPORT, LAST, WEIGHTS, RunFolder, log_folder, slug
from zerovision.training.observe.settings import ObserveSettings

if TYPE_CHECKING:
    from zerovision.training.config import TrainConfig

LOCK = ".lock"
WAIT_SECONDS = 15.0  # for a training job that is about to end
POLL_SECONDS = 0.2
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
LARGEST = 4096  # bytes of a lock file that are read


@dataclass(frozen=True)
class Origin:
    """What started the training of a run.

    Attributes:
        launch: ID of the launch; '' without our launcher.
        restarts: number of times that the launch has restarted training.
        job: Slurm job ID; '' outside Slurm.
        requeues: number of times that Slurm has requeued the job.
    """

    launch: str = ""
    restarts: int = 0
    job: str = ""
    requeues: int = 0

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Origin:
        """Read the origin from the environment variables of the launcher and of Slurm."""

        def number(name: str) -> int:
            text = environment.get(name, "")
            return int(text) if text.isdecimal() else 0

        return cls(
            launch=environment.get(LAUNCH_VARIABLE, "").partition("-")[0],  # a node's name may follow
            restarts=number(RESTARTS_VARIABLE),
            job=environment.get("SLURM_JOB_ID", ""),
            requeues=number("SLURM_RESTART_COUNT"),
        )

    def was_before(self, other: Origin) -> bool:
        """Return whether `other` is a later start of this launch or job, after the end or loss of its earlier ranks."""
        same_launch = self.launch != "" and self.launch == other.launch and self.restarts < other.restarts
        same_job = self.job != "" and self.job == other.job and self.requeues < other.requeues
        return same_launch or same_job


def lock_run(path: Path, origin: Origin, wait_s: float = WAIT_SECONDS) -> IO[bytes]:
    """Lock a run until the returned file is closed or this process ends; raise a UserError if another process keeps it.

    The other process gets `wait_s` to end. Its lock outlives it if the machine was lost and the file server still waits
    for that machine; a later start of the same launch or job then creates a new lock file.
    """
    own = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    deadline = time.monotonic() + wait_s
    is_waiting = False
    while True:
        file = path.open("a+b", buffering=0)
        if _lock(file):
            if not _is_at(path, file):  # a later start has replaced the file
                file.close()
                continue
            with contextlib.suppress(OSError):  # on a full disk, the lock works but does not name its holder
                file.truncate(0)
                file.write(json.dumps(own | {"origin": dataclasses.asdict(origin)}).encode())
            return file
        who, earlier = _read(file)
        file.close()
        if time.monotonic() >= deadline:
            if not earlier.was_before(origin):
                raise UserError(
                    f"run '{path.parent.name}' is being trained by {who}. Wait until it ends, or use another "
                    f"--run-name. If that machine is lost, remove {path}."
                )
            print(f"{who}, of an earlier start, is lost: continuing without it", file=sys.stderr, flush=True)
            path.unlink(missing_ok=True)
        elif not is_waiting:
            is_waiting = True
            print(f"run '{path.parent.name}' is held by {who}: waiting {wait_s:.0f} s for it to end", file=sys.stderr)
        time.sleep(min(POLL_SECONDS, wait_s))


def _lock(file: IO[bytes]) -> bool:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in NO_LOCKS:
            print(f"note: {file.name}: cannot be locked ({error.strerror}): never start a run twice", file=sys.stderr)
            return True
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            raise
        return False
    return True


def _is_at(path: Path, file: IO[bytes]) -> bool:
    """Return whether `path` is still the name of this open file."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False


def _read(file: IO[bytes]) -> tuple[str, Origin]:
    """Return a lock's holder and the origin of the holder, which `lock_run` wrote into the file."""
    try:
        file.seek(0)
        content = json.loads(file.read(LARGEST))
        origin = Origin(**content["origin"])
        place = [content[name] for name in ("host", "pid", "since")]
        kinds = [type(value) for value in (*place, *dataclasses.astuple(origin))]
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        kinds = []
    if kinds != [str, int, str, str, int, str, int]:
        return "another process", Origin()
    return one_line(f"pid {place[1]} on {place[0]} since {place[2]}"), origin


LONGEST_NAME = 60  # characters of the data's name in the name of a run
FULL = (errno.ENOSPC, errno.EDQUOT)


def run_folder(config: ObserveSettings, name: str = "") -> RunFolder:
    """Return the folder of the run that a configuration names, or of the run `name` if it names none.

    Raises:
        UserError: if the path in `--log-dir` cannot be used.
    """
    folder = RunFolder(log_folder(), config.run_name or name)
    try:
        if config.log_dir:
            folder = dataclasses.replace(folder, log_dir=Path(config.log_dir).expanduser().resolve())
        folder.metrics.exists()
    except (OSError, RuntimeError, ValueError) as error:
        reason = one_line(getattr(error, "strerror", "") or error)
        raise UserError(f"--log-dir {shown(config.log_dir)}: {reason.rstrip('.')}. Use another folder.") from None
    return folder


def refuse_existing(config: ObserveSettings, folder: RunFolder) -> None:
    """Raise a UserError if the folder contains a run and the configuration forbids resuming.

    The files of a start that failed before it wrote a line to metrics.jsonl are not considered a run.
    """
    if config.resume == "never" and folder.metrics.exists() and folder.metrics.stat().st_size:
        raise UserError(
            f"--run-name {folder.name}: {folder.path} already contains a run. Use another name, or --resume auto to "
            "continue it."
        )


def create_run_folder(config: ObserveSettings, origin: Origin) -> RunFolder:
    """Create the folders of a run and lock the run; called only on rank 0.

    Args:
        config: the configuration.
        origin: what started training; if the launcher has restarted it, training continues in the run's own folder.

    Returns:
        The run's paths, with the locked file, which keeps other processes out until the file is closed.

    Raises:
        UserError: if a folder cannot be written, or if a run of this name is being trained, or exists and is not to be
            resumed.
        AnotherStartNeededError: if the launcher has restarted training and the disk is full.
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
        refuse_another_run()  # again, because the run may have been trained until now
        remove_leftovers_of_run(folder.path, ours=(WEIGHTS, LAST))
        for left in folder.checkpoints.glob(".step-*.tmp"):  # checkpoints that no running process is writing
            shutil.rmtree(left, ignore_errors=True)
        _check_renames(folder)
        with folder.text_log.open("a", encoding="utf-8"), folder.metrics.open("a", encoding="utf-8"):
            pass
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        said = f"--log-dir {folder.log_dir}: cannot write there ({error.strerror}{where})"
        if origin.restarts and error.errno in FULL:
            raise AnotherStartNeededError(f"{said}; the run continues when there is room.") from None
        raise UserError(f"{said}. Use a folder that you can write to.") from None
    return dataclasses.replace(folder, lock=lock)


def make_folders(folder: RunFolder) -> tuple[Path, ...]:
    """Create the missing folders of a run, and return their paths."""
    made = []
    for path in (folder.path, folder.tensorboard, folder.checkpoints):
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.mkdir()
            made.append(path)
    return tuple(made)


@contextlib.contextmanager
def removed_if_refused(folder: RunFolder) -> Iterator[None]:
    """If a UserError ends the block, remove the folders that this start created."""
    try:
        yield
    except UserError:
        for path in folder.made:
            shutil.rmtree(path, ignore_errors=True)
        raise


def new_name(log_dir: Path, name: str) -> str:
    """Create the folder of an unnamed run, and return its name: `name`, followed by -2, -3, ... if it is taken."""
    runs = log_dir / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    for number in count(1):
        one = name if number == 1 else f"{name}-{number}"
        with contextlib.suppress(FileExistsError):
            (runs / one).mkdir()
            break
    return one


def named_after_data(config: TrainConfig) -> TrainConfig:
    """Return the configuration with a run name; if it had none, name the run after its data and create its folder."""
    if config.run_name:
        return config
    stem = Path(os.path.expanduser(config.data.rstrip("/"))).name.partition(".")[0]
    name = slug(stem.rpartition(":")[2]).strip("-_")[:LONGEST_NAME] or "run"
    return dataclasses.replace(config, run_name=new_name(run_folder(config, name).log_dir, name))


def _check_renames(folder: RunFolder) -> None:
    """Try the renames of every save (a folder that contains a file, a file onto a file), or raise a UserError."""
    place = unfinished(folder.checkpoints / "renames", "tmp")
    try:
        (place / "new").mkdir(parents=True)
        for name in ("file", "other"):
            (place / "new" / name).write_text(name)
        (place / "new").rename(place / "old")
        os.replace(place / "old" / "file", place / "old" / "other")
    except OSError as error:
        if error.filename2 is None:  # not a failed rename, but a lack of space or permission
            raise
        raise UserError(  # e.g. on a mounted object store
            f"--log-dir {folder.log_dir}: files cannot be renamed there ({error.strerror}), which checkpoints need. "
            "Use a folder on a disk or a file server, and copy the run when it is done."
        ) from None
    finally:
        shutil.rmtree(place, ignore_errors=True)


def remove_leftovers_of_run(run: Path, ours: Collection[str] = ()) -> None:
    """Remove the unfinished files that dead processes left in a run's own folders; see `remove_leftovers`."""
    checkpoints = run / CHECKPOINTS
    for folder in (run, run / EXPORT, checkpoints, *checkpoints.glob("step-*")):
        remove_leftovers(folder, ours, of_library=True)
