"""The GPUs of one machine: what nvidia-smi says of them, and what that means for a training."""

from __future__ import annotations

import csv
import re
import subprocess
from collections.abc import Mapping
from typing import Any

from zerovision.planning.doctor.table import Row

NVIDIA_SMI_SECONDS = 15.0  # nvidia-smi is slow if a GPU is in trouble
# Our name -> nvidia-smi's (nvidia-smi --help-query-gpu).
GPU_QUERY = {
    "name": "name",
    "memory_mib": "memory.total",
    "memory_used_mib": "memory.used",
    "driver": "driver_version",
    "temperature_c": "temperature.gpu",
    "ecc_uncorrected": "ecc.errors.uncorrected.volatile.total",
}
GPU_TEXTS = ("name", "driver")  # the others are numbers
HOT_C = 85.0
USED_MIB = 1024  # a GPU's memory that is taken before the start
RANKS_PER_CORE = 8  # as many CPU ranks as launch_distributed.sh allows


def gpu_facts() -> dict[str, Any]:
    """Return `gpus` and `driver_cuda` of this machine, and as `gpu_problem` why nvidia-smi fails ('' if not)."""
    query = ("--query-gpu=" + ",".join(GPU_QUERY.values()), "--format=csv,noheader,nounits")
    facts: dict[str, Any] = {"gpus": [], "driver_cuda": None, "gpu_problem": ""}
    try:
        facts |= {"gpus": parse_gpus(_nvidia_smi(*query)), "driver_cuda": parse_cuda_version(_nvidia_smi())}
    except FileNotFoundError:
        pass  # no driver, so no GPU
    except (subprocess.SubprocessError, OSError) as error:
        output = getattr(error, "stdout", "") or getattr(error, "stderr", "") or str(error)
        facts["gpu_problem"] = " ".join(str(output).split())[:200]
    return facts


def parse_gpus(text: str) -> list[dict[str, Any]]:
    """Parse `nvidia-smi --query-gpu=... --format=csv,noheader,nounits` with the fields of `GPU_QUERY`.

    Returns:
        One dictionary per GPU with the keys of `GPU_QUERY`; 0 for what a GPU does not report ([N/A]).
    """
    gpus = []
    for values in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(values) != len(GPU_QUERY):
            continue
        gpu: dict[str, Any] = dict(zip(GPU_QUERY, (value.strip() for value in values), strict=True))
        for name in GPU_QUERY.keys() - GPU_TEXTS:
            gpu[name] = float(gpu[name]) if re.fullmatch(r"[0-9.]+", gpu[name]) else 0.0
        gpus.append(gpu)
    return gpus


def parse_cuda_version(text: str) -> str | None:
    """Return the newest CUDA that the driver supports, from the header of `nvidia-smi` ('UMD' from driver 610 on)."""
    match = re.search(r"CUDA (?:UMD )?Version:\s*([0-9]+\.[0-9]+)", text)
    return match[1] if match else None


def _nvidia_smi(*arguments: str) -> str:
    command = ["nvidia-smi", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=NVIDIA_SMI_SECONDS, check=True).stdout


def assess_gpus(facts: Mapping[str, Any], ranks: int, *, cluster_has_gpus: bool) -> Row:
    """Compare GPUs, or cores if no machine has a GPU, with the ranks (0: unknown), and the driver with torch."""
    gpus = facts["gpus"]
    if facts["gpu_problem"]:
        cure = "load the driver (modprobe nvidia), or look into dmesg for Xid errors"
        return Row("GPUs", "wrong", f"nvidia-smi fails: {facts['gpu_problem']}", cure)
    if not gpus and not cluster_has_gpus:
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
    return Row("GPUs", "ok", found)


def _assess_cores(cores: int, ranks: int) -> Row:
    found = f"no GPU: {ranks or 1} CPU ranks over gloo on {cores} cores"
    if ranks > cores * RANKS_PER_CORE:
        return Row("GPUs", "wrong", found, f"give at most {cores * RANKS_PER_CORE} slots, or use machines with GPUs")
    if ranks > cores:
        return Row("GPUs", "warning", found, "ranks that share a core slow each other down: at most one a core")
    return Row("GPUs", "ok", found)


def assess_gpu_health(facts: Mapping[str, Any]) -> Row | None:
    """Assess memory errors, heat, and memory that is in use; None without a GPU."""
    if not facts["gpus"]:
        return None
    wrong, odd = [], []
    for number, gpu in enumerate(facts["gpus"]):
        if gpu["ecc_uncorrected"]:
            wrong.append(f"GPU {number}: {gpu['ecc_uncorrected']:.0f} uncorrected memory errors")
        if gpu["temperature_c"] >= HOT_C:
            odd.append(f"GPU {number}: {gpu['temperature_c']:.0f} degrees C")
        if gpu["memory_used_mib"] > USED_MIB:
            odd.append(f"GPU {number}: {gpu['memory_used_mib']:.0f} MiB taken already")
    if wrong:
        return Row("GPU health", "wrong", "; ".join(wrong), "reset or replace the GPU: nvidia-smi -q -d ECC, dmesg")
    if odd:
        return Row("GPU health", "warning", "; ".join(odd), "nvidia-smi -q -d PERFORMANCE; end what else runs")
    memory = min(gpu["memory_mib"] for gpu in facts["gpus"])
    return Row("GPU health", "ok", f"no memory errors, not too hot, {memory / 1024:.0f} GiB each")
