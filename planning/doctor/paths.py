"""Which hosts reach which others over TCP, with small messages and with large ones: asked once an all-reduce failed.

An all-reduce that fails has the same symptom on every host. Single connections between pairs of hosts show which one
of them all the failing pairs have in common.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from planning.doctor.table import Row, some_of
from training.observe.units import format_bytes

SMALL_BYTES, LARGE_BYTES = 16, 1 << 20  # the large one fills many packets of any MTU
CONNECT_SECONDS, ECHO_SECONDS = 3.0, 5.0
MOST_TARGETS = 16  # other hosts that each host tries
MOST_AT_ONCE = 32
HEADER_BYTES = 8

# What a path may lack; `FailedPath.lacks` is one of these.
CONNECTION, ANSWER, LARGE_MESSAGES = "connection", "answer", "large messages"


class FailedPath(NamedTuple):
    """From a host to a port of another one, and what is missing there ('connection', ...)."""

    source: str
    target: str
    port: int
    lacks: str


_open: list[socket.socket] = []  # listeners, from one question to the next


def open_ports(address: str, port: int) -> dict[str, Any]:
    """Listen at an address of this machine for messages to send back; return the `ports`.

    Args:
        address: by which the other hosts reach this one.
        port: listen there and on a free port; 0 for a free one alone.
    """
    for number in {port, 0}:
        with contextlib.suppress(OSError):  # taken, as a row of its own says
            listener = socket.create_server((address, number))
            threading.Thread(target=_send_back, args=(listener,), daemon=True).start()
            _open.append(listener)
    return {"ports": [listener.getsockname()[1] for listener in _open]}


def try_paths(source: str, targets: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Send a small and a large message to each port of each target.

    Args:
        source: this host's name.
        targets: name, address and ports of each.

    Returns:
        `failed`: the four fields of each `FailedPath`.
    """
    jobs = [(name, address, port) for name, address, ports in targets for port in ports]
    with ThreadPoolExecutor(MOST_AT_ONCE) as pool:
        lacking = list(pool.map(lambda job: _lacks(job[1], job[2]), jobs))
    failed = [FailedPath(source, job[0], job[2], lacks) for job, lacks in zip(jobs, lacking, strict=True) if lacks]
    return {"failed": failed}


def targets_of(host: str, hosts: Sequence[str]) -> list[str]:
    """Return the hosts that a host tries: the first one, with which all meet, and those that follow it in a ring."""
    place = hosts.index(host)
    ring = [*hosts[place + 1 :], *hosts[:place]]
    return list(dict.fromkeys([name for name in (hosts[0], *ring) if name != host]))[:MOST_TARGETS]


def judge_paths(failed: Sequence[FailedPath]) -> list[Row]:
    """Name the fewest hosts that all failing paths have in common (a minimum vertex cover, greedily).

    Of the two ends of a path that fails one way only, the one that was to answer is named: its own firewall is the
    usual cause. Both are named if it fails both ways and nothing tells them apart.
    """
    rows, left = [], list(failed)
    while left:
        one_way = sorted({(path.source, path.target) for path in left})  # in the same order in every process
        pairs = {frozenset(ends) for ends in one_way}
        weights = {
            host: (sum(host in pair for pair in pairs), sum(host == target for _, target in one_way))
            for ends in one_way
            for host in ends
        }
        guilty = max(weights, key=lambda host: weights[host])
        own = [path for path in left if guilty in (path.source, path.target)]
        others = sorted({end for path in own for end in (path.source, path.target)} - {guilty})
        suspects = [guilty, *(host for host in others if weights[host] == weights[guilty])]
        rows.append(_row(guilty, others, own, " or ".join(suspects)))
        left = [path for path in left if path not in own]
    return rows


def _row(guilty: str, others: list[str], paths: Sequence[FailedPath], suspects: str) -> Row:
    """Return what is wrong with a host of which these paths failed."""
    if all(path.lacks == LARGE_MESSAGES for path in paths):
        size = format_bytes(LARGE_BYTES)
        found = f"messages of {size} are lost between {guilty} and {some_of(others)}, small ones arrive"
        cure = f"a smaller MTU on the way: compare ip link on both and on the switch, ping -M do -s 1472 {guilty}"
        return Row("all-reduce", "wrong", found, cure, suspects)
    sources = sorted({path.source for path in paths if path.target == guilty})
    if sources:
        ports = some_of([str(port) for port in sorted({path.port for path in paths if path.target == guilty})])
        found = f"{some_of(sources)} cannot connect to {guilty}, port {ports}"
    else:
        found = f"{guilty} cannot connect to {some_of(others)}"
    cure = f"a firewall on {suspects} or before it: open all ports between the hosts"
    return Row("all-reduce", "wrong", found, cure, suspects)


def _lacks(address: str, port: int) -> str:
    """Return what the path to a port lacks, '' for nothing."""
    try:
        connection = socket.create_connection((address, port), timeout=CONNECT_SECONDS)
    except OSError:
        return CONNECTION
    with connection:
        connection.settimeout(ECHO_SECONDS)
        for size, lacks in ((SMALL_BYTES, ANSWER), (LARGE_BYTES, LARGE_MESSAGES)):
            try:
                connection.sendall(size.to_bytes(HEADER_BYTES, "big") + bytes(size))
                _receive(connection, size)
            except OSError:
                return lacks
    return ""


def _send_back(listener: socket.socket) -> None:
    """Serve the probes of the other hosts until the process ends."""
    while True:
        connection, _ = listener.accept()
        threading.Thread(target=_echo, args=(connection,), daemon=True).start()


def _echo(connection: socket.socket) -> None:
    connection.settimeout(2 * ECHO_SECONDS)
    with connection, contextlib.suppress(OSError):
        while True:
            size = int.from_bytes(_receive(connection, HEADER_BYTES), "big")
            if size > LARGE_BYTES:  # not one of ours
                return
            connection.sendall(_receive(connection, size))


def _receive(connection: socket.socket, size: int) -> bytes:
    """Return `size` bytes.

    Raises:
        OSError: if the connection ends, or is silent for as long as its timeout.
    """
    received = bytearray()
    while len(received) < size:
        part = connection.recv(min(size - len(received), 65536))
        if not part:
            raise ConnectionError("the other side has closed")
        received += part
    return bytes(received)
