"""The ranks' side of the heartbeats: small files in a temporary folder, which zerovision/launch/process_tree.py reads.

The launcher creates the folder and passes its path in `FOLDER_VARIABLE`. The folder contains:

    rank-<r>.json     the last heartbeat of rank r: one record of `RECORD_BYTES` bytes, overwritten in place
    stack-<r>.txt     the Python stacks of rank r, written on SIGUSR2
    run-name          the run's name, for a restart
    checkpoint        the position of the newest checkpoint saved since the last start
    owner             the mark of the launch, locked by the process that created the folder
    success           written by rank 0 when training is done; without this file, an exit code of 0 means a failure

No rank ever fails because of this folder: a file that cannot be written is skipped. The folder is also the ranks'
TMPDIR, so that the temporary files of a killed process are removed with it.
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
LAUNCH_VARIABLE = "ZEROVISION_LAUNCH"  # set for every process that a launch starts; survives re-parenting
CALLER_VARIABLE = "ZEROVISION_CALLER"  # id of the launcher's caller; if it dies, the launcher stops the ranks
RESTARTS_VARIABLE = "ZEROVISION_RESTARTS"  # number of times that this launch has been restarted: 0 at the first start
RUN_ID_VARIABLE = "ZEROVISION_RUN_ID"  # identifies one start; prefix of the keys in its ranks' store
RUN_NAME, CHECKPOINT, SUCCESS = "run-name", "checkpoint", "success"
ENDED = "ended"  # the phase in a rank's last heartbeat
RECORD_BYTES = 512
CHECKSUM_BYTES = 9  # 8 hexadecimal digits and a line feed
LONGEST_NAME = 80  # characters of a phase or a host name, so that a heartbeat fits into its record
PR_SET_PDEATHSIG = 1
SLOW_PHASE = 5  # start-up, the first step and saves may take this many hang timeouts
OUTPUT_SECONDS = 60.0  # how long a rank that has finished may wait for the reader of its output
SLOW_IMPORT_S = 300.0  # for a thousand ranks that import torch from one network disk at the same time


@dataclasses.dataclass(frozen=True)
class Heartbeat:
    """A rank's heartbeat.

    Attributes:
        rank: the rank's number in its world.
        host: name of the machine.
        pid: process id of the rank.
        phase: the current phase, such as "step"; `ENDED` in the last heartbeat.
        step: number of optimizer steps done; -1 before the first.
        time: wall-clock time, in seconds since 1970.
        monotonic: `time.monotonic` of this machine, in seconds.
        allowed_s: seconds within which the next heartbeat is due.
        exit_code: the rank's exit code, in its last heartbeat; None in all others.
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
    """Return the heartbeat in a record, or None if the record was read during a write."""
    text, checksum = record[:-CHECKSUM_BYTES], record[-CHECKSUM_BYTES:]
    return Heartbeat(**json.loads(text)) if checksum == b"%08x\n" % zlib.crc32(text) else None


class HeartbeatWriter:
    """Writes one rank's heartbeats. A method that cannot write does nothing."""

    def __init__(self, folder: Path | None, rank: int, hang_timeout_s: float) -> None:
        """Open the record of this rank.

        Args:
            folder: the launch's folder; with None, for a start without our launcher, every method does nothing.
            rank: this rank's number.
            hang_timeout_s: seconds without a heartbeat after which the rank is considered hung, unless its last
                heartbeat sets a different limit.
        """
        self._folder, self._rank, self._hang_timeout_s = folder, rank, hang_timeout_s
        self._host = socket.gethostname()[:LONGEST_NAME]
        self._stacks: TextIOWrapper | None = None  # faulthandler writes to its descriptor, so it must stay open
        self._descriptor = -1
        if folder is not None:
            self._file = folder / f"rank-{rank}.json"
            with contextlib.suppress(OSError):
                self._descriptor = os.open(self._file, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)

    @classmethod
    def of_this_process(cls, hang_timeout_s: float) -> HeartbeatWriter:
        """Return this rank's writer after writing its first heartbeat; without our launcher, nothing is written."""
        folder, rank = os.environ.get(FOLDER_VARIABLE), os.environ.get("RANK", "0")
        writer = cls(Path(folder) if folder else None, int(rank) if rank.isdigit() else 0, hang_timeout_s)
        writer.watch_stacks()
        if "LOCAL_RANK" in os.environ:
            end_with_parent()
        writer.beat("import", allowed_s=SLOW_IMPORT_S + hang_timeout_s)
        return writer

    def beat(self, phase: str, step: int = -1, allowed_s: float | None = None) -> None:
        """Write a heartbeat; the next one is due within `allowed_s` seconds (by default the hang timeout).

        A call takes microseconds, so this may be called at every optimizer step.
        """
        self._write(phase, step, self._hang_timeout_s if allowed_s is None else allowed_s)

    def ended(self, exit_code: int) -> None:
        """Write the last heartbeat, with the exit code of this rank."""
        self._write(ENDED, -1, self._hang_timeout_s + OUTPUT_SECONDS, exit_code)

    def run_name(self, name: str) -> None:
        """On rank 0, write the run's name, so that a restart continues in the run's folder."""
        self._replace(RUN_NAME, name)

    def checkpoint_saved(self, position: int) -> None:
        """On rank 0, write the position of a complete checkpoint; a newer position resets the restart count."""
        self._replace(CHECKPOINT, str(position))

    def succeeded(self) -> None:
        """On rank 0, mark training as done; without this mark, an exit code of 0 does not mean success."""
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
        if self._descriptor < 0:
            return
        now, clock, short = time.time(), time.monotonic(), phase[:LONGEST_NAME]
        beat = Heartbeat(self._rank, self._host, os.getpid(), short, step, now, clock, allowed_s, exit_code)
        try:
            os.pwrite(self._descriptor, beat.record(), 0)
        except OSError:
            # A stale record would look like a hang, so a rank that cannot write is no longer watched.
            self._descriptor = -1
            with contextlib.suppress(OSError):
                self._file.unlink()

    def _replace(self, name: str, text: str) -> None:
        if self._folder is None:
            return
        with contextlib.suppress(OSError), replacing(self._folder / name) as temporary:
            temporary.write_text(text)


def stack_path(folder: Path, rank: int) -> Path:
    """Return the path of the file for a rank's stacks."""
    return folder / f"stack-{rank}.txt"


def end_with_parent(parent: int = 0) -> None:
    """Request a SIGTERM for this process when its parent dies; do nothing without prctl.

    Call this only in processes that a launcher started; otherwise a process would end with its shell. The kernel sends
    the signal when the parent's *thread* that created this process ends, so launchers create ranks in their main
    thread.

    Args:
        parent: the parent's process id, or 0 if unknown.
    """
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        now = os.getppid()
        if now != parent if parent else now == 1 and not _process_1_started_us():  # the parent has already died
            os.kill(os.getpid(), signal.SIGTERM)


def end_with_caller() -> None:
    """Call `end_with_parent` for the process that `CALLER_VARIABLE` names, if the variable is set."""
    if caller := os.environ.pop(CALLER_VARIABLE, ""):
        end_with_parent(int(caller))


def _process_1_started_us() -> bool:
    """Return whether process 1 is the launcher, as in a container, whose command line contains our script's name."""
    script = os.fsencode(Path(sys.argv[0]).name)
    return bool(script) and script in Path("/proc/1/cmdline").read_bytes()
