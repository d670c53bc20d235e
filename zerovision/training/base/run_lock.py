"""One training at a time in a run's folder: rank 0 holds a lock that the kernel releases when the process dies.

It is a byte-range lock (`fcntl.lockf`), which an NFS server keeps, so it works across machines; `flock` does not work
everywhere. A process loses such a lock as soon as it closes *any* descriptor of the file, so nothing else in a training
may open it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from zerovision.training.base.errors import UserError, one_line
from zerovision.training.base.heartbeat import LAUNCH_VARIABLE, RESTARTS_VARIABLE

LOCK = ".lock"
WAIT_SECONDS = 15.0  # for the end of a training that is just leaving
POLL_SECONDS = 0.2
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)
LARGEST = 4096  # bytes of a lock file


@dataclass(frozen=True)
class Origin:
    """What started a training.

    Attributes:
        launch: the launch's mark, '' without our launcher.
        restarts: how often that launch has restarted it.
        job: Slurm's job number, '' without one.
        requeues: how often Slurm has requeued the job.
    """

    launch: str = ""
    restarts: int = 0
    job: str = ""
    requeues: int = 0

    @classmethod
    def of(cls, environment: Mapping[str, str]) -> Origin:
        """Read the environment variables of the launcher and of Slurm."""

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
        """Return whether `other` is a later start of the same launch, or of the same Slurm job.

        A launch or job restarts its ranks only after it has ended the earlier ones, or lost their machine.
        """
        same_launch = self.launch != "" and self.launch == other.launch and self.restarts < other.restarts
        same_job = self.job != "" and self.job == other.job and self.requeues < other.requeues
        return same_launch or same_job


def lock_run(path: Path, origin: Origin, wait_s: float = WAIT_SECONDS) -> IO[bytes]:
    """Take the lock of a run; closing the returned file, or the end of this process, releases it.

    If a lock outlives its process, because the machine was lost and the file server waits for it, a later start of the
    same launch or job creates a new file.

    Args:
        path: the lock file; it stays when the lock is released.
        origin: what started this training.
        wait_s: seconds to wait for a training that is stopping.

    Raises:
        UserError: if another training holds it.
        OSError: if the file cannot be created.
    """
    own = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}
    deadline = time.monotonic() + wait_s
    is_waiting = False
    while True:
        file = path.open("a+b", buffering=0)
        if _lock(file):
            if not _is_at(path, file):  # a later start has replaced it
                file.close()
                continue
            with contextlib.suppress(OSError):  # a full disk: locked all the same, without a name
                file.truncate(0)
                file.write(json.dumps(own | {"origin": dataclasses.asdict(origin)}).encode())
            return file
        who, earlier = _read(file)
        file.close()
        if time.monotonic() >= deadline:
            if not earlier.was_before(origin):
                raise UserError(
                    f"run '{path.parent.name}' is being trained by {who}. Wait until it ends, or give another "
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
            print(f"note: {file.name}: no locks there ({error.strerror}): never start a run twice", file=sys.stderr)
            return True
        if error.errno not in (errno.EACCES, errno.EAGAIN):
            raise
        return False
    return True


def _is_at(path: Path, file: IO[bytes]) -> bool:
    """Return whether the file still has that name."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False


def _read(file: IO[bytes]) -> tuple[str, Origin]:
    """Return who holds a lock and what started it, from what `lock_run` wrote into the file."""
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
