"""Finds out which hosts reach which others over TCP, with small messages and with large ones.

A failed all-reduce has the same symptom on every host. Single connections between pairs of hosts show which host all
the failing pairs have in common.
"""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

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


class _Echo(socketserver.StreamRequestHandler):
    """Sends each message back that follows its size."""

    timeout = 2 * ECHO_SECONDS

    def handle(self) -> None:
        with contextlib.suppress(OSError):
            while size := int.from_bytes(self.rfile.read(HEADER_BYTES), "big"):
                if size > LARGE_BYTES:  # not from a doctor
                    return
                self.wfile.write(self.rfile.read(size))


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True


def open_ports(address: str, port: int) -> dict[str, Any]:
    """Listen at an address of this machine until the process ends, and send messages back; return the `ports`.

    Args:
        address: by which the other hosts reach this one.
        port: listen there and on a free port; 0 for a free one alone.
    """
    ports = []
    for number in {port, 0}:
        with contextlib.suppress(OSError):  # taken: the row of the port says so
            server = _Server((address, number), _Echo)
            threading.Thread(target=server.serve_forever, daemon=True).start()
            ports.append(server.server_address[1])
    return {"ports": ports}


def try_paths(source: str, targets: Sequence[Sequence[Any]]) -> dict[str, Any]:
    """Send a small and a large message to each port of each target.

    Args:
        source: this host's name.
        targets: name, address and ports of each.

    Returns:
        `failed`: the four fields of each `FailedPath`.
    """
    paths = [(name, address, port) for name, address, ports in targets for port in ports]
    with ThreadPoolExecutor(MOST_AT_ONCE) as pool:
        lacking = list(pool.map(lambda path: _lacks(*path[1:]), paths))
    failed = [
        FailedPath(source, name, port, lacks) for (name, _, port), lacks in zip(paths, lacking, strict=True) if lacks
    ]
    return {"failed": failed}


def targets_of(host: str, hosts: Sequence[str]) -> list[str]:
    """Return the hosts that a host tries: the first one, where all meet, and those that follow it in a ring."""
    position = hosts.index(host)
    ring = [*hosts[position + 1 :], *hosts[:position]]
    return list(dict.fromkeys(name for name in (hosts[0], *ring) if name != host))[:MOST_TARGETS]


def _lacks(address: str, port: int) -> str:
    """Return what the path to a port lacks, '' for nothing."""
    try:
        connection = socket.create_connection((address, port), timeout=CONNECT_SECONDS)
    except OSError:
        return CONNECTION
    with connection, connection.makefile("rb") as stream:
        connection.settimeout(ECHO_SECONDS)
        for size, lacks in ((SMALL_BYTES, ANSWER), (LARGE_BYTES, LARGE_MESSAGES)):
            try:
                connection.sendall(size.to_bytes(HEADER_BYTES, "big") + bytes(size))
                if len(stream.read(size)) < size:
                    return lacks
            except OSError:
                return lacks
    return ""
