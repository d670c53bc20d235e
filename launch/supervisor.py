"""Runs a launcher (deepspeed or torchrun), stays in charge of every process that it starts, and starts it again.

    STOP_TIMEOUT=300 MAX_RESTARTS=3 TORCH_EXTENSIONS_DIR=.venv/torch_extensions python launch/supervisor.py \\
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
import secrets
import shutil
import signal
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from launch.node_run import PASSED_ON, NodeRun
from launch.process_tree import MARK, Launch, remove_stale_build_locks
from launch.restart_policy import RestartPolicy, Started, start_until_done
from launch.temporary_folder import make_temporary_folder, private_variables
from training.errors import USER_ERROR_EXIT_CODE
from training.observe.heartbeat import FOLDER_VARIABLE, RESTARTS_VARIABLE, SECRET_VARIABLE, HeartbeatFolder
from training.parallel.network_interfaces import free_port

MOST_DESCRIPTORS = 4096
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")


def supervise(
    command: list[str],
    launch: Launch,
    folder: HeartbeatFolder,
    stop_timeout_s: float,
    restarts: RestartPolicy,
    chosen_port: str,
    locks: Path,
) -> int:
    """Run the command, again after every failure; return its exit code once no process of it is left.

    SIGINT, SIGTERM, SIGHUP (which the ranks get as SIGTERM) and SIGUSR1 go to all ranks at once; a second SIGINT
    ends them.

    Args:
        command: the launcher and its arguments, those of the training entry last.
        launch: what is started.
        folder: an empty folder in which the ranks report; removed at the end.
        stop_timeout_s: seconds the ranks have to save and leave after a signal.
        restarts: how many there may be.
        chosen_port: the master port in the command if a restart may replace it, else ''.
        locks: the folder of compiled operators, where a killed compile job leaves its lock.
    """
    guard_pipe = guard(launch, folder.path, stop_timeout_s)
    received: list[int] = []
    for heard in PASSED_ON:
        if signal.getsignal(heard) != signal.SIG_IGN:  # as under nohup
            signal.signal(heard, lambda given, _frame: received.append(given))
    environment = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    environment |= {MARK: launch.mark, FOLDER_VARIABLE: str(folder.path)}
    environment |= private_variables(folder.path, environment)

    def start(restart: int, resuming: list[str]) -> Started:
        folder.clear()
        remove_stale_build_locks(locks)
        words = with_free_port(command, chosen_port) if restart else command
        attempt = NodeRun(launch, folder, received, stop_timeout_s)
        of_this_start = {RESTARTS_VARIABLE: str(restart), SECRET_VARIABLE: secrets.token_hex(32)}
        ending = attempt.run(words + resuming, environment | of_this_start)
        return Started(ending, attempt.watch.run_name, folder.checkpoint_position())

    try:
        return start_until_done(start, restarts, received)[0].code
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
    # Whoever waits for the end of the supervisor's own connections shall not wait for this process.
    os.closerange(3, reading)
    os.closerange(reading + 1, MOST_DESCRIPTORS)
    if not os.read(reading, 1):
        launch.stop(signal.SIGTERM, timeout_s)
        shutil.rmtree(folder, ignore_errors=True)
    os._exit(0)


def with_free_port(command: list[str], chosen_port: str) -> list[str]:
    """Return the command with another master port: the old one may be busy for a while."""
    port = str(free_port())
    flags = ["", *command[:-1]]
    pairs = zip(flags, command, strict=True)
    return [port if (flag, word) == ("--master_port", chosen_port) else word for flag, word in pairs]


def main() -> int:
    """Supervise the command given on the command line, as the environment says."""
    stop_timeout_s, max_restarts = float(os.environ["STOP_TIMEOUT"]), int(os.environ["MAX_RESTARTS"])
    chosen_port, locks = os.environ.get("CHOSEN_PORT", ""), Path(os.environ["TORCH_EXTENSIONS_DIR"])
    launch = Launch()
    try:
        folder = make_temporary_folder(launch.mark)
    except OSError as error:
        print(f"error: no temporary folder: {error}. Set TMPDIR to a folder that can be written.", file=sys.stderr)
        return USER_ERROR_EXIT_CODE
    return supervise(sys.argv[1:], launch, folder, stop_timeout_s, RestartPolicy(max_restarts), chosen_port, locks)


if __name__ == "__main__":
    sys.exit(main())
