"""Measures the network between the ranks: real messages between real processes, one for each rank of the training."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from training.parallel.exchange import gather, list_of, number, row_of, text
from training.parallel.secure_store import authenticate, open_store

SMALL_BYTES, SMALL_REPEATS, LARGE_REPEATS = 1024, 20, 3
FIRST_BYTES, LARGEST_BYTES = 1 << 16, {"cpu": 1 << 26, "cuda": 1 << 28}
LONG_ENOUGH_SECONDS = 0.1  # a message that takes as long is large enough: its latency is a small part
MOST_ROUNDS = 7  # each host measures its link to so many others
INFINIBAND = Path("/sys/class/infiniband")

Ranks = Sequence[tuple[str, int]]  # name and number of ranks of every host, in the order of the ranks


def measure_network(host: str, common: Mapping[str, Any], interface: str, seconds: float) -> dict[str, Any]:
    """Run this host's ranks of the check; a collective of all hosts' probes.

    Args:
        host: this host's name in `ranks`.
        common: the same on all hosts: `ranks`, see `Ranks`; `address` and `port` of the first host, where the ranks
            meet; the `secret` that they prove to know; `use_gpu` for NCCL between GPUs instead of gloo between CPUs;
            `join_seconds`, how long ranks wait for each other.
        interface: by which this host reaches the others; '' leaves the choice to gloo and NCCL.
        seconds: time limit of all of it.

    Returns:
        `interface_mbit` (0 if unknown), `infiniband`; `report` if rank 0 is here, see `_measure`; if the check failed,
        `problem` and its `phase`: "meet" (reach the first host's port), "join" (reach the other ranks), "send".
    """
    names = [name for name, _ in common["ranks"]]
    first, count = _first_ranks(common["ranks"])[names.index(host)], dict(common["ranks"])[host]
    context = multiprocessing.get_context("fork")  # torch is imported already
    pipes, processes = [], []
    for local_rank in range(count):
        ours, theirs = context.Pipe(duplex=False)
        arguments = (theirs, common, first + local_rank, local_rank, interface)
        process = context.Process(target=_run_rank, args=arguments, daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    answer = _collect(pipes, seconds)
    for process in processes:
        process.kill()
        process.join()
    state = psutil.net_if_stats().get(interface)
    return {"interface_mbit": state.speed if state else 0, "infiniband": infiniband_links(), **answer}


def infiniband_links() -> list[str]:
    """Return the active InfiniBand or RoCE ports: 'mlx5_0: 400 Gb/sec (4X NDR), InfiniBand'."""
    links = []
    for port in sorted(INFINIBAND.glob("*/ports/*")):
        state, rate, layer = ((port / name) for name in ("state", "rate", "link_layer"))
        if state.is_file() and "ACTIVE" in state.read_text():
            links.append(f"{port.parts[-3]}: {rate.read_text().strip()}, {layer.read_text().strip()}")
    return links


def rounds_of_pairs(hosts: int) -> list[list[tuple[int, int]]]:
    """Return rounds that have every pair once, and no host twice in a round (round-robin tournament)."""
    seats = [*range(hosts), *([-1] if hosts % 2 else [])]
    rounds = []
    for _ in range(len(seats) - 1):
        half = len(seats) // 2
        pairs = zip(seats[:half], reversed(seats[half:]), strict=True)
        rounds.append([(min(pair), max(pair)) for pair in pairs if -1 not in pair])
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return rounds


def _collect(pipes: Sequence[Connection], seconds: float) -> dict[str, Any]:
    """Wait until every rank has sent its report, or one a problem."""
    phases = dict.fromkeys(pipes, "meet")
    answer: dict[str, Any] = {}
    deadline = time.monotonic() + seconds
    while phases:
        ready = wait(list(phases), max(deadline - time.monotonic(), 0))
        if not ready:
            return {"problem": "no end within the time allowed", "phase": next(iter(phases.values()))}
        for pipe in ready:
            assert isinstance(pipe, Connection)
            try:
                kind, value = pipe.recv()
            except EOFError:
                kind, value = "problem", "the rank's process died"
            if kind == "problem":
                return {"problem": value, "phase": phases[pipe]}
            if kind == "phase":
                phases[pipe] = value
                continue
            del phases[pipe]
            answer |= {"report": value} if value else {}
    return answer


def _run_rank(pipe: Connection, common: Mapping[str, Any], rank: int, local_rank: int, interface: str) -> None:
    """Run one rank of the check; sends each phase, then the report (None but on rank 0) or the problem."""
    if interface:
        os.environ.update(GLOO_SOCKET_IFNAME=interface, NCCL_SOCKET_IFNAME=f"={interface}")
    torch.set_num_threads(1)
    ranks, use_gpu = common["ranks"], common["use_gpu"]
    size = sum(count for _, count in ranks)
    limit = datetime.timedelta(seconds=common["join_seconds"])
    device = torch.device("cuda", local_rank) if use_gpu else torch.device("cpu")
    try:
        store = open_store(common["address"], common["port"], limit, is_host=rank == 0, is_alone=len(ranks) == 1)
        pipe.send(("phase", "join"))
        store = authenticate(store, common["secret"], rank, size, limit, is_ours=rank == 0)
        if use_gpu:
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if use_gpu else "gloo", store=store, rank=rank, world_size=size, timeout=limit)
        _time_all_reduce(1, device)
        pipe.send(("phase", "send"))
        report = _measure(rank, ranks, device)
        dist.barrier()
        pipe.send(("report", report if rank == 0 else None))
        if rank == 0:  # the store ends with this process: let the others end first
            time.sleep(0.2)
    except Exception as error:
        pipe.send(("problem", " ".join(f"{type(error).__name__}: {error}".split())[:300]))
    os._exit(0)  # does not wait for a peer that is gone


def _measure(rank: int, ranks: Ranks, device: torch.device) -> dict[str, Any]:
    """Return `small` and `large` (bytes, seconds), `links` (two hosts, bytes per second); a collective."""
    small, large = all_reduce_seconds(device)
    links = gather(_measure_links(rank, ranks, device), list_of(row_of(text, text, number)), None, device)
    return {
        "small": small,
        "large": large,
        "links": [link for own in links for link in own],
        "backend": dist.get_backend(),
        "ranks": dist.get_world_size(),
    }


def all_reduce_seconds(device: torch.device) -> list[tuple[int, float]]:
    """Return bytes and seconds of an all-reduce that latency decides, and of one that bandwidth does; a collective."""
    small = statistics.median(_time_all_reduce(SMALL_BYTES, device) for _ in range(SMALL_REPEATS))
    size = FIRST_BYTES
    while True:
        seconds = min(_time_all_reduce(size, device) for _ in range(LARGE_REPEATS))
        slowest = torch.tensor([seconds], dtype=torch.float64, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)  # so that all ranks take the same way
        if (seconds := slowest.item()) > LONG_ENOUGH_SECONDS or size >= LARGEST_BYTES[device.type]:
            return [(SMALL_BYTES, small), (size, seconds)]
        size *= 4


def _measure_links(rank: int, ranks: Ranks, device: torch.device) -> list[list[Any]]:
    """Measure the links between the hosts' first ranks, in rounds of disjoint pairs; return those that it led."""
    firsts, links = _first_ranks(ranks), []
    if rank not in firsts or len(ranks) == 1:
        return []
    own = firsts.index(rank)
    for first, second in (pair for pairs in rounds_of_pairs(len(ranks))[:MOST_ROUNDS] for pair in pairs):
        if own == first:
            links.append([ranks[first][0], ranks[second][0], _lead_link(firsts[second], device)])
        elif own == second:
            _follow_link(firsts[first], device)
    return links


def _lead_link(peer: int, device: torch.device) -> float:
    """Send growing messages, which come back; return bytes per second, each way, of the last one."""
    size = FIRST_BYTES
    while True:
        dist.send(torch.tensor([size], device=device), peer)
        message = torch.zeros(size, dtype=torch.uint8, device=device)
        start = time.perf_counter()
        dist.send(message, peer)
        dist.recv(message, peer)
        _synchronize(device)
        seconds = time.perf_counter() - start
        if seconds > 2 * LONG_ENOUGH_SECONDS or size >= LARGEST_BYTES[device.type]:
            dist.send(torch.tensor([0], device=device), peer)
            return 2 * size / seconds
        size *= 4


def _follow_link(peer: int, device: torch.device) -> None:
    size = torch.zeros(1, dtype=torch.int64, device=device)
    while True:
        dist.recv(size, peer)
        if not size.item():
            return
        message = torch.empty(int(size.item()), dtype=torch.uint8, device=device)
        dist.recv(message, peer)
        dist.send(message, peer)


def _time_all_reduce(size_bytes: int, device: torch.device) -> float:
    """Return seconds of an all-reduce of float32; a collective."""
    values = torch.zeros(max(size_bytes // 4, 1), device=device)
    dist.barrier()
    _synchronize(device)
    start = time.perf_counter()
    dist.all_reduce(values)
    _synchronize(device)
    return time.perf_counter() - start


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _first_ranks(ranks: Ranks) -> list[int]:
    return [sum(count for _, count in ranks[:number]) for number in range(len(ranks))]
