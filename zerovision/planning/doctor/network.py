"""Measures the network between the ranks: an all-reduce of real processes, one for each rank of the training."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import time
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from zerovision.planning.doctor.probe import Answer
from zerovision.training.world.store import open_store

REPEATS = 3
FIRST_BYTES, LARGEST_BYTES = 1 << 16, {"cpu": 1 << 26, "cuda": 1 << 28}
LONG_ENOUGH_SECONDS = 0.1  # a message that takes as long is large enough: its latency is a small part


def measure_network(host: str, common: Mapping[str, Any], interface: str, seconds: float) -> Answer:
    """Run this host's ranks of the check; a collective of all hosts' probes.

    Args:
        host: this host's name in `ranks`.
        common: the same on all hosts: `ranks`, name and number of ranks of every host, in the order of the ranks;
            `address` and `port` of the first host, where the ranks meet; the `run_id` of their store;
            `use_gpu` for NCCL between GPUs instead of gloo between CPUs; `join_seconds`, how long ranks wait for each
            other.
        interface: by which this host reaches the others; '' leaves the choice to gloo and NCCL.
        seconds: time limit of all of it.

    Returns:
        `bytes` and `seconds` of an all-reduce, and the `backend`; `problem` if the check failed.
    """
    names = [name for name, _ in common["ranks"]]
    counts = [count for _, count in common["ranks"]]
    first, count = sum(counts[: names.index(host)]), counts[names.index(host)]
    ranks = [(common, first + local_rank, local_rank, interface) for local_rank in range(count)]
    with multiprocessing.get_context("fork").Pool(count) as pool:  # torch is imported already; its end kills the ranks
        try:
            answers = pool.starmap_async(_run_rank, ranks, chunksize=1).get(seconds)
        except multiprocessing.TimeoutError:
            return {"problem": "no end within the time allowed"}
    return next((answer for answer in answers if "problem" in answer), answers[0])


def _run_rank(common: Mapping[str, Any], rank: int, local_rank: int, interface: str) -> Answer:
    """Run one rank of the check and return what it measured, or the `problem`."""
    if interface:
        os.environ.update(GLOO_SOCKET_IFNAME=interface, NCCL_SOCKET_IFNAME=f"={interface}")
    torch.set_num_threads(1)
    ranks, use_gpu = common["ranks"], common["use_gpu"]
    size = sum(count for _, count in ranks)
    limit = datetime.timedelta(seconds=common["join_seconds"])
    device = torch.device("cuda", local_rank) if use_gpu else torch.device("cpu")
    try:
        place, is_alone = (common["address"], common["port"]), len(ranks) == 1
        store = open_store(*place, limit, common["run_id"], is_host=rank == 0, is_alone=is_alone)
        if use_gpu:
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if use_gpu else "gloo", store=store, rank=rank, world_size=size, timeout=limit)
        size_bytes, seconds = _measure_all_reduce(device)
        dist.barrier()
    except Exception as error:
        return {"problem": " ".join(f"{type(error).__name__}: {error}".split())[:300]}
    if rank == 0:  # the store ends with this process: let the others end first
        time.sleep(0.2)
    return {"bytes": size_bytes, "seconds": seconds, "backend": dist.get_backend()}


def _measure_all_reduce(device: torch.device) -> tuple[int, float]:
    """Return bytes and seconds of an all-reduce of float32 that bandwidth decides; a collective."""
    size = FIRST_BYTES
    while True:
        values = torch.zeros(size // 4, device=device)
        seconds = min(_time_all_reduce(values) for _ in range(REPEATS))
        slowest = torch.tensor([seconds], dtype=torch.float64, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)  # so that all ranks take the same way
        if (seconds := slowest.item()) > LONG_ENOUGH_SECONDS or size >= LARGEST_BYTES[device.type]:
            return size, seconds
        size *= 4


def _time_all_reduce(values: torch.Tensor) -> float:
    dist.barrier()
    values[0].item()  # waits for the device
    start = time.perf_counter()
    dist.all_reduce(values)
    values[0].item()
    return time.perf_counter() - start
