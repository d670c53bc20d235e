"""Which of a machine's addresses the others reach it by, on which network interface it lies, and its free ports."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Sequence

import psutil


def own_addresses() -> list[tuple[str, str, str]]:
    """Return (interface, IPv4 address, netmask) for every interface that is up, loopback left out."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    return [
        (name, entry.address, entry.netmask or "255.255.255.255")
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if name in up and entry.family == socket.AF_INET and not is_loopback(entry.address)
    ]


def is_loopback(address: str) -> bool:
    """Return whether no other machine can use this address: 127.0.0.1, Debian's 127.0.1.1, ::1, or no address."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return True


def interface_of(address: str, addresses: Sequence[Sequence[str]]) -> str:
    """Return the interface that has the address, '' where none has."""
    return next((name for name, own, _ in addresses if own == address), "")


def address_towards(others: Sequence[str], addresses: Sequence[Sequence[str]]) -> str:
    """Return the address whose network holds one of the other machines', else the first one, '' where there is none.

    Args:
        others: addresses of other machines.
        addresses: this machine's, as `own_addresses` gives them.
    """
    for _, own, netmask in addresses:
        network = ipaddress.ip_network(f"{own}/{netmask}", strict=False)
        if any(not is_loopback(other) and ipaddress.ip_address(other) in network for other in others):
            return own
    return addresses[0][1] if addresses else ""


def route_towards(host: str) -> str:
    """Return this machine's address on the way to a host, '' where there is none; nothing is sent."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return probe.getsockname()[0]
    return ""


def interface_towards(host: str) -> str:
    """Return the interface by which other machines reach this one, judged by the way to one of them; '' if unclear.

    Args:
        host: name or address of a machine that all know. Where it is this one, and its name resolves to a loopback
            address, the way out of the local network (an address of RFC 5737, which nobody has) stands in for it.
    """
    address = route_towards(host)
    if is_loopback(address):
        address = route_towards("192.0.2.1")
    addresses = own_addresses()
    if is_loopback(address):
        address = address_towards([], addresses)
    return interface_of(address, addresses)


def free_port(wanted: int = 0) -> int:
    """Return the wanted port (0: any) if a process could listen there now, on all addresses as torch's store does.

    Raises:
        OSError: it is taken.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("", wanted))
        probe.listen()
        return probe.getsockname()[1]


def port_if_free(wanted: int) -> int:
    """Return the wanted port if a process could listen there now, else 0."""
    try:
        return free_port(wanted)
    except OSError:
        return 0
