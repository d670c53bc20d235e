"""Assesses machines for a training run, from facts about them, and returns the rows of the doctor's table."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from zerovision.launch.rendezvous import MAX_CPU_RANKS_PER_CORE, differences
from zerovision.training.base.run_folder import CHECKOUT, EXTRAS, REPO_ROOT, cure_of_missing
from zerovision.training.base.units import cpu_ranks, format_bytes, plural

Verdict = Literal["ok", "warning", "wrong"]
HERE = "here"
MIB, GIB = 2**20, 2**30
# Per rank, in /dev/shm: ranks, NCCL and loader workers exchange data there. If it is full, a process dies with a bus
# error. An engine's buffer for the all-reduce of CPU ranks takes 66 MiB.
SHARED_BYTES_PER_RANK = 66 * MIB
MEMORY_BYTES_PER_RANK = GIB  # without a model: torch, an engine and their libraries
LOG_BYTES = 100 * MIB  # for logs and small checkpoints
OPEN_FILES_OF_A_RANK = 256  # for libraries, loader workers and log files; sockets to other ranks are added separately
HOT_C = 84.0
USED_MIB = 1024  # GPU memory that other programs may use before the start
HOSTS_NAMED, FINDINGS_SHOWN = 4, 2

Facts = Mapping[str, Any]


@dataclass(frozen=True)
class Row:
    """One line of the doctor's table."""

    check: str  # what was examined, in a few words
    verdict: Verdict  # "wrong" prevents training or falsifies its results; "warning" slows it down or may end it
    found: str  # in one line
    cure: str = ""  # what to do about it, in one line
    host: str = ""  # '' if the line is about all machines or none in particular


def join_hosts(rows: Iterable[Row]) -> list[Row]:
    """Merge rows that differ only in the host, and merge all "ok" rows of a check, keeping the order."""
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in rows:
        key = (row.check, row.verdict) if row.verdict == "ok" else (row.check, row.verdict, row.found, row.cure)
        groups.setdefault(key, []).append(row)
    joined = []
    for group in groups.values():
        findings = list(dict.fromkeys(row.found for row in group))
        more = f"; and {len(findings) - FINDINGS_SHOWN} more" if len(findings) > FINDINGS_SHOWN else ""
        found = "; ".join(findings[:FINDINGS_SHOWN]) + more
        hosts = some_of([row.host for row in group if row.host])
        joined.append(Row(group[0].check, group[0].verdict, found, group[0].cure, hosts))
    return joined


def some_of(names: Sequence[str]) -> str:
    """Return the first few names, separated by commas, and the number of remaining names."""
    more = len(names) - HOSTS_NAMED
    return ", ".join(names[:HOSTS_NAMED]) + (f" and {more} more" if more > 0 else "")


def assess_machine(facts: Facts, ranks: int, all_ranks: int, *, cluster_has_gpus: bool, saved_bytes: int) -> list[Row]:
    """Return the rows for one machine of a training run.

    `ranks` is the number on this machine, and `saved_bytes` the size of the weights and one checkpoint. Both are 0 if
    unknown.
    """
    rows = [
        assess_packages(facts, (REPO_ROOT / "requirements.txt").read_text()),
        assess_gpus(facts, ranks, cluster_has_gpus=cluster_has_gpus),
        *assess_gpu_health(facts["gpus"]),
        *assess_limits(facts, max(ranks, 1), all_ranks, saved_bytes),
    ]
    if not facts.get("decodes_parts", True):
        cure = "scripts/doctor.py --compile, which needs a C compiler and libjpeg's headers"
        rows.append(Row("JPEG", "warning", "whole files are decoded, which is a fifth slower", cure))
    if "problem" in facts["data"]:
        cure = "correct --data, put the data set there, or share its folder"
        rows.append(Row("data", "wrong", facts["data"]["problem"], cure))
    elif facts["data"]:
        rows.append(Row("data", "ok", facts["data"]["holds"]))
    return rows


def assess_packages(facts: Facts, requirements: str) -> Row:
    """Compare the installed versions with those of requirements.txt, and check that torch and torchvision match."""
    pins = dict(re.findall(r"^([A-Za-z0-9_-]+)==(\S+)", requirements, flags=re.MULTILINE))
    versions = {name: version.partition("+")[0] for name, version in facts["software"].items() if name != "code"}
    packages = {name: version for name, version in versions.items() if name != "Python"}
    found = ", ".join(f"{name} {version}" for name, version in versions.items())
    optional = () if CHECKOUT else EXTRAS
    packages = {name: version for name, version in packages.items() if version != "none" or name not in optional}
    missing = [name for name, version in packages.items() if version == "none"]
    if missing:
        return Row("packages", "wrong", f"not installed: {', '.join(missing)}", cure_of_missing(missing[0]))
    if facts["import_problem"]:
        cure = "torch and torchvision do not match: make clean setup installs the versions in requirements.txt"
        return Row("packages", "wrong", f"{found}; torchvision does not load: {facts['import_problem']}", cure)
    others = [f"{name} {packages[name]}, not {pins[name]}" for name in packages if packages[name] != pins.get(name)]
    if others:
        return Row("packages", "warning", f"differs from requirements.txt: {', '.join(others)}", "make clean setup")
    return Row("packages", "ok", found)


def assess_gpus(facts: Facts, ranks: int, *, cluster_has_gpus: bool) -> Row:
    """Compare the GPUs (or the cores, if there are no GPUs) with the ranks (0: unknown), and the driver with torch."""
    gpus, ranks = facts["gpus"], max(ranks, 1)
    if facts["gpu_problem"]:
        cure = "load the driver (modprobe nvidia), or check dmesg for Xid errors"
        return Row("GPUs", "wrong", f"the driver fails: {facts['gpu_problem']}", cure)
    if not gpus and not cluster_has_gpus:
        cores = facts["cores"]
        found, most = f"no GPU: {cpu_ranks(ranks)} on {plural(cores, 'core')}", cores * MAX_CPU_RANKS_PER_CORE
        if ranks > most:
            return Row("GPUs", "wrong", found, f"use at most {most} slots, or use machines with GPUs")
        if ranks > cores:
            cure = "ranks that share a core slow each other down: use at most one per core"
            return Row("GPUs", "warning", found, cure)
        return Row("GPUs", "ok", found)
    found = f"{len(gpus)} x {gpus[0]['name']}, driver {facts['driver']}" if gpus else "no GPU"
    if len(gpus) < ranks:
        cure = "correct slots= or the requested number of GPUs, or bring the missing GPU back (nvidia-smi, dmesg)"
        return Row("GPUs", "wrong", f"{ranks} requested, {found}", cure)
    built, driver = facts["torch_cuda"], facts["driver_cuda"]
    if built is None:
        return Row("GPUs", "wrong", f"{found}, but torch is a CPU build", "install torch with CUDA: make clean setup")
    if driver and int(built.partition(".")[0]) > int(driver.partition(".")[0]):  # newer minor versions are fine
        cure = "install a newer driver, or a torch built for the older CUDA"
        return Row("GPUs", "wrong", f"{found} supports CUDA {driver}, but torch was built for {built}", cure)
    return Row("GPUs", "ok", found)


# Limits of a GPU: the verdict if the limit is exceeded, the fact's name, the limit, and the text after the value.
GPU_LIMITS: list[tuple[Verdict, str, float, str]] = [
    ("wrong", "ecc_uncorrected", 0, "uncorrected memory errors"),
    ("warning", "temperature_c", HOT_C, "degrees C"),
    ("warning", "memory_used_mib", USED_MIB, "MiB already in use"),
]
GPU_CURES = {
    "wrong": "reset or replace the GPU: nvidia-smi -q -d ECC, dmesg",
    "warning": "nvidia-smi -q -d PERFORMANCE; stop other programs",
}


def assess_gpu_health(gpus: Sequence[Facts]) -> list[Row]:
    """Assess memory errors, temperature, and memory in use; return no rows if there is no GPU."""
    found: dict[Verdict, list[str]] = {}
    for number, gpu in enumerate(gpus):
        for verdict, name, most, said in GPU_LIMITS:
            if gpu[name] > most:
                found.setdefault(verdict, []).append(f"GPU {number}: {gpu[name]:.0f} {said}")
    for verdict in ("wrong", "warning"):
        if verdict in found:
            return [Row("GPU health", verdict, "; ".join(found[verdict]), GPU_CURES[verdict])]
    least = min((gpu["memory_mib"] for gpu in gpus), default=0)
    return [Row("GPU health", "ok", f"no memory errors, not too hot, {least / 1024:.0f} GiB each")] if gpus else []


def assess_limits(facts: Facts, ranks: int, all_ranks: int, saved_bytes: int) -> list[Row]:
    """Compare memory, /dev/shm, open files, the log folder, and a container's cores with what the ranks need."""
    names = ("memory_free", "memory", "shm_free", "shm")
    free, total, shm_free, shm_total = (format_bytes(facts[f"{name}_bytes"]) for name in names)
    path, log_free, problem = (facts["log_folder"][name] for name in ("path", "free_bytes", "problem"))
    shm_cure = "mount -o remount,size=8g /dev/shm (in a container: --shm-size=8g), or remove what was left there"
    files_cure = "ulimit -n 65536, or nofile in /etc/security/limits.conf"
    log_cure = "free space there, name another --log-dir, or keep fewer checkpoints (--keep-last)"
    memory = Row("memory", "warning", f"{free} of {total} free", "stop other programs there, or use fewer ranks")
    shared = Row("/dev/shm", "wrong", f"{shm_free} of {shm_total} free", shm_cure)
    files = Row("open files", "warning", f"limit {facts['open_files']}", files_cure)
    logs = Row("log folder", "wrong", f"{path}: {format_bytes(log_free)} free", log_cure)
    rows = [
        _limit(memory, facts["memory_free_bytes"], ranks * MEMORY_BYTES_PER_RANK),
        _limit(shared, facts["shm_free_bytes"], ranks * SHARED_BYTES_PER_RANK),
        _limit(files, facts["open_files"], OPEN_FILES_OF_A_RANK + 4 * all_ranks, str),
        _limit(logs, log_free, LOG_BYTES + saved_bytes),
    ]
    if problem:
        cure = "make the folder writable for this user, free space there, or use another --log-dir"
        rows[-1] = Row("log folder", "wrong", f"{path} cannot be written to: {problem}", cure)
    if facts["cpu_quota"]:
        cure = "raise the CPU limit: docker run --cpus, Kubernetes resources.limits.cpu"
        cores = Row("cores", "warning", f"{facts['cpu_quota']}: {facts['cores']} usable", cure)
        rows.append(_limit(cores, facts["cores"], ranks, str))
    return rows


def _limit(row: Row, available: float, needed: float, show: Callable[[float], str] = format_bytes) -> Row:
    """Return the row with the needed amount added, or an "ok" row if that much is available."""
    if available >= needed:
        return Row(row.check, "ok", row.found)
    return replace(row, found=f"{row.found}, {show(needed)} needed")


def assess_versions(hosts: Mapping[str, Facts], here: Mapping[str, str]) -> list[Row]:
    """Compare the hosts' Python, libraries and code (with uncommitted changes); this machine's versions break a tie."""
    cure = "check out the same commit there (git status, git pull) and run make setup, or share the folder"
    same = ", ".join(f"{name} {version[:12]}" for name, version in here.items())
    differing = differences({**{host: facts["software"] for host, facts in hosts.items()}, HERE: here}, here)
    rows = [Row("versions", "wrong", found, cure, host) for host, found in differing.items()]
    return rows or [Row("versions", "ok", f"{same} on every host")]


def assess_copies(hosts: Mapping[str, Facts]) -> list[Row]:
    """Compare the copies of the data set on the hosts that could load it; the first host's copy breaks a tie."""
    copies = {host: facts["data"] for host, facts in hosts.items() if "hash" in facts["data"]}
    if not copies:
        return []
    cure = "copy the data set there again, or share its folder; only you know which copy is right"
    first = next(iter(copies.values()))
    rows = [
        Row("same data", "wrong", f"{copies[host]['holds']}: {found}", cure, host)
        for host, found in differences(copies, {"hash": first["hash"]}).items()
    ]
    return rows or [Row("same data", "ok", f"{first['holds']} on every host")]


def assess_paths(failed: Sequence[Sequence[Any]]) -> list[Row]:
    """Return a row for the host in most of the failed paths (source, target, port); for a single path, its target."""
    ends = Counter([target for _, target, _ in failed] + [source for source, _, _ in failed])
    found = some_of([f"{source} cannot connect to {target}, port {port}" for source, target, port in failed])
    return [
        Row("connections", "wrong", found, f"a firewall at {host}: open all ports between the hosts", host)
        for host, _ in ends.most_common(1)
    ]


def assess_all_reduce(answers: Mapping[str, Facts], ranks: int, way: str) -> Row:
    """Return the row for the hosts' results of `measure_network`; `way` says how the ranks are connected."""
    problems = {host: answer["problem"] for host, answer in answers.items() if "problem" in answer}
    if problems:
        cure = "check cables and MTU (ip link on each, ping -M do -s 1472 HOST); for NCCL set NCCL_DEBUG=INFO"
        found = f"the ranks cannot exchange data: {next(iter(problems.values()))}"
        return Row("all-reduce", "wrong", found, cure, some_of(list(problems)))
    answer = next(iter(answers.values()))
    rate = answer["bytes"] / answer["seconds"] * 2 * (ranks - 1) / ranks  # as nccl-tests defines bus bandwidth
    found = f"{ranks} ranks, {answer['backend']} {way}: {format_bytes(answer['bytes'])} at {format_bytes(rate)}/s"
    return Row("all-reduce", "ok", found)
