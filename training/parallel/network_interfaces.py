"""A machine's addresses and network interfaces, the one by which others reach it, and free ports."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
from collections.abc import Sequence

import psutil


def own_addresses() -> list[tuple[str, str, str]]:
    """Return (interface, IPv4 address, netmask) for every interface that is up, without loopback."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    return [
        (name, entry.address, entry.netmask or "255.255.255.255")
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if name in up and entry.family == socket.AF_INET and not is_loopback(entry.address)
    ]


def is_loopback(address: str) -> bool:
    """Return whether other machines cannot use this address: 127.0.0.1, Debian's 127.0.1.1, ::1, or not an address."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return True


def interface_of(address: str, addresses: Sequence[Sequence[str]]) -> str:
    """Return the interface that has the address, '' if none has."""
    return next((name for name, own, _ in addresses if own == address), "")


def address_towards(others: Sequence[str], addresses: Sequence[Sequence[str]]) -> str:
    """Return the address in one network with any of the other machines', else the first one, '' if there is none.

    Args:
        others: addresses of other machines.
        addresses: this machine's, from `own_addresses`.
    """
    for _, own, netmask in addresses:
        network = ipaddress.ip_network(f"{own}/{netmask}", strict=False)
        if any(not is_loopback(other) and ipaddress.ip_address(other) in network for other in others):
            return own
    return addresses[0][1] if addresses else ""


def route_towards(host: str) -> str:
    """Return this machine's address on the route to a host, '' without a route; nothing is sent."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return probe.getsockname()[0]
    return ""


def interface_towards(host: str) -> str:
    """Return the interface by which other machines reach this one, from the route to one of them; '' if unclear.

    Args:
        host: name or address of a machine that all know. If it is this one, and its name resolves to a loopback
            address, the route out of the local network is used (to an unassigned address of RFC 5737).
    """
    address = route_towards(host)
    if is_loopback(address):
        address = route_towards("192.0.2.1")
    addresses = own_addresses()
    if is_loopback(address):
        address = address_towards([], addresses)
    return interface_of(address, addresses)


def free_port(wanted: int = 0) -> int:
    """Return the wanted port (0: any) if a process could listen on it now, on all addresses as torch's store does.

    Raises:
        OSError: if it is in use.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("", wanted))
        probe.listen()
        return probe.getsockname()[1]


def port_if_free(wanted: int) -> int:
    """Return the wanted port if it is free, else 0."""
    try:
        return free_port(wanted)
    except OSError:
        return 0
