"""Relay frames between two interfaces with a delay (and optional loss) each way.

Stands in for tc netem where the kernel lacks it: delaywire.py IF_A IF_B DELAY_MS [LOSS_PERCENT]
"""

from __future__ import annotations

import collections
import random
import select
import socket
import sys
import time

SOL_PACKET, PACKET_VNET_HDR, PACKET_IGNORE_OUTGOING, ETH_P_ALL = 263, 15, 23, 3


def open_port(name: str) -> socket.socket:
    s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, 0)
    # The virtio header carries checksum-offload and segmentation state; without
    # it veth frames would be re-sent with unfinished checksums.
    s.setsockopt(SOL_PACKET, PACKET_VNET_HDR, 1)
    s.setsockopt(SOL_PACKET, PACKET_IGNORE_OUTGOING, 1)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
    s.bind((name, ETH_P_ALL))
    s.setblocking(False)
    return s


def main(a: str, b: str, delay_ms: str, loss_percent: str = "0") -> None:
    delay, loss = float(delay_ms) / 1e3, float(loss_percent) / 100
    ports = [open_port(a), open_port(b)]
    peer = {ports[0]: ports[1], ports[1]: ports[0]}
    queue = collections.deque()  # (due, out_port, frame); constant delay keeps it ordered
    while True:
        timeout = max(0.0, queue[0][0] - time.monotonic()) if queue else None
        for port in select.select(ports, [], [], timeout)[0]:
            try:
                while True:
                    frame = port.recv(70000)
                    if random.random() >= loss:
                        queue.append((time.monotonic() + delay, peer[port], frame))
            except BlockingIOError:
                pass
        now = time.monotonic()
        while queue and queue[0][0] <= now:
            _, out, frame = queue.popleft()
            try:
                out.send(frame)
            except OSError as error:
                print(f"dropped {len(frame)} bytes: {error}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
