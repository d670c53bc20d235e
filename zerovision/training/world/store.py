"""Opens the ranks' store, which listens on one address of rank 0's host."""

from __future__ import annotations

import datetime
import errno
import socket
import sys

import torch.distributed as dist

from zerovision.training.base.errors import UserError
from zerovision.training.world.network_interfaces import is_loopback

BACKLOG = 4096


def open_store(
    address: str, port: int, timeout: datetime.timedelta, run_id: str, *, is_host: bool, is_alone: bool
) -> dist.Store:
    """Open the ranks' store on rank 0, and connect to it on all other ranks.

    Args:
        address: address of the store, on the host of rank 0.
        port: port of the store.
        timeout: how long to wait for other ranks, both now and in every request to the store.
        run_id: identifier of this start, used as the prefix of all keys, so that processes of another run or start that
            use the same port do not interfere.
        is_host: whether this is rank 0, which opens the store. The store listens only on this address, whereas
            PyTorch's store would listen on all addresses of the host.
        is_alone: whether all ranks run on one host.

    Raises:
        UserError: if the port is in use, or the address is unknown.
    """
    descriptor = _listen(address, port, is_alone=is_alone) if is_host else None
    store = dist.TCPStore(address, port, None, is_host, timeout, wait_for_workers=False, master_listen_fd=descriptor)
    return dist.PrefixStore(run_id, store)


def _listen(address: str, port: int, *, is_alone: bool) -> int:
    """Return a socket that listens only on this address, or on all addresses if other hosts cannot reach this one."""
    try:
        family, kind, protocol, _, endpoint = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise UserError(f"the address that the ranks meet on, {address}: {error.strerror}.") from None
    if is_loopback(str(endpoint[0])) and not is_alone:  # Debian resolves a host's own name to 127.0.1.1
        endpoint = ("", port)
    for one in (endpoint, ("", port)):
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(one)
            listener.listen(BACKLOG)
            return listener.detach()
        except OSError as error:
            listener.close()
            if error.errno == errno.EADDRINUSE:
                raise UserError(f"port {port} is in use: choose a free one with --master_port.") from None
            if error.errno != errno.EADDRNOTAVAIL or one[0] == "":
                raise
            print(f"note: {address} is not an address of this machine: rank 0 listens on all of them", file=sys.stderr)
    raise AssertionError
