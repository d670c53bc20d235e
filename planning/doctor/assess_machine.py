"""What a machine's facts mean for a training on it: functions from `host_facts.collect_host_facts` to rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from planning.doctor.table import Row
from training.observe.units import format_bytes

MIB, GIB = 2**20, 2**30
# Shared memory of one rank: DeepSpeed's buffer of a CPU rank, deepspeed_allreduce_buffer_*, has 66 MiB.
SHARED_BYTES_PER_RANK = 66 * MIB
# Memory of a rank before it has a model: torch, deepspeed and their libraries.
MEMORY_BYTES_PER_RANK = GIB
FLOAT32_BYTES = 4
CHECKPOINT_BYTES_PER_PARAMETER = 3 * FLOAT32_BYTES  # weights and two moments, as planning.memory counts them
BESIDE_KEPT_CHECKPOINTS = 2  # the best one, and the one that is being written
LOG_BYTES = 100 * MIB  # of logs and small checkpoints, at least
RANKS_PER_CORE = 8  # as many CPU ranks as launch_distributed.sh allows
CORES_PER_GPU = 2  # one for the rank, one that reads images
OPEN_FILES_OF_A_RANK = 256  # libraries, loader workers, log files; and sockets to every other rank
HOT_C = 85.0
USED_MIB = 1024  # a GPU's memory that is taken before the start

Facts = Mapping[str, Any]


@dataclass(frozen=True)
class Need:
    """What the training needs of one machine.

    Attributes:
        ranks: on this machine; 0 if unknown.
        all_ranks: over all machines.
        parameters: of the model; None if unknown.
        keep_last: checkpoints kept, beside the best one.
        cluster_has_gpus: whether any of the machines has one.
    """

    ranks: int = 0
    all_ranks: int = 0
    parameters: int | None = None
    keep_last: int = 2
    cluster_has_gpus: bool = False


def assess_packages(facts: Facts, pins: Mapping[str, str]) -> Row:
    """Compare with the versions of requirements.txt; torch and torchvision must fit together."""
    packages = {name: (found or "missing").partition("+")[0] for name, found in facts["packages"].items()}
    found = f"Python {facts['python']}, " + ", ".join(f"{name} {version}" for name, version in packages.items())
    missing = [name for name, version in packages.items() if version == "missing"]
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


def assess_gpus(facts: Facts, need: Need) -> Row:
    """Compare GPUs, or cores if no machine has a GPU, with the ranks, and the driver with torch."""
    gpus, ranks = facts["gpus"], need.ranks
    if facts.get("gpu_problem"):
        cure = "load the driver (modprobe nvidia), or look into dmesg for Xid errors"
        return Row("GPUs", "wrong", f"nvidia-smi fails: {facts['gpu_problem']}", cure)
    if not gpus and not need.cluster_has_gpus:
        return _assess_cores(facts["cores"], ranks)
    found = f"{len(gpus)} x {gpus[0]['name']}, driver {gpus[0]['driver']}" if gpus else "no GPU"
    if len(gpus) < max(ranks, 1):
        cure = "correct slots= or the number of GPUs asked for, or bring the missing GPU back (nvidia-smi, dmesg)"
        return Row("GPUs", "wrong", f"{max(ranks, 1)} asked for, {found}", cure)
    built, driver = facts["torch_cuda"], facts["driver_cuda"]
    if built is None:
        return Row("GPUs", "wrong", f"{found}, but torch is a CPU build", "install torch with CUDA: make clean setup")
    if driver and int(built.partition(".")[0]) > int(driver.partition(".")[0]):  # a driver runs newer minor versions
        cure = "install a newer driver, or a torch built for the older CUDA"
        return Row("GPUs", "wrong", f"{found} runs CUDA {driver}, torch was built for {built}", cure)
    links = ", ".join(f"{count} x {kind}" for kind, count in facts["topology"].items())
    return Row("GPUs", "ok", f"{found}; links: {links}" if links else found)


def _assess_cores(cores: int, ranks: int) -> Row:
    found = f"no GPU: {f'{ranks} CPU ranks' if ranks else 'CPU ranks'} over gloo on {cores} cores"
    if ranks > cores * RANKS_PER_CORE:
        return Row("GPUs", "wrong", found, f"give at most {cores * RANKS_PER_CORE} slots, or use machines with GPUs")
    if ranks > cores:
        return Row("GPUs", "warning", found, "ranks that share a core slow each other down: at most one a core")
    return Row("GPUs", "ok", found)


def assess_gpu_health(facts: Facts, need: Need) -> Row | None:
    """Assess memory errors, heat, power, and memory that is in use; None without a GPU."""
    if not facts["gpus"]:
        return None
    wrong, odd = [], []
    for number, gpu in enumerate(facts["gpus"]):
        if gpu["ecc_uncorrected"]:
            wrong.append(f"GPU {number}: {gpu['ecc_uncorrected']:.0f} uncorrected memory errors")
        if gpu["throttle_reasons"]:
            odd.append(f"GPU {number} is slowed down: {', '.join(gpu['throttle_reasons'])}")
        if (gpu["temperature_c"] or 0) >= HOT_C:
            odd.append(f"GPU {number}: {gpu['temperature_c']:.0f} degrees C")
        if gpu["power_limit_w"] and gpu["power_default_w"] and gpu["power_limit_w"] < gpu["power_default_w"]:
            odd.append(f"GPU {number}: limited to {gpu['power_limit_w']:.0f} of {gpu['power_default_w']:.0f} W")
        if (gpu["memory_used_mib"] or 0) > USED_MIB:
            odd.append(f"GPU {number}: {gpu['memory_used_mib']:.0f} MiB taken already")
    if wrong:
        return Row("GPU health", "wrong", "; ".join(wrong), "reset or replace the GPU: nvidia-smi -q -d ECC, dmesg")
    if odd:
        return Row("GPU health", "warning", "; ".join(odd), "nvidia-smi -q -d PERFORMANCE,POWER; end what else runs")
    memory = min((gpu["memory_mib"] or 0) for gpu in facts["gpus"])
    return Row("GPU health", "ok", f"no memory errors, not slowed down, {memory / 1024:.0f} GiB each")


def assess_cpu_quota(facts: Facts, need: Need) -> Row | None:
    """Compare the cores that a container's quota leaves with the ranks; None without a quota."""
    if not facts["cpu_quota"]:
        return None
    found = f"{facts['cpu_quota']}: {facts['cores']} usable"
    if facts["cores"] < max(need.ranks, 1) * (CORES_PER_GPU if facts["gpus"] else 1):
        cure = "a higher CPU limit: docker run --cpus, Kubernetes resources.limits.cpu"
        return Row("cores", "warning", f"{found}, {max(need.ranks, 1)} rank(s) need more", cure)
    return Row("cores", "ok", found)


def assess_memory(facts: Facts, need: Need) -> Row:
    """Compare the free CPU memory with what the ranks need."""
    found = f"{format_bytes(facts['memory_free_bytes'])} of {format_bytes(facts['memory_bytes'])} free"
    if facts["memory_free_bytes"] < max(need.ranks, 1) * MEMORY_BYTES_PER_RANK:
        found = f"{found}, a rank needs about {format_bytes(MEMORY_BYTES_PER_RANK)}"
        return Row("memory", "warning", found, "end what else runs there, or take fewer ranks")
    return Row("memory", "ok", found)


def assess_shared_memory(facts: Facts, need: Need) -> Row:
    """Assess /dev/shm, through which ranks, NCCL, DeepSpeed and loader workers exchange data.

    If it is full, a worker or rank ends in a bus error. CPU ranks of the native engine keep weights and every rank's
    gradients there if half of it suffices (`training.parallel.flat_buffers`), and are slower otherwise.
    """
    free, ranks = facts["shm_free_bytes"], max(need.ranks, 1)
    found = f"{format_bytes(free)} of {format_bytes(facts['shm_bytes'])} free"
    cure = "mount -o remount,size=8g /dev/shm (in a container: --shm-size=8g), or remove what was left there"
    if free < (needed := ranks * SHARED_BYTES_PER_RANK):
        return Row("/dev/shm", "wrong", f"{found}, {ranks} rank(s) need {format_bytes(needed)}", cure)
    shared = 2 * FLOAT32_BYTES * (need.parameters or 0) * (ranks + 1)
    if not need.cluster_has_gpus and ranks == need.all_ranks > 1 and free < shared:
        found = f"{found}, sharing weights and gradients needs {format_bytes(shared)}"
        return Row("/dev/shm", "warning", found, cure)
    return Row("/dev/shm", "ok", found)


def assess_open_files(facts: Facts, need: Need) -> Row:
    """Compare a process's limit of open files with what a rank needs."""
    found, needed = f"limit {facts['open_files']}", OPEN_FILES_OF_A_RANK + 4 * need.all_ranks
    if facts["open_files"] < needed:
        cure = "ulimit -n 65536, or nofile in /etc/security/limits.conf"
        return Row("open files", "warning", f"{found}, a rank may need {needed}", cure)
    return Row("open files", "ok", found)


def assess_compilers(facts: Facts, need: Need) -> Row:
    """Look for what compiles DeepSpeed's operators on first use, and our JPEG reader."""
    compilers = facts["compilers"]
    missing = ["a C++ compiler"] if not {"c++", "g++"} & {*compilers} else []
    missing += ["ninja"] if "ninja" not in compilers else []
    if missing:
        cure = "install g++ (apt install g++) and ninja (pip install ninja), or copy compiled operators"
        return Row("compilers", "warning", f"missing: {', '.join(missing)}; operators cannot be compiled", cure)
    return Row("compilers", "ok", ", ".join(compilers))


def assess_log_folder(facts: Facts, need: Need) -> Row:
    """Assess whether the log folder is writable and has room for the checkpoints."""
    path, free, problem = (facts["log_folder"][name] for name in ("path", "free_bytes", "problem"))
    if problem:
        cure = "give the folder to the user who trains, free space there, or name another one with --log-dir"
        return Row("log folder", "wrong", f"{path} cannot be written to: {problem}", cure)
    one = max(CHECKPOINT_BYTES_PER_PARAMETER * (need.parameters or 0), LOG_BYTES)
    all_kept = one * (need.keep_last + BESIDE_KEPT_CHECKPOINTS)
    found = f"{path}: {format_bytes(free)} free"
    cure = "free space there, name another --log-dir, or keep fewer checkpoints (--keep-last)"
    if free < one:
        return Row("log folder", "wrong", f"{found}, one checkpoint takes {format_bytes(one)}", cure)
    if need.parameters and free < all_kept:
        return Row("log folder", "warning", f"{found}, the checkpoints will take {format_bytes(all_kept)}", cure)
    return Row("log folder", "ok", found)


# Of every machine that trains; a check returns None if it does not apply.
CHECKS: tuple[Callable[[Facts, Need], Row | None], ...] = (
    assess_gpus,
    assess_gpu_health,
    assess_cpu_quota,
    assess_memory,
    assess_shared_memory,
    assess_open_files,
    assess_compilers,
    assess_log_folder,
)


def assess_locks(locks_of_machines: Iterable[Iterable[str]]) -> Row:
    """Assess build locks that no machine's process holds: on a shared disk another machine may be compiling."""
    sets = [set(locks) for locks in locks_of_machines]
    stale = sorted(set.intersection(*sets)) if sets else []
    if stale:
        found = f"left by a compile job that was killed: {', '.join(stale)}"
        cure = "our launchers remove them; before any other start: rm the file, else every rank waits for ever"
        return Row("build locks", "warning", found, cure)
    return Row("build locks", "ok", "none left behind")
