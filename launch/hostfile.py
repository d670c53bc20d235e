"""Reads hostfiles strictly: DeepSpeed reads `slots=4abc` as 4, takes `slots=0`, and runs `-oProxyCommand=...` as a
command.

Each line is `name slots=N`; blank lines and comments (#) are allowed. Imports no torch.
"""

from __future__ import annotations

import re
from pathlib import Path

from training.base.errors import UserError
from training.base.small_files import read_small_text

HOST_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?")
LINE = re.compile(r"(?P<host>\S+)\s+slots=(?P<slots>[1-9][0-9]{0,3})")


def read_hostfile(path: Path, nodes: int = 1, slots: int = 1) -> dict[str, int]:
    """Read a hostfile and check that its first hosts suffice.

    Args:
        path: the file.
        nodes: number of hosts the run takes, from the top of the file.
        slots: GPUs the run takes on each of them.

    Returns:
        Slots by host name for all hosts of the file, in its order.

    Raises:
        UserError: naming file and line, for a file that cannot be read, a malformed line, a host given twice,
            or too few hosts or slots.
    """
    try:
        lines = read_small_text(path).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise UserError(f"hostfile {str(path)!r}: {reason}. See hostfile_example.txt for one.") from None
    found: dict[str, tuple[int, int]] = {}
    for number, raw in enumerate(lines, start=1):
        line = raw.partition("#")[0].strip()
        if not line:
            continue
        where = f"hostfile {str(path)!r}, line {number}"
        match = LINE.fullmatch(line)
        if not match:
            raise UserError(f"{where}: {line!r} is not 'name slots=N' with N from 1 to 9999.")
        host = match["host"]
        if not HOST_NAME.fullmatch(host):
            raise UserError(f"{where}: {host!r} is no host name (letters, digits, '.' and '-').")
        if host in found:
            raise UserError(f"{where}: host {host!r} is in line {found[host][1]} already.")
        found[host] = (int(match["slots"]), number)
    if len(found) < nodes:
        raise UserError(f"hostfile {str(path)!r}: {nodes} nodes asked for, {len(found)} listed.")
    for host, (host_slots, number) in list(found.items())[:nodes]:
        if host_slots < slots:
            where = f"hostfile {str(path)!r}, line {number}"
            raise UserError(f"{where}: {slots} GPUs per node asked for, {host} has slots={host_slots}.")
    return {host: host_slots for host, (host_slots, _) in found.items()}


def split_hosts(names: str, nodes: int = 1) -> list[str]:
    """Return the hosts of --hosts; raise a UserError for a name that is none or is given twice, and for too few."""
    hosts = names.split(",")
    bad = [host for host in hosts if not HOST_NAME.fullmatch(host) or hosts.count(host) > 1]
    if bad:
        raise UserError(f"--hosts: {bad[0]!r} is no host name, or is given twice: give names as in node01,node02.")
    if len(hosts) < nodes:
        raise UserError(f"--hosts: {nodes} nodes asked for, {len(hosts)} named.")
    return hosts
