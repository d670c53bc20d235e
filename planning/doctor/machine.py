"""What a machine's facts mean for a training on it: pure functions from `facts.collect_facts` to rows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from planning.doctor.table import Row
from training.observe.units import format_bytes

MIB, GIB = 2**20, 2**30
# What one rank may take there: DeepSpeed's buffer of a CPU rank, deepspeed_allreduce_buffer_*, has 66 MiB.
SHARED_BYTES_PER_RANK = 66 * MIB
# What a rank takes before it holds a model: torch, deepspeed and their libraries.
MEMORY_BYTES_PER_RANK = GIB
FLOAT32_BYTES = 4
CHECKPOINT_BYTES_PER_PARAMETER = 3 * FLOAT32_BYTES  # weights and two moments, as planning.memory counts them
BESIDE_KEPT_CHECKPOINTS = 2  # the best one, and the one that is being written
LOG_BYTES = 100 * MIB  # what logs and small checkpoints take at least
RANKS_PER_CORE = 8  # as many CPU ranks as launch_distributed.sh allows
OPEN_FILES_OF_A_RANK = 256  # libraries, loader workers, log files; and sockets to every other rank
HOT_C = 85.0
USED_MIB = 1024  # a GPU's memory that is taken before the start


@dataclass(frozen=True)
class Need:
    """What the training needs of one machine.

    Attributes:
        ranks: on this machine; 0 where nobody said.
        all_ranks: over all machines.
        parameters: of the model; None where nobody said which.
        keep_last: checkpoints kept, beside the best one.
        cluster_has_gpus: whether any of the machines has one.
    """

    ranks: int = 0
    all_ranks: int = 0
    parameters: int | None = None
    keep_last: int = 2
    cluster_has_gpus: bool = False


Facts = Mapping[str, Any]


def judge_packages(facts: Facts, need: Need, pins: Mapping[str, str]) -> Row:
    """Compare with requirements.txt; torch and torchvision must fit together."""
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


def judge_compilers(facts: Facts, need: Need) -> Row:
    """DeepSpeed compiles its operators on first use, and our JPEG reader is compiled too."""
    compilers = facts["compilers"]
    missing = ["a C++ compiler"] if not {"c++", "g++"} & {*compilers} else []
    missing += ["ninja"] if "ninja" not in compilers else []
    if missing:
        cure = "install g++ (apt install g++) and ninja (pip install ninja), or copy compiled operators"
        return Row("compilers", "warning", f"missing: {', '.join(missing)}; operators cannot be compiled", cure)
    return Row("compilers", "ok", ", ".join(compilers))


def judge_gpus(facts: Facts, need: Need) -> Row:
    """GPUs, or cores where no machine has a GPU, against what was promised; the driver against torch."""
    gpus, ranks = facts["gpus"], need.ranks
    if facts.get("gpu_problem"):
        cure = "load the driver (modprobe nvidia), or look into dmesg for Xid errors"
        return Row("GPUs", "wrong", f"nvidia-smi fails: {facts['gpu_problem']}", cure)
    if not gpus and not need.cluster_has_gpus:
        return _judge_cores(facts["cores"], ranks)
    found = f"{len(gpus)} x {gpus[0]['name']}, driver {gpus[0]['driver']}" if gpus else "no GPU"
    if len(gpus) < max(ranks, 1):
        cure = "correct slots= or the number of GPUs asked for, or bring the missing GPU back (nvidia-smi, dmesg)"
        return Row("GPUs", "wrong", f"{max(ranks, 1)} asked for, {found}", cure)
    if facts["torch_cuda"] is None:
        return Row("GPUs", "wrong", f"{found}, but torch is a CPU build", "install torch with CUDA: make clean setup")
    if facts["driver_cuda"] and _major(facts["torch_cuda"]) > _major(facts["driver_cuda"]):
        found = f"{found} runs CUDA {facts['driver_cuda']}, torch was built for {facts['torch_cuda']}"
        return Row("GPUs", "wrong", found, "install a newer driver, or a torch built for the older CUDA")
    return Row("GPUs", "ok", f"{found}{_links(facts['topology'])}")


def _judge_cores(cores: int, ranks: int) -> Row:
    found = f"no GPU: {f'{ranks} CPU ranks' if ranks else 'CPU ranks'} over gloo on {cores} cores"
    if ranks > cores * RANKS_PER_CORE:
        return Row("GPUs", "wrong", found, f"give at most {cores * RANKS_PER_CORE} slots, or use machines with GPUs")
    if ranks > cores:
        return Row("GPUs", "warning", found, "ranks that share a core slow each other down: at most one a core")
    return Row("GPUs", "ok", found)


def _links(topology: Mapping[str, int]) -> str:
    return f"; links: {', '.join(f'{count} x {kind}' for kind, count in topology.items())}" if topology else ""


def _major(version: str) -> int:
    """Return the part of a CUDA version within which a driver runs newer ones too."""
    return int(version.partition(".")[0])


def judge_gpu_health(facts: Facts, need: Need) -> Row | None:
    """Memory errors, heat, power and memory that others hold; None where there is no GPU."""
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


def judge_memory(facts: Facts, need: Need) -> Row:
    """CPU memory that is free for the ranks."""
    free, ranks = facts["memory_free_bytes"], max(need.ranks, 1)
    found = f"{format_bytes(free)} of {format_bytes(facts['memory_bytes'])} free"
    if free < ranks * MEMORY_BYTES_PER_RANK:
        cure = "end what else runs there, or take fewer ranks"
        return Row("memory", "warning", f"{found}, a rank needs about {format_bytes(MEMORY_BYTES_PER_RANK)}", cure)
    return Row("memory", "ok", found)


def judge_shared_memory(facts: Facts, need: Need) -> Row:
    """/dev/shm, by which ranks, NCCL, DeepSpeed and loader workers exchange data.

    Without enough of it a worker or rank ends in a bus error. CPU ranks of our own engine keep weights and every rank's
    gradients there where half of it suffices (`training.parallel.flat_buffers`), and are slower where not.
    """
    free, ranks = facts["shm_free_bytes"], max(need.ranks, 1)
    found = f"{format_bytes(free)} of {format_bytes(facts['shm_bytes'])} free"
    needed = ranks * SHARED_BYTES_PER_RANK
    cure = "mount -o remount,size=8g /dev/shm (in a container: --shm-size=8g), or remove what was left there"
    if free < needed:
        return Row("/dev/shm", "wrong", f"{found}, {ranks} rank(s) need {format_bytes(needed)}", cure)
    shared = 2 * FLOAT32_BYTES * (need.parameters or 0) * (ranks + 1)
    if not need.cluster_has_gpus and ranks == need.all_ranks > 1 and free < shared:
        return Row("/dev/shm", "warning", f"{found}, sharing weights and gradients needs {format_bytes(shared)}", cure)
    return Row("/dev/shm", "ok", found)


def judge_open_files(facts: Facts, need: Need) -> Row:
    """The limit of open files of a process."""
    needed = OPEN_FILES_OF_A_RANK + 4 * need.all_ranks
    if facts["open_files"] < needed:
        found = f"limit {facts['open_files']}, a rank may need {needed}"
        return Row("open files", "warning", found, "ulimit -n 65536, or nofile in /etc/security/limits.conf")
    return Row("open files", "ok", f"limit {facts['open_files']}")


def judge_log_folder(facts: Facts, need: Need) -> Row:
    """Whether the log folder can be written to and has room for the checkpoints."""
    folder = facts["log_folder"]
    path, free = folder["path"], folder["free_bytes"]
    if folder["problem"]:
        cure = "give the folder to the user who trains, free space there, or name another one with --log-dir"
        return Row("log folder", "wrong", f"{path} cannot be written to: {folder['problem']}", cure)
    one = max(CHECKPOINT_BYTES_PER_PARAMETER * (need.parameters or 0), LOG_BYTES)
    all_kept = one * (need.keep_last + BESIDE_KEPT_CHECKPOINTS)
    found = f"{path}: {format_bytes(free)} free"
    cure = "free space there, name another --log-dir, or keep fewer checkpoints (--keep-last)"
    if free < one:
        return Row("log folder", "wrong", f"{found}, one checkpoint takes {format_bytes(one)}", cure)
    if need.parameters and free < all_kept:
        return Row("log folder", "warning", f"{found}, the checkpoints will take {format_bytes(all_kept)}", cure)
    return Row("log folder", "ok", found)


# For every machine that trains; None where there is nothing to say.
CHECKS: tuple[Callable[[Facts, Need], Row | None], ...] = (
    judge_gpus,
    judge_gpu_health,
    judge_memory,
    judge_shared_memory,
    judge_open_files,
    judge_compilers,
    judge_log_folder,
)


def judge_locks(locks_of_machines: Iterable[Iterable[str]]) -> Row:
    """Locks that no machine's process holds: on a shared file system another machine may be compiling."""
    sets = [set(locks) for locks in locks_of_machines]
    stale = sorted(set.intersection(*sets)) if sets else []
    if stale:
        return Row(
            *("build locks", "warning", f"left by a compile job that was killed: {', '.join(stale)}"),
            "our launchers remove them; before any other start: rm the file, else every rank waits for ever",
        )
    return Row("build locks", "ok", "none left behind")


def read_pins(requirements: str) -> dict[str, str]:
    """Return the versions that requirements.txt names, by package."""
    return dict(re.findall(r"^([A-Za-z0-9_-]+)==(\S+)", requirements, flags=re.MULTILINE))
