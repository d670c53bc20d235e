"""What one machine says of itself. Facts only: what they mean is judged where all machines' facts are."""

from __future__ import annotations

import importlib.util
import os
import platform
import resource
import shutil
import socket
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil

from launch.process_tree import unheld_build_locks
from planning.doctor.nvidia import ask_nvidia_smi
from training.config import REPO_ROOT
from training.observe.environment import LIBRARIES, code_fingerprint, git, package_version
from training.observe.shared_folder import existing_part
from training.parallel.network_interfaces import free_port, own_addresses, port_if_free

SHARED_MEMORY = Path("/dev/shm")


def collect_facts(log_dir: str, port: int, hosts: list[str], with_torch: bool) -> dict[str, Any]:
    """Return this machine's facts, ready for JSON.

    Args:
        log_dir: folder of all logs; need not exist yet.
        port: where the ranks are to meet; whether it is free here.
        hosts: names to look up.
        with_torch: whether to load torch and torchvision's operators, which takes seconds.
    """
    memory = psutil.virtual_memory()
    return {
        "host": socket.gethostname(),
        "machine": machine_identity(),
        "python": platform.python_version(),
        "packages": {name: package_version(name) for name in LIBRARIES},
        "commit": git("rev-parse", "HEAD"),
        "code": code_fingerprint(REPO_ROOT),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": memory.total,
        "memory_free_bytes": memory.available,
        "shm_bytes": shutil.disk_usage(SHARED_MEMORY).total if SHARED_MEMORY.is_dir() else 0,
        "shm_free_bytes": shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else 0,
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "compilers": [name for name in ("c++", "g++", "cc", "ninja") if find_program(name)],
        "locks": sorted(map(str, unheld_build_locks(Path(sys.prefix) / "torch_extensions"))),
        "log_folder": log_folder_facts(Path(log_dir)),
        "port": port_if_free(port) if port else 0,
        "spare_port": free_port(),
        "own_addresses": own_addresses(),
        "addresses": {host: address_of(host) for host in hosts},
        **ask_nvidia_smi(),
        **(torch_facts() if with_torch else {"import_problem": None, "torch_cuda": None}),
    }


def torch_facts() -> dict[str, Any]:
    """Return whether torch and torchvision fit together, and the CUDA that torch was built for.

    An unfit pair fails in loading torchvision's operators; all of torchvision takes as long to load as torch itself.
    Nothing here may start CUDA: the ranks of the network check are forked from this process.
    """
    try:
        import torch

        operators = [str(path) for path in package_folder("torchvision").glob("_C*.so")]
        for path in operators:
            torch.ops.load_library(path)
        if not operators or not hasattr(torch.ops.torchvision, "nms"):
            raise ImportError("torchvision has no operators")
    except Exception as error:
        return {"import_problem": f"{type(error).__name__}: {error}"[:200], "torch_cuda": None}
    return {"import_problem": None, "torch_cuda": torch.version.cuda}


def machine_identity() -> str:
    """Return what two names of one machine have in common: its boot, and the network and processes that it sees.

    Containers of one machine differ in the latter two, and may own different GPUs.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return " ".join([boot, *(os.readlink(f"/proc/self/ns/{kind}") for kind in ("net", "pid"))])


def package_folder(name: str) -> Path:
    """Return where a package lies, without importing it."""
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise ImportError(f"no package {name}")
    return Path(spec.origin).parent


def find_program(name: str) -> str | None:
    """Return a program's path, where a shell or the environment of this Python has it."""
    return shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))


def log_folder_facts(folder: Path) -> dict[str, Any]:
    """Return where the logs will lie: free bytes, and why nothing can be written there (None: it can)."""
    existing = existing_part(folder)
    problem = None
    try:
        with tempfile.TemporaryFile(dir=existing, prefix=".doctor-") as file:
            file.write(b"0" * 4096)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        problem = error.strerror or str(error)
    return {"path": str(folder), "free_bytes": shutil.disk_usage(existing).free, "problem": problem}


def address_of(host: str) -> str | None:
    """Return the IPv4 or IPv6 address that a name has here; None where it has none."""
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError:
        return None
