"""The network as the ranks see it: real messages between real processes, one for each rank of the training."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import statistics
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
import torch.distributed as dist

from training.parallel.exchange import gather, list_of, number, row_of, text
from training.parallel.secure_store import authenticate, open_store

SMALL_BYTES, SMALL_REPEATS, LARGE_REPEATS = 1024, 20, 3
FIRST_BYTES, LARGEST_BYTES = 1 << 16, {"cpu": 1 << 26, "cuda": 1 << 28}
LONG_ENOUGH_SECONDS = 0.1  # a message that takes as long is large enough: what comes before it is spread thin
MOST_ROUNDS = 7  # each host measures its link to so many others
INFINIBAND = Path("/sys/class/infiniband")


class Place(NamedTuple):
    """Where a rank stands among the others: its numbers, all hosts with their ranks, where and by what they meet."""

    rank: int
    local_rank: int
    hosts: list[list[Any]]
    address: str
    port: int
    secret: str
    interface: str


def measure_network(
    first_rank: int,
    ranks: int,
    hosts: list[list[Any]],
    address: str,
    port: int,
    secret: str,
    interface: str,
    use_gpu: bool,
    join_seconds: float,
    seconds: float,
) -> dict[str, Any]:
    """Run this machine's ranks of the check; a collective of all machines' probes.

    Args:
        first_rank: of this machine.
        ranks: on this machine.
        hosts: name and number of ranks of every host, in the order of the ranks.
        address: of the first of them, where the ranks meet.
        port: there.
        secret: that the ranks prove to each other that they know.
        interface: by which this machine talks to the others; '' leaves the choice to gloo and NCCL.
        use_gpu: NCCL between GPUs instead of gloo between CPUs.
        join_seconds: how long ranks wait for each other.
        seconds: how long all of it may take.

    Returns:
        `interface_mbit`, `infiniband`; `report` where rank 0 is here, see `_measure`; and `problem` with
        `phase`, what the ranks were at when they failed: "meet" (reach the first host's port), "join" (reach the
        other ranks), "send".
    """
    context = multiprocessing.get_context("fork")  # torch is imported already
    pipes, processes = [], []
    for local_rank in range(ranks):
        ours, theirs = context.Pipe(duplex=False)
        place = Place(first_rank + local_rank, local_rank, hosts, address, port, secret, interface)
        process = context.Process(target=_rank_main, args=(theirs, place, use_gpu, join_seconds), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    answer = _collect(pipes, seconds)
    for process in processes:
        process.kill()
        process.join()
    return {"interface_mbit": _mbit(interface), "infiniband": infiniband_links(), **answer}


def infiniband_links() -> list[str]:
    """Return the active InfiniBand or RoCE ports: 'mlx5_0: 400 Gb/sec (4X NDR), InfiniBand'."""
    links = []
    for port in sorted(INFINIBAND.glob("*/ports/*")):
        state, rate, layer = ((port / name) for name in ("state", "rate", "link_layer"))
        if state.is_file() and "ACTIVE" in state.read_text():
            links.append(f"{port.parts[-3]}: {rate.read_text().strip()}, {layer.read_text().strip()}")
    return links


def rounds_of_pairs(hosts: int) -> list[list[tuple[int, int]]]:
    """Return rounds in which no host stands twice and, over all of them, every pair once (round-robin tournament)."""
    seats = [*range(hosts), *([-1] if hosts % 2 else [])]
    rounds = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        rounds.append([(min(pair), max(pair)) for pair in pairs if -1 not in pair])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def _collect(pipes: Sequence[Connection], seconds: float) -> dict[str, Any]:
    """Wait for all ranks' last words; the first problem wins."""
    open_pipes, phases = list(pipes), {id(pipe): "meet" for pipe in pipes}
    answer: dict[str, Any] = {}
    deadline = time.monotonic() + seconds
    while open_pipes and "problem" not in answer:
        ready = wait(open_pipes, max(deadline - time.monotonic(), 0))
        if not ready:
            answer |= {"problem": "no end within the time allowed", "phase": phases[id(open_pipes[0])]}
        for pipe in ready:
            assert isinstance(pipe, Connection)
            try:
                word, value = pipe.recv()
            except EOFError:
                word, value = "problem", "the rank's process died"
            if word == "phase":
                phases[id(pipe)] = value
                continue
            open_pipes.remove(pipe)
            if word == "problem":
                answer |= {"problem": value, "phase": phases[id(pipe)]}
            elif value is not None:
                answer["report"] = value
    return answer


def _rank_main(pipe: Connection, place: Place, use_gpu: bool, join_seconds: float) -> None:
    """Be one rank: say each phase, then the report (rank 0's; the others' is None) or the problem."""
    if place.interface:
        os.environ.update(GLOO_SOCKET_IFNAME=place.interface, NCCL_SOCKET_IFNAME=f"={place.interface}")
    torch.set_num_threads(1)
    rank, size = place.rank, sum(ranks for _, ranks in place.hosts)
    patience = datetime.timedelta(seconds=join_seconds)
    try:
        is_host, is_alone = rank == 0, len(place.hosts) == 1
        store = open_store(place.address, place.port, patience, is_host=is_host, is_alone=is_alone)
        pipe.send(("phase", "join"))
        store = authenticate(store, place.secret, rank, size, patience, is_ours=is_host)
        device = torch.device("cuda", place.local_rank) if use_gpu else torch.device("cpu")
        if use_gpu:
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if use_gpu else "gloo", store=store, rank=rank, world_size=size, timeout=patience
        )
        _time_all_reduce(1, device)
        pipe.send(("phase", "send"))
        report = _measure(rank, place.hosts, device)
        dist.barrier()
        pipe.send(("report", report if rank == 0 else None))
        if rank == 0:  # the store ends with it: let the others go first
            time.sleep(0.2)
    except Exception as error:
        pipe.send(("problem", " ".join(f"{type(error).__name__}: {error}".split())[:300]))
    os._exit(0)  # without waiting for a peer that is gone


def _measure(rank: int, hosts: list[Any], device: torch.device) -> dict[str, Any]:
    """Return `small_seconds`, `large` (bytes, seconds), `links` (two hosts, bytes per second); a collective."""
    small = statistics.median(_time_all_reduce(SMALL_BYTES, device) for _ in range(SMALL_REPEATS))
    size = FIRST_BYTES
    while True:
        seconds = _slowest(min(_time_all_reduce(size, device) for _ in range(LARGE_REPEATS)), device)
        if seconds > LONG_ENOUGH_SECONDS or size >= LARGEST_BYTES[device.type]:
            break
        size *= 4
    link = row_of(text, text, number)
    links = gather(_measure_links(rank, hosts, device), list_of(link), None, device)
    return {
        "small_seconds": small,
        "large": [size, seconds],
        "links": [link for own in links for link in own],
        "backend": dist.get_backend(),
        "ranks": dist.get_world_size(),
    }


def _measure_links(rank: int, hosts: list[Any], device: torch.device) -> list[list[Any]]:
    """Measure the links between the hosts' first ranks, in rounds of disjoint pairs; return those that it led."""
    starts, links = _starts(hosts), []
    if rank not in starts or len(hosts) == 1:
        return []
    own = starts.index(rank)
    for pairs in rounds_of_pairs(len(hosts))[:MOST_ROUNDS]:
        for first, second in pairs:
            if own == first:
                links.append([hosts[first][0], hosts[second][0], _lead_link(starts[second], device)])
            elif own == second:
                _follow_link(starts[first], device)
    return links


def _lead_link(peer: int, device: torch.device) -> float:
    """Send messages that grow and come back; return bytes per second, each way, of the last one."""
    size = FIRST_BYTES
    while True:
        dist.send(torch.tensor([size], device=device), peer)
        message = torch.zeros(size, dtype=torch.uint8, device=device)
        start = time.perf_counter()
        dist.send(message, peer)
        dist.recv(message, peer)
        _finish(device)
        seconds = time.perf_counter() - start
        if seconds > 2 * LONG_ENOUGH_SECONDS or size >= LARGEST_BYTES[device.type]:
            dist.send(torch.tensor([0], device=device), peer)
            return 2 * size / seconds
        size *= 4


def _follow_link(peer: int, device: torch.device) -> None:
    header = torch.zeros(1, dtype=torch.int64, device=device)
    while True:
        dist.recv(header, peer)
        if not (size := int(header.item())):
            return
        message = torch.empty(size, dtype=torch.uint8, device=device)
        dist.recv(message, peer)
        dist.send(message, peer)


def _time_all_reduce(size_bytes: int, device: torch.device) -> float:
    """Return seconds of an all-reduce of float32; a collective."""
    values = torch.zeros(max(size_bytes // 4, 1), device=device)
    dist.barrier()
    _finish(device)
    start = time.perf_counter()
    dist.all_reduce(values)
    _finish(device)
    return time.perf_counter() - start


def _slowest(seconds: float, device: torch.device) -> float:
    """Return the largest over the ranks; a collective."""
    value = torch.tensor([seconds], dtype=torch.float64, device=device)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return float(value.item())


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _starts(hosts: list[Any]) -> list[int]:
    """Return the first rank of each host."""
    return [sum(ranks for _, ranks in hosts[:number]) for number in range(len(hosts))]


def _mbit(interface: str) -> int:
    """Return the speed an interface promises in Mbit/s, 0 where it does not say."""
    state = psutil.net_if_stats().get(interface)
    return state.speed if state else 0
