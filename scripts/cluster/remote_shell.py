"""The commands that start a program on other machines.

A remote shell reads what ssh and pdsh are given, so only fixed words of ours go there, quoted; whatever a user gives
(arguments, variables, folders) travels on the program's standard input or over a socket.
"""

from __future__ import annotations

import os
import shlex

CONNECT_SECONDS = 10
# An ssh whose other end is silent ends after ALIVE_SECONDS x ALIVE_COUNT seconds.
ALIVE_SECONDS, ALIVE_COUNT = 5, 3
# With these sbatch tells srun to give each task a share of the node; ours is the only task there.
PER_TASK_VARIABLES = frozenset(
    f"SLURM_{name}"
    for name in (
        *("GPUS", "GPUS_PER_NODE", "GPUS_PER_SOCKET"),  # also of the script's header, which sbatch --gres overrides
        *("CPUS_PER_TASK", "TRES_PER_TASK", "GPUS_PER_TASK", "GPU_BIND", "NTASKS", "NPROCS", "NTASKS_PER_NODE"),
        *("NTASKS_PER_GPU", "NTASKS_PER_SOCKET", "TASKS_PER_NODE", "DISTRIBUTION", "MEM_PER_CPU", "MEM_PER_GPU"),
    )
)


def ssh_command(host: str, words: list[str]) -> list[str]:
    """Return the command that runs `words` on `host`, never asks for a password, and ends when the host is silent.

    Args:
        host: a name that `training.hostfile` has accepted: it cannot be read as an option.
        words: the program and its arguments.
    """
    return ["ssh", "-T", *_ssh_options(), "--", host, "exec " + shlex.join(words)]


def pdsh_command(hosts: list[str], line: str) -> tuple[list[str], dict[str, str]]:
    """Return the command that runs `line` in a shell on all hosts at once, over ssh, and its environment.

    Args:
        hosts: names that `training.hostfile` has accepted.
        line: for the remote shell; pdsh replaces %h by the host's name.
    """
    environment = dict(os.environ) | {
        "PDSH_RCMD_TYPE": "ssh",  # Debian's default is rsh
        "PDSH_SSH_ARGS_APPEND": " ".join(_ssh_options()),
    }
    command = ["pdsh", "-S", "-N", "-f", str(len(hosts)), "-t", str(CONNECT_SECONDS), "-w", ",".join(hosts), line]
    return command, environment


def srun_command(hosts: list[str], words: list[str], *, is_beside: bool = False) -> tuple[list[str], dict[str, str]]:
    """Return the command that runs `words` once on each of the hosts of a Slurm allocation, and its environment.

    Each of these processes starts all ranks of its node, so it must see all GPUs that the job has there.

    Args:
        hosts: of the allocation.
        words: the program and its arguments.
        is_beside: whether it runs beside other steps and reads our standard input.
    """
    count = str(len(hosts))
    environment = {name: value for name, value in os.environ.items() if name not in PER_TASK_VARIABLES}
    options = ["--nodes", count, "--ntasks", count, "--ntasks-per-node=1", "--nodelist", ",".join(hosts)]
    options += ["--kill-on-bad-exit=1", "--unbuffered", "--cpu-bind=none", "--gpu-bind=none"]
    options.append("--overlap" if is_beside else "--input=none")
    return ["srun", *options, *words], environment


def _ssh_options() -> list[str]:
    options = {
        "BatchMode": "yes",
        "ConnectTimeout": CONNECT_SECONDS,
        "ServerAliveInterval": ALIVE_SECONDS,
        "ServerAliveCountMax": ALIVE_COUNT,
        "ControlPath": "none",  # a connection of its own, which ends with this process
    }
    return [f"-o{name}={value}" for name, value in options.items()]
