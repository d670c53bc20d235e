"""Collects facts about a machine for the doctor: software, limits, GPUs, disks, data, and the network.

    python zerovision/launch/machine_facts.py node01

An agent runs this program and asks it the doctor's questions: one line of JSON each on standard input and output.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import multiprocessing
import os
import resource
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from zerovision.training.base.control_groups import free_memory, quota_note, usable_cores, usable_memory
from zerovision.training.base.errors import FileServerError, UserError
from zerovision.training.base.files import existing_part
from zerovision.training.base.run_folder import SHARED_MEMORY
from zerovision.training.config.command_line import parse_args
from zerovision.training.observe.environment import software
from zerovision.training.world.machine import free_port, own_addresses

if TYPE_CHECKING:
    import torch

CONNECT_SECONDS = 3.0
REPEATS = 3  # all-reduces of each size; the fastest one counts
FIRST_BYTES, LARGEST_BYTES = 1 << 16, {"cpu": 1 << 26, "cuda": 1 << 28}
LONG_ENOUGH_SECONDS = 0.1  # a message that takes this long is large enough: latency is a small part of it

Facts = dict[str, Any]
_listening: list[socket.socket] = []  # kept open until the process ends


def machine_facts(_node: str, order: Mapping[str, Any]) -> Facts:
    """Return facts about this machine as values that JSON can represent.

    `order` has `log_dir`, which need not exist yet; `data`, the fields of the data set's `DataOptions`, or None; and
    `training`, the trainer's flags, or None.
    """
    shm_bytes, _, shm_free_bytes = shutil.disk_usage(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else (0, 0, 0)
    return {
        "software": software(),
        "cores": usable_cores(),
        "cpu_quota": quota_note(),
        "memory_bytes": usable_memory(),
        "memory_free_bytes": free_memory(),
        "shm_bytes": shm_bytes,
        "shm_free_bytes": shm_free_bytes,
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "log_folder": log_folder_facts(Path(order["log_dir"])),
        "spare_port": free_port(),
        "own_addresses": own_addresses(),
        **gpu_facts(),
        **torch_facts(),
        "data": data_facts(order["data"], order["training"]) if order["data"] else {},
    }


def gpu_facts() -> Facts:
    """Return this machine's `gpus`, `driver` and `driver_cuda`, and `gpu_problem`, the reason why NVML fails, or ''."""
    import pynvml as nvml

    facts: Facts = {"gpus": [], "driver": "", "driver_cuda": None, "gpu_problem": ""}
    try:
        nvml.nvmlInit()
        facts["driver"] = nvml.nvmlSystemGetDriverVersion()
        cuda = nvml.nvmlSystemGetCudaDriverVersion_v2()
        facts["driver_cuda"] = f"{cuda // 1000}.{cuda % 1000 // 10}"
        for number in range(nvml.nvmlDeviceGetCount()):
            gpu = nvml.nvmlDeviceGetHandleByIndex(number)
            memory = nvml.nvmlDeviceGetMemoryInfo(gpu, nvml.nvmlMemory_v2)
            errors = 0
            with contextlib.suppress(nvml.NVMLError_NotSupported):  # memory without ECC
                kind = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED
                errors = nvml.nvmlDeviceGetTotalEccErrors(gpu, kind, nvml.NVML_VOLATILE_ECC)
            facts["gpus"].append(
                {
                    "name": nvml.nvmlDeviceGetName(gpu),
                    "memory_mib": memory.total / 2**20,
                    "memory_used_mib": memory.used / 2**20,
                    "temperature_c": nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
                    "ecc_uncorrected": errors,
                }
            )
    except nvml.NVMLError_LibraryNotFound:
        pass  # no driver, so no GPU
    except nvml.NVMLError as error:
        facts["gpu_problem"] = str(error)
    return facts


def torch_facts() -> Facts:
    """Return torch's CUDA version, why torch or torchvision cannot be imported, and whether the C decoder works."""
    try:
        import torch  # must not initialize CUDA: the ranks of the network check are forked from this process
        import torchvision  # noqa: F401  fails if its operators were built for another torch
    except Exception as error:
        return {"import_problem": f"{type(error).__name__}: {error}"[:200], "torch_cuda": None}
    from zerovision.training.data.reading.native import load_library

    return {"import_problem": None, "torch_cuda": torch.version.cuda, "decodes_parts": load_library() is not None}


def log_folder_facts(folder: Path) -> Facts:
    """Return the folder's `path` and `free_bytes`, and `problem`, the reason why it cannot be written to, or None."""
    existing, problem = existing_part(folder), None
    try:
        with tempfile.TemporaryFile(dir=existing, prefix=".doctor-") as file:
            file.write(b"0" * 4096)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        problem = error.strerror or str(error)
    return {"path": str(folder), "free_bytes": shutil.disk_usage(existing).free, "problem": problem}


def data_facts(options: Mapping[str, Any], training: Sequence[str] | None) -> Facts:
    """Return a data set's summary (`holds`), its `hash`, and a run's `saved_bytes`; on failure, only the `problem`."""
    from zerovision.training.data import DataOptions, load_data

    try:
        found = load_data(replace(DataOptions(**options), cache="off", download=False))
    except (UserError, FileServerError) as error:
        return {"problem": str(error)}
    shown = f"{options['data']}: {len(found.class_names)} classes, {len(found.train)} + {len(found.val)} images"
    saved_bytes = 0
    if training is not None:
        from zerovision.planning.run_workload import workload_of

        with contextlib.suppress(Exception):  # the size of some networks cannot be computed without data
            config = replace(parse_args(training)[0], image_channels=found.preprocessing.channels)
            saved_bytes = workload_of(config, len(found.class_names), found.train.sizes[-1]).saved_bytes
    return {"holds": shown, "hash": found.fingerprint, "saved_bytes": saved_bytes}


def open_port(node: str, order: Mapping[str, Any]) -> Facts:
    """Listen on this machine's address in `addresses`; return the `port`."""
    _listening.append(socket.create_server((order["addresses"][node], 0), backlog=1024))
    return {"port": _listening[-1].getsockname()[1]}


def try_paths(node: str, order: Mapping[str, Any]) -> Facts:
    """Connect to this machine's `targets` (name, address and port); return the connections that `failed`."""
    failed = []
    for name, address, port in order["targets"].get(node, []):
        try:
            socket.create_connection((address, port), timeout=CONNECT_SECONDS).close()
        except OSError:
            failed.append((node, name, port))
    return {"failed": failed}


def measure_network(node: str, order: Mapping[str, Any]) -> Facts:
    """Run this machine's ranks of the network check; a collective operation across the agents of all machines.

    `order` has `ranks`, each machine's name and number of ranks, in rank order; the `address` and `port` of the first
    machine, where the ranks meet; the `run_id` of their store; `use_gpu`, whether to use NCCL between GPUs instead of
    gloo between CPUs; `interfaces`, the one over which each machine reaches the others ('' lets gloo and NCCL choose);
    `join_seconds`, how long ranks wait for each other; and `seconds`, the time limit of the whole check. The result has
    `bytes` and `seconds` of an all-reduce and the `backend`, or only the `problem` if the check failed.
    """
    names = [name for name, _ in order["ranks"]]
    counts = [count for _, count in order["ranks"]]
    first, count = sum(counts[: names.index(node)]), counts[names.index(node)]
    ranks = [(order, order["interfaces"][node], first + local_rank, local_rank) for local_rank in range(count)]
    with multiprocessing.get_context("fork").Pool(count) as pool:  # torch is already imported
        try:
            answers = pool.starmap_async(_run_rank, ranks, chunksize=1).get(order["seconds"])
        except multiprocessing.TimeoutError:
            return {"problem": "did not end in the time allowed"}
    return next((answer for answer in answers if "problem" in answer), answers[0])


def _run_rank(order: Mapping[str, Any], interface: str, rank: int, local_rank: int) -> Facts:
    """Run one rank of the network check; return its measurements, or the `problem`."""
    import torch
    import torch.distributed as dist

    from zerovision.training.world.world import open_store

    if interface:
        os.environ.update(GLOO_SOCKET_IFNAME=interface, NCCL_SOCKET_IFNAME=f"={interface}")
    torch.set_num_threads(1)
    ranks, use_gpu = order["ranks"], order["use_gpu"]
    size = sum(count for _, count in ranks)
    limit = datetime.timedelta(seconds=order["join_seconds"])
    device = torch.device("cuda", local_rank) if use_gpu else torch.device("cpu")
    try:
        place, is_alone = (order["address"], order["port"]), len(ranks) == 1
        store = open_store(*place, limit, order["run_id"], is_host=rank == 0, is_alone=is_alone)
        if use_gpu:
            torch.cuda.set_device(device)
        dist.init_process_group("nccl" if use_gpu else "gloo", store=store, rank=rank, world_size=size, timeout=limit)
        size_bytes, seconds = _measure_all_reduce(device)
        dist.barrier()
    except Exception as error:
        return {"problem": " ".join(f"{type(error).__name__}: {error}".split())[:300]}
    if rank == 0:  # the store ends with this process: let the other ranks end first
        time.sleep(0.2)
    return {"bytes": size_bytes, "seconds": seconds, "backend": dist.get_backend()}


def _measure_all_reduce(device: torch.device) -> tuple[int, float]:
    """Return the bytes and the seconds of a float32 all-reduce that is limited by bandwidth; a collective operation."""
    import torch
    import torch.distributed as dist

    size = FIRST_BYTES
    while True:
        values = torch.zeros(size // 4, device=device)
        times = []
        for _ in range(REPEATS):
            dist.barrier()
            values[0].item()  # waits for the device
            start = time.perf_counter()
            dist.all_reduce(values)
            values[0].item()
            times.append(time.perf_counter() - start)
        slowest = torch.tensor([min(times)], dtype=torch.float64, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)  # so that all ranks take the same branch
        if (seconds := slowest.item()) > LONG_ENOUGH_SECONDS or size >= LARGEST_BYTES[device.type]:
            return size, seconds
        size *= 4


# Functions that answer the doctor's orders, by kind.
ANSWERS: dict[str, Callable[[str, Mapping[str, Any]], Facts]] = {
    "facts": machine_facts,
    "listen": open_port,
    "reach": try_paths,
    "all-reduce": measure_network,
}


def main(node: str) -> None:
    """Answer questions until standard input is closed, discarding the output of libraries."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for order in map(json.loads, sys.stdin):
        try:
            found = ANSWERS[order["kind"]](node, order)
        except Exception as error:
            found = {"problem": str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"}
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
