"""One machine: its software, limits, memory and disk, and what they mean for a training on it."""

from __future__ import annotations

import os
import re
import resource
import shutil
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from zerovision.planning.doctor.gpu_health import assess_gpu_health, assess_gpus, gpu_facts
from zerovision.planning.doctor.table import Row
from zerovision.training.base.atomic_write import existing_part
from zerovision.training.base.control_groups import free_memory, quota_note, usable_cores, usable_memory
from zerovision.training.base.errors import FileServerError, UserError
from zerovision.training.base.places import REPO_ROOT
from zerovision.training.base.units import format_bytes
from zerovision.training.observe.environment import software
from zerovision.training.world.network_interfaces import free_port, own_addresses

SHARED_MEMORY = Path("/dev/shm")
MIB, GIB = 2**20, 2**30
# Shared memory of one rank: DeepSpeed's buffer of a CPU rank, deepspeed_allreduce_buffer_*, has 66 MiB.
SHARED_BYTES_PER_RANK = 66 * MIB
# Memory of a rank before it has a model: torch, deepspeed and their libraries.
MEMORY_BYTES_PER_RANK = GIB
LOG_BYTES = 100 * MIB  # of logs and small checkpoints, at least
OPEN_FILES_OF_A_RANK = 256  # libraries, loader workers, log files; and sockets to every other rank

Facts = Mapping[str, Any]


def machine_facts(log_dir: str, data: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what this machine has, ready for JSON.

    Args:
        log_dir: folder of all logs; need not exist yet.
        data: fields of the data set's `DataOptions`; None if it is not looked at.
    """
    shared_memory = shutil.disk_usage(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else None
    return {
        "software": software(),
        "cores": usable_cores(),
        "cpu_quota": quota_note(),
        "memory_bytes": usable_memory(),
        "memory_free_bytes": free_memory(),
        "shm_bytes": shared_memory.total if shared_memory else 0,
        "shm_free_bytes": shared_memory.free if shared_memory else 0,
        "open_files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "log_folder": log_folder_facts(Path(log_dir)),
        "spare_port": free_port(),
        "own_addresses": own_addresses(),
        **gpu_facts(),
        **torch_facts(),
        "data": data_facts(data) if data else {},
    }


def torch_facts() -> dict[str, Any]:
    """Return why torch and torchvision do not fit together (None if they do), and the CUDA that torch was built for.

    CUDA must not be initialized here: the ranks of the network check are forked from this process.
    """
    try:
        import torch
        import torchvision  # noqa: F401  fails if its operators were built for another torch
    except Exception as error:
        return {"import_problem": f"{type(error).__name__}: {error}"[:200], "torch_cuda": None}
    return {"import_problem": None, "torch_cuda": torch.version.cuda}


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


def data_facts(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a data set `holds`, its `hash`, and what a `network` for it has; or the `problem`."""
    from zerovision.training.data import DataOptions, load_data

    try:
        found = load_data(replace(DataOptions(**options), cache="off", download=False))
    except (UserError, FileServerError) as error:
        return {"problem": str(error)}
    counts = f"{sum(found.train_counts)} + {sum(found.val_counts)} images"
    shown = f"{options['data']}: {len(found.class_names)} classes, {counts}"
    size, channels = found.train.sizes[-1], found.preprocessing.channels
    network = {"classes": len(found.class_names), "image_size": size, "image_channels": channels}
    return {"holds": shown, "hash": found.fingerprint, "network": network}


def assess_machine(facts: Facts, ranks: int, all_ranks: int, *, cluster_has_gpus: bool) -> list[Row]:
    """Return the rows of one machine that trains.

    Args:
        facts: see `machine_facts`.
        ranks: on this machine; 0 if unknown.
        all_ranks: over all machines.
        cluster_has_gpus: whether any of the machines has one.
    """
    rows = [
        assess_packages(facts, read_pins((REPO_ROOT / "requirements.txt").read_text())),
        assess_gpus(facts, ranks, cluster_has_gpus=cluster_has_gpus),
        assess_gpu_health(facts),
        *assess_limits(facts, max(ranks, 1), all_ranks),
        assess_log_folder(facts),
        assess_data(facts),
    ]
    return [row for row in rows if row]


def assess_packages(facts: Facts, pins: Mapping[str, str]) -> Row:
    """Compare with the versions of requirements.txt; torch and torchvision must fit together."""
    versions = {name: version.partition("+")[0] for name, version in facts["software"].items() if name != "code"}
    packages = {name: version for name, version in versions.items() if name != "Python"}
    found = ", ".join(f"{name} {version}" for name, version in versions.items())
    missing = [name for name, version in packages.items() if version == "none"]
    if missing:
        return Row("packages", "wrong", f"not installed: {', '.join(missing)}", "make setup")
    if facts["import_problem"]:
        cure = "torch and torchvision are a pair: make clean setup installs those of requirements.txt"
        return Row("packages", "wrong", f"{found}; torchvision does not load: {facts['import_problem']}", cure)
    others = [f"{name} {packages[name]} for {pins[name]}" for name in packages if packages[name] != pins.get(name)]
    if others:
        return Row("packages", "warning", f"other than requirements.txt: {', '.join(others)}", "make clean setup")
    return Row("packages", "ok", found)


def read_pins(requirements: str) -> dict[str, str]:
    """Return the pinned versions of a requirements.txt, by package."""
    return dict(re.findall(r"^([A-Za-z0-9_-]+)==(\S+)", requirements, flags=re.MULTILINE))


def assess_limits(facts: Facts, ranks: int, all_ranks: int) -> list[Row]:
    """Compare memory, /dev/shm, open files and a container's cores, if it has a quota, with what the ranks need.

    Ranks, NCCL, DeepSpeed and loader workers exchange data through /dev/shm. If it is full, one ends in a bus error.
    """
    free, total, shm_free, shm_total = (
        format_bytes(facts[f"{name}_bytes"]) for name in ("memory_free", "memory", "shm_free", "shm")
    )
    memory = Row("memory", "warning", f"{free} of {total} free", "end what else runs there, or take fewer ranks")
    shm_cure = "mount -o remount,size=8g /dev/shm (in a container: --shm-size=8g), or remove what was left there"
    shm = Row("/dev/shm", "wrong", f"{shm_free} of {shm_total} free", shm_cure)
    files_cure = "ulimit -n 65536, or nofile in /etc/security/limits.conf"
    files = Row("open files", "warning", f"limit {facts['open_files']}", files_cure)
    cores_cure = "a higher CPU limit: docker run --cpus, Kubernetes resources.limits.cpu"
    cores = Row("cores", "warning", f"{facts['cpu_quota']}: {facts['cores']} usable", cores_cure)
    return [
        *([_limit(cores, facts["cores"], ranks, str)] if facts["cpu_quota"] else []),
        _limit(memory, facts["memory_free_bytes"], ranks * MEMORY_BYTES_PER_RANK),
        _limit(shm, facts["shm_free_bytes"], ranks * SHARED_BYTES_PER_RANK),
        _limit(files, facts["open_files"], OPEN_FILES_OF_A_RANK + 4 * all_ranks, str),
    ]


def _limit(row: Row, available: float, needed: float, show: Callable[[float], str] = format_bytes) -> Row:
    """Return the row with what is needed, or as "ok" if that much is available."""
    if available >= needed:
        return Row(row.check, "ok", row.found)
    return replace(row, found=f"{row.found}, {show(needed)} needed")


def assess_log_folder(facts: Facts) -> Row:
    """Assess whether the log folder is writable and has room for the least that a run writes.

    That is its logs, its weights and a checkpoint, whose bytes the log folder's facts have if the training is known.
    """
    path, free, problem = (facts["log_folder"][name] for name in ("path", "free_bytes", "problem"))
    if problem:
        cure = "give the folder to the user who trains, free space there, or name another one with --log-dir"
        return Row("log folder", "wrong", f"{path} cannot be written to: {problem}", cure)
    needed = LOG_BYTES + facts["log_folder"].get("saved_bytes", 0)
    cure = "free space there, name another --log-dir, or keep fewer checkpoints (--keep-last)"
    return _limit(Row("log folder", "wrong", f"{path}: {format_bytes(free)} free", cure), free, needed)


def assess_data(facts: Facts) -> Row | None:
    """Assess whether the data set loads; None if there is none to look at."""
    data = facts["data"]
    if not data:
        return None
    if "problem" in data:
        return Row("data", "wrong", data["problem"], "correct --data, or put the data set there, or share its folder")
    return Row("data", "ok", data["holds"])
