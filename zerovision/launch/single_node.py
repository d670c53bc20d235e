"""Trains on this machine: what scripts/launch_distributed.sh hands over to, with its arguments.

python zerovision/launch/single_node.py mobilenet ddp 2 16 50
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from zerovision.launch.arguments import (
    ENTRY,
    LaunchArguments,
    check_training,
    print_command,
    read_arguments,
    run_launcher,
    run_preflight,
)
from zerovision.launch.before_start import check_new_run, resolve_strategy
from zerovision.launch.launch_folder import launch_environment, launch_folder
from zerovision.launch.node_launcher import NodeLauncher, local_ranks_command, malloc_variables
from zerovision.launch.node_run import NodeRun, receive_signals
from zerovision.launch.process_tree import Launch, extensions_folder, remove_stale_build_locks
from zerovision.launch.restart_policy import Adaptation, RestartPolicy, Started, start_until_done
from zerovision.training.base.control_groups import quota_note, usable_cores
from zerovision.training.base.errors import UserError
from zerovision.training.base.heartbeat import RESTARTS_VARIABLE, RUN_ID_VARIABLE
from zerovision.training.world.gpus import machine_gpus, visible_gpus
from zerovision.training.world.launchers import refuse_a_pod_alone, remember_line
from zerovision.training.world.network_interfaces import check_chosen_interfaces, free_port

MAX_CPU_RANKS_PER_CORE = 8


def main(arguments: list[str]) -> int:
    """Train as the arguments and the environment say; return the exit code."""
    given = read_arguments("launch_distributed.sh", arguments, os.environ)
    refuse_a_pod_alone(os.environ)
    given = resolve_strategy(given, nodes=1)
    ranks, gpus = given.ranks_per_node, visible_gpus(machine_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES"))
    if gpus and ranks > len(gpus):
        raise UserError(f"{ranks} GPUs asked for, {len(gpus)} present: ask for at most {len(gpus)}.")
    if ranks > 1:
        check_chosen_interfaces(os.environ, has_gpus=bool(gpus))
    config = check_training(given.training)
    check_new_run(config, [ranks])
    if code := run_preflight(given, given.training, "--here"):
        return code
    try:
        port = free_port(given.master_port)
    except OSError:
        raise UserError(
            f"port {given.master_port} is taken: give another one, or none to have a free one chosen."
        ) from None
    variables, command = rank_command(given, port, has_gpus=bool(gpus), engine=config.engine)
    if not gpus:
        limit = f" ({note})" if (note := quota_note()) else ""
        message = f"no GPU found: running {ranks} CPU ranks over gloo on {usable_cores()} cores{limit}"
        print(message, file=sys.stderr, flush=True)
    if given.dry_run:
        print_command(["env", *(f"{name}={value}" for name, value in variables.items()), *command])
        return 0

    remember_line(["bash"], given.script, arguments)

    def command_of(restart: int) -> list[str]:
        # A port that was chosen here may be busy for a while after a failure.
        new_port = free_port() if restart and not given.master_port else port
        return rank_command(given, new_port, has_gpus=bool(gpus), engine=config.engine)[1]

    adaptation = Adaptation(given.training, ranks, has_gpus=bool(gpus))
    return supervise(command_of, variables, given.stop_timeout, given.max_restarts, adaptation)


def rank_command(given: LaunchArguments, port: int, *, has_gpus: bool, engine: str) -> tuple[dict[str, str], list[str]]:
    """Return the variables and the command that start the ranks.

    Args:
        given: arguments of the launcher.
        port: that the ranks meet on.
        has_gpus: whether the ranks use GPUs.
        engine: of the configuration.

    Raises:
        UserError: if the machine has too few cores.
    """
    ranks, cores = given.ranks_per_node, usable_cores()
    if not has_gpus and ranks > cores * MAX_CPU_RANKS_PER_CORE:
        most = cores * MAX_CPU_RANKS_PER_CORE
        raise UserError(f"no GPU found, and {ranks} CPU ranks are too many for {cores} cores: at most {most}.")
    # More threads than cores is not a little slower: 2 ranks with 2 threads on 2 cores took 15 times as long.
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, cores // ranks))
    variables = {"OMP_NUM_THREADS": threads, "TORCH_EXTENSIONS_DIR": extensions_folder()}
    variables |= malloc_variables(os.environ, has_gpus)
    start = [*local_ranks_command(engine, has_gpus), "--nproc_per_node", str(ranks), "--master_port", str(port)]
    return variables, [*start, f"--stop_timeout={given.stop_timeout}", ENTRY, *given.training]


def supervise(
    command_of: Callable[[int], list[str]],
    variables: Mapping[str, str],
    stop_timeout_s: float,
    max_restarts: int,
    adaptation: Adaptation,
) -> int:
    """Run the ranks, again after every failure; return the exit code once no process of them is left.

    They are in a session of their own, where no Ctrl-C reaches them. SIGINT, SIGTERM, SIGHUP (which the ranks get as
    SIGTERM) and SIGUSR1 go from here to all ranks at once; a second SIGINT ends them.

    Args:
        command_of: returns the command that starts the ranks, for a number of restarts.
        variables: of the ranks, beside those of this process.
        stop_timeout_s: seconds the ranks have to save and leave after a signal.
        max_restarts: restarts allowed in a row without a newer checkpoint.
        adaptation: decides what follows if memory was short.

    Raises:
        UserError: if no temporary folder can be made.
    """
    launch = Launch()
    with launch_folder(launch) as folder, contextlib.closing(NodeLauncher()) as launcher:
        received = receive_signals()
        environment = launch_environment(launch, folder, {**os.environ, **variables})

        def start(restart: int, resuming: list[str]) -> Started:
            folder.clear()
            remove_stale_build_locks(Path(extensions_folder()))
            node_run = NodeRun(launch, launcher, folder, received, stop_timeout_s)
            compiled = f"{folder.path}/compiled-{restart}"  # a compiler that was killed leaves half a library in it
            of_this_start = {"TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", compiled)}
            of_this_start |= {RESTARTS_VARIABLE: str(restart), RUN_ID_VARIABLE: secrets.token_hex(8)}
            ending = node_run.run(command_of(restart) + resuming, environment | of_this_start)
            return Started(ending, node_run.monitor.run_name, folder.checkpoint_position())

        return start_until_done(start, RestartPolicy(max_restarts), adaptation, received).ending.code


if __name__ == "__main__":
    run_launcher(main)
