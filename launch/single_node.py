"""Trains on this machine: what scripts/launch_distributed.sh hands over to, with its arguments.

python launch/single_node.py mobilenet ddp 2 16 50 --learning-rate 0.003
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from launch.adaptation import Adaptation
from launch.arguments import (
    ENTRY,
    LaunchArguments,
    check_training,
    print_command,
    read_arguments,
    run_launcher,
    run_preflight,
)
from launch.auto_strategy import resolve_strategy
from launch.new_run import check_new_run
from launch.node_launcher import local_ranks_command, malloc_variables
from launch.process_tree import extensions_folder
from launch.supervisor import supervise
from training.base.control_groups import quota_note, usable_cores
from training.base.errors import UserError, shown
from training.config import REPO_ROOT
from training.world.gpus import machine_gpus, visible_gpus
from training.world.launchers import refuse_a_pod_alone
from training.world.network_interfaces import check_chosen_interfaces, free_port

MAX_CPU_RANKS_PER_CORE = 8


def main(arguments: list[str]) -> int:
    """Train as the arguments and the environment say; return the exit code."""
    given = read_arguments("launch_distributed.sh", arguments, os.environ)
    refuse_a_pod_alone(os.environ, given.training)
    given = resolve_strategy(given, nodes=1)
    ranks, present = given.ranks_per_node, machine_gpus()
    gpus = visible_gpus(present, os.environ.get("CUDA_VISIBLE_DEVICES"))
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
    command = rank_command(given, port, gpus, present, config.engine)
    if not gpus:
        limit = f" ({note})" if (note := quota_note()) else ""
        message = f"no GPU found: running {ranks} CPU ranks over gloo on {usable_cores()} cores{limit}"
        print(message, file=sys.stderr, flush=True)
    if given.dry_run:
        print_command(command)
        return 0

    def command_of(restart: int) -> list[str]:
        # A port that was chosen here may be busy for a while after a failure.
        new_port = free_port() if restart and not given.master_port else port
        return rank_command(given, new_port, gpus, present, config.engine)

    adaptation = Adaptation(given.training, ranks, has_gpus=bool(gpus))
    return supervise(command_of, given.stop_timeout, given.max_restarts, adaptation)


def rank_command(
    given: LaunchArguments, port: int, gpus: Sequence[str], present: Sequence[str], engine: str
) -> list[str]:
    """Return the command that starts the ranks, with its variables as arguments of env.

    Args:
        given: arguments of the launcher.
        port: that the ranks meet on.
        gpus: that the ranks may use, empty for CPU ranks.
        present: all GPUs of the machine.
        engine: of the configuration.

    Raises:
        UserError: if the machine has too few cores, or CUDA_VISIBLE_DEVICES names what deepspeed cannot use.
    """
    ranks, cores = given.ranks_per_node, usable_cores()
    if not gpus and ranks > cores * MAX_CPU_RANKS_PER_CORE:
        most = cores * MAX_CPU_RANKS_PER_CORE
        raise UserError(f"no GPU found, and {ranks} CPU ranks are too many for {cores} cores: at most {most}.")
    # More threads than cores is not a little slower: 2 ranks with 2 threads on 2 cores took 15 times as long.
    threads = os.environ.get("OMP_NUM_THREADS") or max(1, cores // ranks)
    variables = [f"OMP_NUM_THREADS={threads}", f"TORCH_EXTENSIONS_DIR={extensions_folder()}"]
    variables += [f"{name}={value}" for name, value in malloc_variables(os.environ, bool(gpus)).items()]
    port_flag = ["--master_port", str(port)]
    if given.launcher == "deepspeed":
        gpu_flags = ["--num_gpus", str(ranks)]
        if not gpus:
            variables.append("DS_ACCELERATOR=cpu")  # else it warns that it found no GPU
        if gpus and "CUDA_VISIBLE_DEVICES" in os.environ:  # deepspeed ignores it beside --num_gpus
            gpu_flags = ["--include", f"localhost:{','.join(_numbers(gpus, present)[:ranks])}"]
            variables = ["-u", "CUDA_VISIBLE_DEVICES", *variables]
        # --hostfile: a file of the machine's own at deepspeed's default place must not turn this into a multi-node run.
        others = ["--hostfile", "/dev/null", *port_flag, "--log_level", "critical"]
        start = [shutil.which("deepspeed") or "deepspeed", *gpu_flags, *others]
    elif given.launcher == "torchrun":
        flags = ["--nproc_per_node", str(ranks), "--master_addr", "127.0.0.1", *port_flag]
        start = [sys.executable, str(REPO_ROOT / "launch/torchrun.py"), *flags]
    else:
        variables.append(f"LOCAL_WORLD_SIZE={ranks}")  # for the supervisor, which reads it in /proc
        start = [*local_ranks_command(engine, bool(gpus)), "--nproc_per_node", str(ranks), *port_flag]
    return ["env", *variables, *start, ENTRY, *given.training]


def _numbers(gpus: Sequence[str], present: Sequence[str]) -> Sequence[str]:
    """Return the GPUs if all are numbers, the only names that deepspeed takes."""
    for gpu in gpus:
        if gpu not in present:
            allowed = " ".join(present)
            raise UserError(
                f"CUDA_VISIBLE_DEVICES {shown(gpu)}: expected GPU numbers out of {allowed} (or LAUNCHER=direct)."
            )
    return gpus


if __name__ == "__main__":
    run_launcher(main)
