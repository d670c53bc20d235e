"""The ranks' side of the heartbeats: small files in a temporary folder, which zerovision/launch/process_tree.py reads.

The launcher makes the folder and passes its path in `FOLDER_VARIABLE`. It contains:

    rank-<r>.json     the last heartbeat of rank r: one record of `RECORD_BYTES` bytes, overwritten in place
    stack-<r>.txt     the Python stacks of rank r, written on SIGUSR2
    run-name          the run's name, for a restart
    checkpoint        the position of the newest checkpoint saved since the last start
    owner             the mark of the launch, locked by the process that made the folder
    success           written by rank 0 when training is done; without it an exit code of 0 counts as a failure

No rank ever fails because of this folder: what cannot be written is left out. It is also the ranks' TMPDIR, so that a
killed process's files are removed with it.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import faulthandler
import json
import os
import signal
import socket
import sys
import time
import zlib
from io import TextIOWrapper
from pathlib import Path

from zerovision.training.base.files import replacing

FOLDER_VARIABLE = "ZEROVISION_LAUNCH_FOLDER"
LAUNCH_VARIABLE = "ZEROVISION_LAUNCH"  # in the environment of everything that one launch starts: survives re-parenting
CALLER_VARIABLE = "ZEROVISION_CALLER"  # process that starts the launcher, which stops the ranks if it dies
RESTARTS_VARIABLE = "ZEROVISION_RESTARTS"  # how often this launch has been restarted: 0 at the first start
RUN_ID_VARIABLE = "ZEROVISION_RUN_ID"  # of one start: the prefix of its ranks' store
RUN_NAME, CHECKPOINT, SUCCESS = "run-name", "checkpoint", "success"
ENDED = "ended"  # the phase of a rank's last beat
RECORD_BYTES = 512
CHECKSUM_BYTES = 9  # 8 hexadecimal digits and a line feed
LONGEST_NAME = 80  # of a phase or a host: a record must fit its bytes
PR_SET_PDEATHSIG = 1
SLOW_PHASE = 5  # start-up, the first step and saves may take this many hang timeouts
LEAVE_SECONDS = 60.0  # that a rank which has ended may wait for whoever reads what it has printed
SLOW_IMPORT_S = 300.0  # a thousand ranks that read torch from one network disk at once


@dataclasses.dataclass(frozen=True)
class Heartbeat:
    """A rank's heartbeat.

    Attributes:
        rank: the rank's number in its world.
        host: name of the machine.
        pid: process of the rank.
        phase: the current phase, such as "step"; `ENDED` in the last heartbeat.
        step: optimizer steps done, -1 before the first.
        time: wall clock, seconds since 1970.
        monotonic: `time.monotonic` of this machine, in seconds.
        allowed_s: seconds within which the next beat is due.
        exit_code: the rank's exit code, in its last beat.
    """

    rank: int
    host: str
    pid: int
    phase: str
    step: int
    time: float
    monotonic: float
    allowed_s: float
    exit_code: int | None = None

    def record(self) -> bytes:
        """Return the heartbeat as `RECORD_BYTES` bytes: JSON, spaces, and a checksum over both."""
        text = json.dumps(dataclasses.asdict(self)).encode().ljust(RECORD_BYTES - CHECKSUM_BYTES)
        return text + b"%08x\n" % zlib.crc32(text)


def beat_of(record: bytes) -> Heartbeat | None:
    """Return the heartbeat in a record; None if it was read during a write."""
    text, checksum = record[:-CHECKSUM_BYTES], record[-CHECKSUM_BYTES:]
    return Heartbeat(**json.loads(text)) if checksum == b"%08x\n" % zlib.crc32(text) else None


class HeartbeatWriter:
    """Writes one rank's heartbeats. A method that cannot write does nothing."""

    def __init__(self, folder: Path | None, rank: int, hang_timeout_s: float) -> None:
        """Open the record of this rank.

        Args:
            folder: the launch's folder; None (started without our launcher) makes every method do nothing.
            rank: this rank's number.
            hang_timeout_s: seconds without a heartbeat after which the rank counts as hung, unless a heartbeat says
                otherwise.
        """
        self._folder, self._rank, self._hang_timeout_s = folder, rank, hang_timeout_s
        self._host = socket.gethostname()[:LONGEST_NAME]
        self._stacks: TextIOWrapper | None = None  # faulthandler writes to its descriptor: it must stay open
        self._descriptor = -1
        if folder is not None:
            self._file = folder / f"rank-{rank}.json"
            with contextlib.suppress(OSError):
                self._descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)

    @classmethod
    def of_this_process(cls, hang_timeout_s: float) -> HeartbeatWriter:
        """Return the writer of this rank, after its first heartbeat; it writes nothing without our launcher."""
        folder, rank = os.environ.get(FOLDER_VARIABLE), os.environ.get("RANK", "0")
        writer = cls(Path(folder) if folder else None, int(rank) if rank.isdigit() else 0, hang_timeout_s)
        writer.watch_stacks()
        if "LOCAL_RANK" in os.environ:
            end_with_parent()
        writer.beat("import", allowed_s=SLOW_IMPORT_S + hang_timeout_s)
        return writer

    def beat(self, phase: str, step: int = -1, allowed_s: float | None = None) -> None:
        """Write a heartbeat; the next one is due within `allowed_s` seconds (by default the hang timeout).

        It takes microseconds, so it may be called at every optimizer step.
        """
        self._write(phase, step, self._hang_timeout_s if allowed_s is None else allowed_s)

    def ended(self, exit_code: int) -> None:
        """Write the last beat, with the exit code of this rank."""
        self._write(ENDED, -1, self._hang_timeout_s + LEAVE_SECONDS, exit_code)

    def run_name(self, name: str) -> None:
        """Write the run's name on rank 0; a restart continues in its folder."""
        self._replace(RUN_NAME, name)

    def checkpoint_saved(self, position: int) -> None:
        """Write the position of a complete checkpoint on rank 0; a newer one resets the restart count."""
        self._replace(CHECKPOINT, str(position))

    def succeeded(self) -> None:
        """On rank 0, mark the training as done: only then does an exit code of 0 mean success."""
        if self._rank == 0:
            self._replace(SUCCESS, "")

    def watch_stacks(self) -> None:
        """Write the Python stacks of all threads to the folder on every SIGUSR2, even while Python is stuck."""
        if self._folder is None:
            return
        with contextlib.suppress(OSError):
            self._stacks = stack_path(self._folder, self._rank).open("w")
            faulthandler.register(signal.SIGUSR2, file=self._stacks, all_threads=True)

    def _write(self, phase: str, step: int, allowed_s: float, exit_code: int | None = None) -> None:
        if self._folder is None or self._descriptor < 0:
            return
        now, clock, short = time.time(), time.monotonic(), phase[:LONGEST_NAME]
        beat = Heartbeat(self._rank, self._host, os.getpid(), short, step, now, clock, allowed_s, exit_code)
        try:
            os.pwrite(self._descriptor, beat.record(), 0)
        except OSError:
            # A record that grows old would look like a hang: a rank that cannot write is not watched.
            self._descriptor = -1
            with contextlib.suppress(OSError):
                self._file.unlink()

    def _replace(self, name: str, text: str) -> None:
        if self._folder is None:
            return
        with contextlib.suppress(OSError), replacing(self._folder / name) as temporary:
            temporary.write_text(text)


def stack_path(folder: Path, rank: int) -> Path:
    """Return the file of a rank's stacks."""
    return folder / f"stack-{rank}.txt"


def end_with_parent(parent: int = 0) -> None:
    """Request SIGTERM when the parent process dies; does nothing without prctl.

    Call this only in processes that a launcher started; otherwise a process would end with its shell. The kernel sends
    the signal when the parent's *thread* that created this process ends, so launchers create ranks in their main
    thread.

    Args:
        parent: the parent's process id, 0 if unknown.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        now = os.getppid()
        if now != parent if parent else now == 1 and not _process_1_started_us():  # it died before
            os.kill(os.getpid(), signal.SIGTERM)


def end_with_caller() -> None:
    """Call `end_with_parent` for the process that `CALLER_VARIABLE` names, if there is one."""
    if caller := os.environ.pop(CALLER_VARIABLE, ""):
        end_with_parent(int(caller))


def _process_1_started_us() -> bool:
    """Whether process 1 is the launcher itself, as in a container; its command line then names our script."""
    script = os.fsencode(Path(sys.argv[0]).name)
    return bool(script) and script in Path("/proc/1/cmdline").read_bytes()
