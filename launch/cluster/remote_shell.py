"""The commands that start a program on another machine, connected to our standard input and output.

A remote shell parses the command of ssh, so it consists of constants only, quoted; whatever a user gives (arguments,
variables, folders) is sent to the program's standard input.
"""

from __future__ import annotations

import os
import shlex

SSH_OPTIONS = {
    "BatchMode": "yes",
    "ConnectTimeout": 10,
    # An ssh whose other end is silent ends after 3 x 5 seconds.
    "ServerAliveInterval": 5,
    "ServerAliveCountMax": 3,
    "ControlPath": "none",  # a connection of its own, which ends with this process
}
# With these sbatch makes srun give each task a share of the node; ours is the only task there. Others redirect its
# standard streams, which carry messages.
DROPPED_VARIABLES = frozenset(
    f"SLURM_{name}"
    for name in (
        *("GPUS", "GPUS_PER_NODE", "GPUS_PER_SOCKET"),  # also of the script's header, which sbatch --gres overrides
        *("CPUS_PER_TASK", "TRES_PER_TASK", "GPUS_PER_TASK", "GPU_BIND", "NTASKS", "NPROCS", "NTASKS_PER_NODE"),
        *("NTASKS_PER_GPU", "NTASKS_PER_SOCKET", "TASKS_PER_NODE", "DISTRIBUTION", "MEM_PER_CPU", "MEM_PER_GPU"),
        *("UNBUFFEREDIO", "LABELIO", "STDINMODE", "STDOUTMODE", "STDERRMODE"),
    )
)
# A command and its environment; None for our own.
Command = tuple[list[str], dict[str, str] | None]


def ssh_command(host: str, command: list[str]) -> Command:
    """Return the command that runs `command` on `host`, never asks for a password, and ends if the host is silent.

    Args:
        host: a name that `launch.hostfile` has accepted: it cannot be read as an option.
        command: the program and its arguments.
    """
    options = [f"-o{name}={value}" for name, value in SSH_OPTIONS.items()]
    return ["ssh", "-T", *options, "--", host, "exec " + shlex.join(command)], None


def srun_command(host: str, command: list[str]) -> Command:
    """Return the command that runs `command` once on a host of this Slurm allocation.

    That process starts all ranks of its node, so it must see all GPUs that the job has there. Without --unbuffered,
    which would make its standard output a terminal, a line passes as soon as it is complete.

    Args:
        host: of the allocation.
        command: the program and its arguments.
    """
    environment = {name: value for name, value in os.environ.items() if name not in DROPPED_VARIABLES}
    options = ["--nodes=1", "--ntasks=1", "--nodelist", host, "--overlap", "--cpu-bind=none", "--gpu-bind=none"]
    return ["srun", *options, *command], environment
