"""The hosts of a launch, and the commands that start a program on each of them, connected to this process by pipes.

A remote shell parses ssh's command, so the command consists only of quoted constants; user input (arguments, variables,
folders) is sent over the program's standard input.

Hostfiles are read strictly: other launchers read `slots=4abc` as 4, accept `slots=0`, and run `-oProxyCommand=...` as a
command. Each line is `name slots=N`; blank lines and comments (#) are allowed. This module does not import torch.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

from zerovision.training.base.errors import UserError
from zerovision.training.base.files import read_small_text

HERE = "localhost"  # the name of this machine in a launch without other machines
HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")
LINE = re.compile(r"(?P<host>\S+)\s+slots=(?P<slots>[1-9][0-9]{0,3})")
SSH_OPTIONS = {
    "BatchMode": "yes",
    "ConnectTimeout": 10,
    # ssh exits after its other end has been silent for 3 x 5 seconds.
    "ServerAliveInterval": 5,
    "ServerAliveCountMax": 3,
    "ControlPath": "none",  # a separate connection, which ends with this process
}
# Variables that sbatch sets. Some make srun give each task only a share of the node, although the agent is srun's only
# task. Others redirect the agent's standard streams, which carry messages.
DROPPED_VARIABLES = frozenset(
    f"SLURM_{name}"
    for name in (
        *("GPUS", "GPUS_PER_NODE", "GPUS_PER_SOCKET"),  # also set by the script's header, which sbatch --gres overrides
        *("CPUS_PER_TASK", "TRES_PER_TASK", "GPUS_PER_TASK", "GPU_BIND", "NTASKS", "NPROCS", "NTASKS_PER_NODE"),
        *("NTASKS_PER_GPU", "NTASKS_PER_SOCKET", "TASKS_PER_NODE", "DISTRIBUTION", "MEM_PER_CPU", "MEM_PER_GPU"),
        *("UNBUFFEREDIO", "LABELIO", "STDINMODE", "STDOUTMODE", "STDERRMODE"),
    )
)
SCONTROL_SECONDS = 60
# A command and its environment; None means this process's environment.
Command = tuple[list[str], dict[str, str] | None]


def ssh_command(host: str, command: list[str]) -> Command:
    """Return the command that runs `command` on `host`, never asks for a password, and ends if the host is silent."""
    options = [f"-o{name}={value}" for name, value in SSH_OPTIONS.items()]
    return ["ssh", "-T", *options, "--", host, "exec " + shlex.join(command)], None


def srun_command(host: str, command: list[str]) -> Command:
    """Return the command that runs `command` once on a host of this Slurm allocation.

    `command` starts all ranks of its node, so it must see all of the job's GPUs there. Even without --unbuffered, which
    would make stdout a terminal, each line arrives as soon as it is complete.
    """
    environment = {name: value for name, value in os.environ.items() if name not in DROPPED_VARIABLES}
    options = ["--nodes=1", "--ntasks=1", "--nodelist", host, "--overlap", "--cpu-bind=none", "--gpu-bind=none"]
    return ["srun", *options, *command], environment


SHELLS: dict[str, Callable[[str, list[str]], Command]] = {
    "local": lambda host, command: (command, None),
    "ssh": ssh_command,
    "srun": srun_command,
}


def read_hostfile(path: Path, nodes: int = 1, slots: int = 1) -> dict[str, int]:
    """Read a hostfile and check that its first hosts suffice.

    Args:
        path: the file.
        nodes: number of hosts that the run uses, from the top of the file; 0 means all of them.
        slots: number of GPUs that the run uses on each of these hosts.

    Returns:
        The slots of all hosts in the file, by name, in order.

    Raises:
        UserError: for a file that cannot be read, a malformed line, a repeated host, or too few hosts or slots; the
            message names the file and the line.
    """
    try:
        lines = read_small_text(path).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise UserError(f"hostfile {str(path)!r}: {reason}. Use --hosts or lines like 'node01 slots=8'.") from None
    found: dict[str, tuple[int, int]] = {}
    for number, raw in enumerate(lines, start=1):
        line = raw.partition("#")[0].strip()
        if not line:
            continue
        where = f"hostfile {str(path)!r}, line {number}"
        match = LINE.fullmatch(line)
        if not match:
            raise UserError(f"{where}: expected 'name slots=N' with N from 1 to 9999, not {line!r}.")
        host = match["host"]
        if not HOST_NAME.fullmatch(host):
            raise UserError(f"{where}: {host!r} is not a host name: use letters and digits, and '.' or '-' inside.")
        if host in found:
            raise UserError(f"{where}: host {host!r} is already on line {found[host][1]}.")
        found[host] = (int(match["slots"]), number)
    if not found:
        raise UserError(f"hostfile {str(path)!r} lists no machines: add lines of the form 'name slots=N'.")
    if len(found) < nodes:
        raise UserError(f"hostfile {str(path)!r}: {nodes} nodes requested, but only {len(found)} listed.")
    for host, (host_slots, number) in list(found.items())[: nodes or None]:
        if host_slots < slots:
            where = f"hostfile {str(path)!r}, line {number}"
            raise UserError(f"{where}: {slots} GPUs per node requested, but {host} has slots={host_slots}.")
    return {host: host_slots for host, (host_slots, _) in found.items()}


def split_hosts(names: str, nodes: int = 1) -> list[str]:
    """Return the hosts of --hosts; raise a UserError for an invalid or repeated name, and for too few names."""
    hosts = names.split(",")
    bad = [host for host in hosts if not HOST_NAME.fullmatch(host) or hosts.count(host) > 1]
    if bad:
        raise UserError(f"--hosts: {bad[0]!r} is repeated or not a host name: use names such as node01,node02.")
    if len(hosts) < nodes:
        raise UserError(f"--hosts: {nodes} nodes requested, but only {len(hosts)} named.")
    return hosts


def scontrol(*arguments: str, stderr: int | None = None) -> str | None:
    """Run Slurm's scontrol; return its output, or None if it fails."""
    try:
        return subprocess.check_output(["scontrol", *arguments], stderr=stderr, text=True, timeout=SCONTROL_SECONDS)
    except (OSError, subprocess.SubprocessError):
        return None


def host_names(node_list: str) -> list[str]:
    """Return the hosts in a node list such as 'node[01-04]', expanded by `scontrol`; raise a UserError if it fails."""
    names = scontrol("show", "hostnames", node_list, stderr=subprocess.DEVNULL)
    if not names:
        raise UserError(f"SLURM_JOB_NODELIST {node_list!r}: scontrol cannot read it.")
    return names.split()
