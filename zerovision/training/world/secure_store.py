"""The ranks' store, opened by rank 0 on one address, and the proof that each process is a rank of this run.

PyTorch's rendezvous accepts any process as a rank. Here every rank and rank 0 prove to each other that they know the
secret of the run, before the first collective: HMAC-SHA256 (RFC 2104) over nonces of both, so that no message can be
replayed and none reveals the secret. Not covered: the store's keys, and the connections that gloo and NCCL open
afterwards, are neither encrypted nor authenticated (docs/cluster.md).
"""

from __future__ import annotations

import datetime
import errno
import hashlib
import hmac
import secrets
import socket
import sys
import time

import torch.distributed as dist

from zerovision.training.base.errors import UserError
from zerovision.training.world.network_interfaces import is_loopback

NONCE_DIGITS = 64  # hexadecimal: 256 bits
POLL_SECONDS = 0.01
# Keys of the store; the last two with a rank.
CHALLENGE, ANSWER, WELCOME = "zerovision/challenge", "zerovision/answer/{}", "zerovision/welcome/{}"
BACKLOG = 4096


def open_store(address: str, port: int, timeout: datetime.timedelta, *, is_host: bool, is_alone: bool) -> dist.Store:
    """Open the ranks' store, or connect to it.

    Args:
        address: of the store, on the host of rank 0.
        port: of the store.
        timeout: how long to wait for the others, now and in every request to the store.
        is_host: whether this is rank 0, which opens it: on this one address, not on all of its host's as PyTorch does.
        is_alone: whether all ranks run on one host.

    Raises:
        UserError: the port is in use, or the address is unknown.
    """
    descriptor = _listen(address, port, is_alone=is_alone) if is_host else None
    return dist.TCPStore(address, port, None, is_host, timeout, wait_for_workers=False, master_listen_fd=descriptor)


def authenticate(
    store: dist.Store, secret: str, rank: int, size: int, timeout: datetime.timedelta, *, is_ours: bool
) -> dist.Store:
    """Prove to rank 0, or as rank 0 to all others, that this is a rank of the run; a collective over the store.

    Args:
        store: that all ranks share.
        secret: of the run.
        rank: of this process.
        size: number of ranks.
        timeout: how long rank 0 waits for all.
        is_ours: whether only the ranks of this run write to the store, so that rank 0 can detect other processes.

    Returns:
        The store under a prefix that only the ranks know, for the process group.

    Raises:
        ConnectionError: the process that acts as rank 0 has not proved itself.
        TimeoutError: a rank did not come.
    """
    key = secret.encode()
    if rank == 0:
        challenge = _nonce()
        store.set(CHALLENGE, challenge.decode())
        nonces = _admit(store, key, challenge, size, timeout, is_ours=is_ours)
        for other, nonce in nonces.items():
            store.set(WELCOME.format(other), _proof(key, "rank 0", other, size, challenge, nonce).decode())
    else:
        challenge, nonce = store.get(CHALLENGE), _nonce()
        store.set(ANSWER.format(rank), (nonce + _proof(key, "rank", rank, size, challenge, nonce)).decode())
        welcome = store.get(WELCOME.format(rank))
        if not hmac.compare_digest(welcome, _proof(key, "rank 0", rank, size, challenge, nonce)):
            raise ConnectionError("the process that the ranks found as rank 0 is none of this run")
    return dist.PrefixStore(_proof(key, "store", 0, size, challenge, b"").decode(), store)


def _admit(
    store: dist.Store, key: bytes, challenge: bytes, size: int, timeout: datetime.timedelta, *, is_ours: bool
) -> dict[int, bytes]:
    """Wait until every rank has proved itself, and return the nonce of each; warn once if another process tries."""
    nonces: dict[int, bytes] = {}
    has_warned, deadline = False, time.monotonic() + timeout.total_seconds()
    while True:
        # The ranks' own keys are the challenge and one answer each; they write no other before they are welcome.
        is_stranger_here = is_ours and store.num_keys() > size
        for rank in sorted({*range(1, size)} - nonces.keys()):
            key_of_rank = ANSWER.format(rank)
            answer = store.get(key_of_rank) if store.check([key_of_rank]) else b""
            nonce, proof = answer[:NONCE_DIGITS], answer[NONCE_DIGITS:]
            if hmac.compare_digest(proof, _proof(key, "rank", rank, size, challenge, nonce)):
                nonces[rank] = nonce
            elif answer:  # the true rank will overwrite it
                is_stranger_here = True
        if is_stranger_here and not has_warned:
            has_warned = True
            print(
                "note: a process without the run's secret tried to join the ranks; it was not let in", file=sys.stderr
            )
        if len(nonces) == size - 1:
            return nonces
        if time.monotonic() > deadline:
            missing = min({*range(1, size)} - nonces.keys())
            raise TimeoutError(f"rank {missing} of {size} did not come within {timeout}")
        time.sleep(POLL_SECONDS)


def _proof(key: bytes, role: str, rank: int, size: int, challenge: bytes, nonce: bytes) -> bytes:
    """Return the HMAC of these values, which only a process with the key can compute."""
    message = f"{role}/{rank}/{size}/{challenge.hex()}/{nonce.hex()}"
    return hmac.new(key, message.encode(), hashlib.sha256).hexdigest().encode()


def _nonce() -> bytes:
    return secrets.token_hex(NONCE_DIGITS // 2).encode()


def _listen(address: str, port: int, *, is_alone: bool) -> int:
    """Return a socket that listens on this address only, or on all of this host's if others cannot reach it."""
    try:
        family, kind, protocol, _, endpoint = socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)[0]
    except socket.gaierror as error:
        raise UserError(f"the address that the ranks meet on, {address}: {error.strerror}.") from None
    if is_loopback(str(endpoint[0])) and not is_alone:  # Debian's 127.0.1.1 for a host's own name
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
                raise UserError(f"port {port} is in use: give a free one with --master_port.") from None
            if error.errno != errno.EADDRNOTAVAIL or one[0] == "":
                raise
            print(f"note: {address} is no address of this machine: rank 0 listens on all of them", file=sys.stderr)
    raise AssertionError
