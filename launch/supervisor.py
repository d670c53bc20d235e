"""Runs the launcher of one machine's ranks, stays in charge of every process that it starts, and starts it again.

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
from collections.abc import Callable
from pathlib import Path

from launch.adaptation import Adaptation
from launch.node_launcher import NodeLauncher
from launch.node_run import NodeRun, receive_signals
from launch.process_tree import Launch, extensions_folder, remove_stale_build_locks
from launch.restart_policy import RestartPolicy, Started, start_until_done
from launch.temporary_folder import launch_environment, launch_folder
from training.base.heartbeat import RESTARTS_VARIABLE, SECRET_VARIABLE


def supervise(
    command_of: Callable[[int], list[str]], stop_timeout_s: float, max_restarts: int, adaptation: Adaptation
) -> int:
    """Run a launcher, again after every failure; return the exit code once no process of it is left.

    SIGINT, SIGTERM, SIGHUP (which the ranks get as SIGTERM) and SIGUSR1 go to all ranks at once; a second SIGINT
    ends them.

    Args:
        command_of: returns the launcher and its arguments, those of the training entry last, for a number of restarts.
        stop_timeout_s: seconds the ranks have to save and leave after a signal.
        max_restarts: restarts allowed in a row without a newer checkpoint.
        adaptation: decides what follows if memory was short.

    Raises:
        UserError: if no temporary folder can be made.
    """
    launch = Launch()
    with launch_folder(launch, stop_timeout_s) as folder, contextlib.closing(NodeLauncher()) as launcher:
        received = receive_signals()
        environment = launch_environment(launch, folder, os.environ)

        def start(restart: int, resuming: list[str]) -> Started:
            folder.clear()
            remove_stale_build_locks(Path(extensions_folder()))
            node_run = NodeRun(launch, launcher, folder, received, stop_timeout_s)
            compiled = f"{folder.path}/compiled-{restart}"  # a compiler that was killed leaves half a library in it
            of_this_start = {"TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", compiled)}
            of_this_start |= {RESTARTS_VARIABLE: str(restart), SECRET_VARIABLE: secrets.token_hex(32)}
            ending = node_run.run(command_of(restart) + resuming, environment | of_this_start)
            return Started(ending, node_run.monitor.run_name, folder.checkpoint_position())

        return start_until_done(start, RestartPolicy(max_restarts), adaptation, received).ending.code
