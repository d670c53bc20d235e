"""What one machine has: hardware, software, limits, folders and GPUs. `assess_machine` says what it means."""

from __future__ import annotations

import csv
import importlib.util
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil

from launch.process_tree import unheld_build_locks
from training.config import REPO_ROOT
from training.observe.control_groups import quota_note, usable_cores
from training.observe.environment import LIBRARIES, code_fingerprint, git, package_version
from training.observe.shared_folder import existing_part
from training.parallel.network_interfaces import free_port, own_addresses, port_if_free

SHARED_MEMORY = Path("/dev/shm")
NVIDIA_SMI_SECONDS = 15.0  # nvidia-smi is slow if a GPU is in trouble
# Our name -> nvidia-smi's (nvidia-smi --help-query-gpu).
GPU_QUERY = {
    "name": "name",
    "memory_mib": "memory.total",
    "memory_used_mib": "memory.used",
    "driver": "driver_version",
    "temperature_c": "temperature.gpu",
    "power_limit_w": "power.limit",
    "power_default_w": "power.default_limit",
    "ecc_uncorrected": "ecc.errors.uncorrected.volatile.total",
    "throttle_reasons": "clocks_event_reasons.active",
}
GPU_TEXTS = ("name", "driver", "throttle_reasons")  # the others are numbers
OLD_NAMES = {"clocks_event_reasons.active": "clocks_throttle_reasons.active"}  # of drivers before 535
# Bits that mean trouble (NVML's nvmlClocksEventReasons). Left out: idle, the application's own clocks, and the power
# cap, which every busy GPU meets.
THROTTLE_REASONS = {0x8: "hardware slowdown", 0x20: "too hot", 0x40: "too hot (hardware)", 0x80: "power brake"}
# From the fastest to the slowest, as in the legend of `nvidia-smi topo -m`.
LINKS = ("NV", "PIX", "PXB", "PHB", "NODE", "SYS")


def collect_host_facts(log_dir: str, port: int, hosts: list[str], with_torch: bool) -> dict[str, Any]:
    """Return what this machine has, ready for JSON.

    Args:
        log_dir: folder of all logs; need not exist yet.
        port: where the ranks are to meet; 0 for any that is free.
        hosts: names to look up.
        with_torch: whether to load torch and torchvision's operators, which takes seconds.
    """
    memory = psutil.virtual_memory()
    shared_memory = shutil.disk_usage(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else None
    return {
        "machine": machine_identity(),
        "python": platform.python_version(),
        "packages": {name: package_version(name) for name in LIBRARIES},
        "commit": git("rev-parse", "HEAD"),
        "code": code_fingerprint(REPO_ROOT),
        "cores": usable_cores(),
        "cpu_quota": quota_note(),
        "memory_bytes": memory.total,
        "memory_free_bytes": memory.available,
        "shm_bytes": shared_memory.total if shared_memory else 0,
        "shm_free_bytes": shared_memory.free if shared_memory else 0,
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "compilers": [name for name in ("c++", "g++", "cc", "ninja") if _has_program(name)],
        "locks": sorted(map(str, unheld_build_locks(Path(sys.prefix) / "torch_extensions"))),
        "log_folder": log_folder_facts(Path(log_dir)),
        "port": port_if_free(port) if port else 0,
        "spare_port": free_port(),
        "own_addresses": own_addresses(),
        "addresses": {host: _address_of(host) for host in hosts},
        **ask_nvidia_smi(),
        **(torch_facts() if with_torch else {"import_problem": None, "torch_cuda": None}),
    }


def torch_facts() -> dict[str, Any]:
    """Return why torch and torchvision do not fit together (None if they do), and the CUDA that torch was built for.

    A pair that does not fit fails in loading torchvision's operators; all of torchvision takes as long to load as
    torch itself. CUDA must not be initialized here: the ranks of the network check are forked from this process.
    """
    try:
        import torch

        spec = importlib.util.find_spec("torchvision")
        for path in Path(spec.origin).parent.glob("_C*.so") if spec and spec.origin else ():
            torch.ops.load_library(str(path))
        if not hasattr(torch.ops.torchvision, "nms"):
            raise ImportError("torchvision has no operators")
    except Exception as error:
        return {"import_problem": f"{type(error).__name__}: {error}"[:200], "torch_cuda": None}
    return {"import_problem": None, "torch_cuda": torch.version.cuda}


def machine_identity() -> str:
    """Return what two names of one machine have in common: its boot, and its network and process namespaces.

    Containers of one machine differ in the latter two, and may own different GPUs.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return " ".join([boot, *(os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid"))])


def log_folder_facts(folder: Path) -> dict[str, Any]:
    """Return `path`, `free_bytes`, and as `problem` why nothing can be written there (None if it can)."""
    existing, problem = existing_part(folder), None
    try:
        with tempfile.TemporaryFile(dir=existing, prefix=".doctor-") as file:
            file.write(b"0" * 4096)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        problem = error.strerror or str(error)
    return {"path": str(folder), "free_bytes": shutil.disk_usage(existing).free, "problem": problem}


def _has_program(name: str) -> bool:
    """Return whether a program is in PATH or in this Python's environment."""
    return any(shutil.which(name, path=path) for path in (None, str(Path(sys.executable).parent)))


def _address_of(host: str) -> str | None:
    """Return the IPv4 or IPv6 address of a name, None if it has none here."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return None


def ask_nvidia_smi() -> dict[str, Any]:
    """Return `gpus`, `driver_cuda` and `topology` of this machine; `gpus` and `gpu_problem` if nvidia-smi fails."""
    try:
        with ThreadPoolExecutor() as pool:  # each takes a second or more on a machine with many GPUs
            runs = [
                pool.submit(_query_gpus),
                pool.submit(_nvidia_smi),
                pool.submit(_nvidia_smi, "topo", "-m", check=False),
            ]
        gpus, header, topology = (run.result() for run in runs)
        return {
            "gpus": parse_gpus(gpus),
            "driver_cuda": parse_cuda_version(header),
            "topology": parse_topology(topology),
        }
    except FileNotFoundError:
        return {"gpus": []}
    except (subprocess.SubprocessError, OSError) as error:
        output = getattr(error, "stdout", "") or getattr(error, "stderr", "") or str(error)
        return {"gpus": [], "gpu_problem": " ".join(str(output).split())[:200]}


def parse_gpus(text: str) -> list[dict[str, Any]]:
    """Parse `nvidia-smi --query-gpu=... --format=csv,noheader,nounits` with the fields of `GPU_QUERY`.

    Returns:
        One dictionary per GPU with the keys of `GPU_QUERY`; None for what a GPU does not report ([N/A]).
    """
    gpus = []
    for values in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(values) != len(GPU_QUERY):
            continue
        gpu: dict[str, Any] = dict(zip(GPU_QUERY, (value.strip() for value in values), strict=True))
        for name in GPU_QUERY.keys() - GPU_TEXTS:
            gpu[name] = float(gpu[name]) if re.fullmatch(r"[0-9.]+", gpu[name]) else None
        bits = gpu["throttle_reasons"]
        bits = int(bits, 16) if re.fullmatch(r"0x[0-9A-Fa-f]+", bits) else 0
        gpu["throttle_reasons"] = [reason for bit, reason in THROTTLE_REASONS.items() if bits & bit]
        gpus.append(gpu)
    return gpus


def parse_cuda_version(text: str) -> str | None:
    """Return the newest CUDA that the driver supports, from the header of `nvidia-smi` ('UMD' from driver 610 on)."""
    match = re.search(r"CUDA (?:UMD )?Version:\s*([0-9]+\.[0-9]+)", text)
    return match[1] if match else None


def parse_topology(text: str) -> dict[str, int]:
    """Count the links between pairs of GPUs in the output of `nvidia-smi topo -m`: {"NV18": 28}."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)  # the header is underlined, even in a pipe
    rows = [line.split()[1:] for line in plain.splitlines() if re.match(r"GPU\d+\s", line)]
    return dict(
        Counter(
            value for number, row in enumerate(rows) for value in row[number + 1 : len(rows)] if value.startswith(LINKS)
        )
    )


def _query_gpus() -> str:
    """Query by today's names of the fields, and by the old ones if the driver does not know one."""
    names = ",".join(GPU_QUERY.values())
    try:
        return _nvidia_smi(f"--query-gpu={names}", "--format=csv,noheader,nounits")
    except subprocess.CalledProcessError as error:
        if "not a valid field" not in error.stdout + error.stderr:
            raise
        names = ",".join(OLD_NAMES.get(name, name) for name in GPU_QUERY.values())
        return _nvidia_smi(f"--query-gpu={names}", "--format=csv,noheader,nounits")


def _nvidia_smi(*arguments: str, check: bool = True) -> str:
    command = ["nvidia-smi", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=NVIDIA_SMI_SECONDS, check=check).stdout
