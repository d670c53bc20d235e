"""A machine's GPUs, addresses and free ports, and the interface through which others reach it; without torch."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import socket
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from zerovision.training.base.errors import UserError, shown

IP = {socket.AF_INET, socket.AF_INET6}
NVIDIA_SMI_SECONDS = 60.0
DEVICE_FILES = Path("/dev")


def own_addresses() -> list[tuple[str, str, str]]:
    """Return (interface, IPv4 address, netmask) for every interface that is up, except loopback."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    return [
        (name, entry.address, entry.netmask or "255.255.255.255")
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if name in up and entry.family == socket.AF_INET and not is_loopback(entry.address)
    ]


def is_loopback(address: str) -> bool:
    """Return whether other machines cannot use an address: 127.0.0.1, Debian's 127.0.1.1, ::1 or an invalid address."""
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return True


def interface_of(address: str, addresses: Sequence[Sequence[str]]) -> str:
    """Return the interface that has the address, or '' if there is no such interface."""
    return next((name for name, own, _ in addresses if own == address), "")


def address_towards(others: Sequence[str], addresses: Sequence[Sequence[str]]) -> str:
    """Return this machine's first address in a network with another machine, or else its first address, or ''.

    Args:
        others: addresses of other machines.
        addresses: this machine's addresses, from `own_addresses`.
    """
    for _, own, netmask in addresses:
        network = ipaddress.ip_network(f"{own}/{netmask}", strict=False)
        if any(not is_loopback(other) and ipaddress.ip_address(other) in network for other in others):
            return own
    return addresses[0][1] if addresses else ""


def route_towards(host: str) -> str:
    """Return this machine's address on the route to a host, or '' if there is no route; nothing is sent."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))
        return probe.getsockname()[0]
    return ""


def interface_towards(host: str) -> str:
    """Return the interface through which other machines reach this one, from the route to a host; '' if unknown.

    `host` is the name or address of one machine, the same on all machines.
    """
    address = route_towards(host)
    if is_loopback(address):
        # If the host is this machine, use the route out of the local network, to an unassigned address from RFC 5737.
        address = route_towards("192.0.2.1")
    addresses = own_addresses()
    if is_loopback(address):
        address = address_towards([], addresses)
    return interface_of(address, addresses)


def free_port(wanted: int = 0) -> int:
    """Return the requested port (0: any) if a process can now listen on it on all addresses, as torch's store does.

    Raises:
        OSError: if the port is in use.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind(("", wanted))
        probe.listen()
        return probe.getsockname()[1]


def port_if_free(wanted: int) -> int:
    """Return the requested port if it is free, otherwise 0."""
    try:
        return free_port(wanted)
    except OSError:
        return 0


def check_chosen_interfaces(environment: Mapping[str, str], *, has_gpus: bool) -> None:
    """Raise an error if GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME matches none of this machine's interfaces.

    gloo accepts exact names. NCCL accepts prefixes, each optionally with a port; a leading '=' means that the names are
    exact, and a leading '^' that they are excluded. Both libraries accept several names, separated by commas.

    Args:
        environment: the ranks' environment variables.
        has_gpus: whether the ranks use NCCL in addition to gloo.

    Raises:
        UserError: if one of these variables matches no interface.
    """
    present = [name for name, entries in psutil.net_if_addrs().items() if {one.family for one in entries} & IP]
    gloo, nccl = (environment.get(f"{library}_SOCKET_IFNAME", "") for library in ("GLOO", "NCCL"))
    here = f"this machine has {', '.join(sorted(present))}"
    if missing := [name for name in gloo.split(",") if name and name not in present]:
        raise UserError(
            f"GLOO_SOCKET_IFNAME {shown(gloo)}: no interface {shown(missing[0])}; {here}. Correct or unset it."
        )
    excludes, pattern = nccl.startswith("^"), nccl.removeprefix("^")
    is_exact, names = pattern.startswith("="), [word.partition(":")[0] for word in pattern.removeprefix("=").split(",")]
    named = {
        name for name in present for word in names if word and (name == word if is_exact else name.startswith(word))
    }
    if has_gpus and any(names) and (named == {*present} if excludes else not named):
        raise UserError(f"NCCL_SOCKET_IFNAME {shown(nccl)} matches no interface; {here}. Correct or unset it.")


def machine_gpus() -> list[str]:
    """Return the indices of all GPUs in this machine.

    A container that exposes GPUs only for compute has neither nvidia-smi nor NVML, and nvidia-smi fails if its version
    does not match the driver. In these cases, return CUDA's indices of the device files that this process may use.
    """
    try:
        listing = subprocess.check_output(
            ["nvidia-smi", "-L"], stderr=subprocess.DEVNULL, text=True, timeout=NVIDIA_SMI_SECONDS
        )
    except (OSError, subprocess.SubprocessError):
        files = [file for file in DEVICE_FILES.glob("nvidia[0-9]*") if os.access(file, os.R_OK | os.W_OK)]
        return [str(number) for number in range(len(files))]
    return re.findall(r"^GPU ([0-9]+):", listing, re.MULTILINE)


def usable_gpus() -> list[str]:
    """Return the indices or UUIDs of the GPUs that are visible to this process."""
    present, visible = machine_gpus(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None or not present:
        return present
    chosen = "".join(visible.split()).split(",")
    if "-1" in chosen:  # CUDA ignores -1 and every GPU after it
        chosen = chosen[: chosen.index("-1")]
    return [gpu for gpu in chosen if gpu]
