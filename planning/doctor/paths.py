"""Finds out which hosts reach which others over TCP.

A failed all-reduce has the same symptom on every host. Single connections between all pairs of hosts show which host
the failing pairs have in common.
"""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from planning.doctor.probe import Answer
from planning.doctor.table import Row, some_of

CONNECT_SECONDS = 3.0
MOST_AT_ONCE = 128

_listening: list[socket.socket] = []  # until the process ends


class FailedPath(NamedTuple):
    """From a host to a port of another one."""

    source: str
    target: str
    port: int


def open_port(address: str) -> Answer:
    """Listen at an address of this machine, by which the others reach it, and return the `port`."""
    _listening.append(socket.create_server((address, 0), backlog=1024))
    return {"port": _listening[-1].getsockname()[1]}


def try_paths(source: str, targets: Sequence[Sequence[Any]]) -> Answer:
    """Connect to each target.

    Args:
        source: this host's name.
        targets: name, address and port of each.

    Returns:
        `failed`: the fields of each `FailedPath`.
    """
    with ThreadPoolExecutor(MOST_AT_ONCE) as pool:
        connected = list(pool.map(lambda target: _connects(*target[1:]), targets))
    tried = zip(targets, connected, strict=True)
    return {"failed": [FailedPath(source, name, port) for (name, _, port), connects in tried if not connects]}


def _connects(address: str, port: int) -> bool:
    try:
        socket.create_connection((address, port), timeout=CONNECT_SECONDS).close()
    except OSError:
        return False
    return True


def assess_paths(failed: Sequence[FailedPath]) -> list[Row]:
    """Name the fewest hosts that all failed paths have in common (a minimum vertex cover, greedily).

    Of the two ends of a path that fails one way only, the target is named: its own firewall is the usual cause. Both
    are named if it fails both ways and nothing distinguishes them.
    """
    rows, left = [], sorted(failed)  # in the same order in every process
    while left:
        partners = Counter(host for pair in {frozenset(path[:2]) for path in left} for host in pair)
        targets = Counter(path.target for path in left)
        weights = {host: (partners[host], targets[host]) for path in left for host in path[:2]}
        guilty = max(weights, key=lambda host: weights[host])
        own = [path for path in left if guilty in path[:2]]
        others = sorted({host for path in own for host in path[:2]} - {guilty})
        suspects = " or ".join([guilty, *(host for host in others if weights[host] == weights[guilty])])
        found = f"{guilty} cannot connect to {some_of(others)}"
        if inward := [path for path in own if path.target == guilty]:
            found = f"{some_of([path.source for path in inward])} cannot connect to {guilty}, port {inward[0].port}"
        cure = f"a firewall on {suspects} or before it: open all ports between the hosts"
        rows.append(Row("connections", "wrong", found, cure, suspects))
        left = [path for path in left if path not in own]
    return rows
