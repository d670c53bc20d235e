"""Runs a launcher (deepspeed or torchrun), stays in charge of every process that it starts, and starts it again.

    STOP_TIMEOUT=300 MAX_RESTARTS=3 TORCH_EXTENSIONS_DIR=.venv/torch_extensions python scripts/supervise.py \\
        deepspeed --num_gpus 2 --master_port 29500 scripts/train_distributed.py --model-type mobilenet

launch_distributed.sh starts it so and explains the variables; CHOSEN_PORT is the master port that it chose itself,
which a restart replaces by another free one.

What the launchers alone get wrong, each measured: SIGTERM to deepspeed reaches rank 1 up to 30 seconds after rank 0;
a launcher killed with -9 leaves its ranks running, and deepspeed then exits with 0; a rank that waits for a dead one
keeps them waiting for 30 seconds, and a rank that hangs for ever; a lock left by a compile job that was killed makes
every later start wait for ever. So the launcher runs in a session of its own, where no Ctrl-C reaches it, the ranks
get the signals from here, all at once, and whatever is left at the end is ended.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.attempt import PASSED_ON, Attempt
from scripts.launch_processes import MARK, POLL_SECONDS, Launch, remove_stale_build_locks
from training.errors import USER_ERROR_EXIT_CODE
from training.launch_folder import FOLDER_VARIABLE, RESTARTS_VARIABLE, LaunchFolder

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
LONGEST_DELAY_SECONDS = 30.0


class Restarts:
    """Counts restarts, and says how long to wait before each."""

    def __init__(self, allowed: int) -> None:
        """Allow so many restarts in a row without progress, which is a newer checkpoint than any before."""
        self.total = 0
        self._allowed = allowed
        self._in_a_row = 0
        self._position = -1

    def after_failure(self, reason: str, position: int) -> float | None:
        """Say on stderr what follows; return the seconds to wait before the next start, None where none follows.

        Args:
            reason: what happened, without a full stop.
            position: of the newest checkpoint saved since the last start, -1 for none.
        """
        if position > self._position:
            self._position, self._in_a_row = position, 0
        if self._in_a_row >= self._allowed:
            print(f"{reason}: given up after {self._in_a_row} restart(s) without progress", file=sys.stderr)
            return None
        delay_s = min(2.0**self._in_a_row, LONGEST_DELAY_SECONDS) if self._in_a_row else 0.0
        self.total, self._in_a_row = self.total + 1, self._in_a_row + 1
        when = f" in {delay_s:g} s" if delay_s else ""
        print(f"{reason}: restart {self._in_a_row} of {self._allowed}{when}", file=sys.stderr, flush=True)
        return delay_s


def supervise(
    command: list[str], folder: LaunchFolder, stop_timeout_s: float, restarts: Restarts, chosen_port: str, locks: Path
) -> int:
    """Run the command, again after every failure; return its exit code once no process of it is left.

    SIGINT, SIGTERM, SIGHUP (which the ranks get as SIGTERM) and SIGUSR1 go to all ranks at once; a second SIGINT
    ends them.

    Args:
        command: the launcher and its arguments, those of the training entry last.
        folder: an empty folder in which the ranks report; removed at the end.
        stop_timeout_s: seconds the ranks have to save and leave after a signal.
        restarts: how many there may be.
        chosen_port: the master port in the command if a restart may replace it, else ''.
        locks: the folder of compiled operators, where a killed compile job leaves its lock.
    """
    launch = Launch()
    guard_pipe = guard(launch, folder.path, stop_timeout_s)
    received: list[int] = []
    for heard in PASSED_ON:
        if signal.getsignal(heard) != signal.SIG_IGN:  # as under nohup
            signal.signal(heard, lambda given, _frame: received.append(given))
    environment = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    environment |= {MARK: launch.mark, FOLDER_VARIABLE: str(folder.path)}
    resuming: list[str] = []
    try:
        while True:
            remove_stale_build_locks(locks)
            attempt = Attempt(launch, folder, received, stop_timeout_s)
            ending = attempt.run(command + resuming, environment | {RESTARTS_VARIABLE: str(restarts.total)})
            if ending.is_final:
                return ending.code
            delay_s = restarts.after_failure(ending.reason, folder.checkpoint_position())
            if delay_s is None:
                return ending.code
            if number := signal_within(delay_s, received):
                return 128 + number
            if attempt.watch.run_name:
                resuming = [f"--run-name={attempt.watch.run_name}"]
            command = with_free_port(command, chosen_port)
            folder.clear()
    finally:
        shutil.rmtree(folder.path, ignore_errors=True)
        with contextlib.suppress(BrokenPipeError):
            os.write(guard_pipe, b"0")


def guard(launch: Launch, folder: Path, timeout_s: float) -> int:
    """Start a process that stops the ranks should this one be killed with -9; a byte on the returned pipe ends it."""
    reading, writing = os.pipe()
    if os.fork():
        os.close(reading)
        return writing
    os.setsid()
    os.close(writing)
    if not os.read(reading, 1):
        launch.stop(signal.SIGTERM, timeout_s)
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def signal_within(seconds: float, received: list[int]) -> int:
    """Wait; return the signal passed on to ranks that was received before or meanwhile, 0 for none."""
    deadline = time.monotonic() + seconds
    while not received and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    return PASSED_ON[signal.Signals(received[0])] if received else 0


def with_free_port(command: list[str], chosen_port: str) -> list[str]:
    """Return the command with another master port: the old one may be busy for a while."""
    with socket.socket() as probe:
        probe.bind(("", 0))
        port = str(probe.getsockname()[1])
    flags = ["", *command[:-1]]
    pairs = zip(flags, command, strict=True)
    return [port if (flag, word) == ("--master_port", chosen_port) else word for flag, word in pairs]


def main() -> int:
    """Supervise the command given on the command line, as the environment says."""
    stop_timeout_s, max_restarts = float(os.environ["STOP_TIMEOUT"]), int(os.environ["MAX_RESTARTS"])
    chosen_port, locks = os.environ.get("CHOSEN_PORT", ""), Path(os.environ["TORCH_EXTENSIONS_DIR"])
    try:
        folder = LaunchFolder(Path(tempfile.mkdtemp(prefix="zerovision-")))
    except OSError as error:
        print(f"error: no temporary folder: {error}. Set TMPDIR to a folder that can be written.", file=sys.stderr)
        return USER_ERROR_EXIT_CODE
    return supervise(sys.argv[1:], folder, stop_timeout_s, Restarts(max_restarts), chosen_port, locks)


if __name__ == "__main__":
    sys.exit(main())
