"""What nvidia-smi says of a machine's GPUs."""

from __future__ import annotations

import csv
import re
import subprocess
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

SECONDS = 15.0  # a GPU in trouble makes nvidia-smi wait
# Our name -> nvidia-smi's (nvidia-smi --help-query-gpu).
QUERY = {
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
OLD_NAMES = {"clocks_event_reasons.active": "clocks_throttle_reasons.active"}  # of drivers before 535
NUMBERS = ("memory_mib", "memory_used_mib", "temperature_c", "power_limit_w", "power_default_w", "ecc_uncorrected")
# Bits of the reasons that tell of trouble (NVML's nvmlClocksEventReasons; not: idle, the
# application's own clocks, the power cap that every busy GPU meets).
THROTTLE_REASONS = {0x8: "hardware slowdown", 0x20: "too hot", 0x40: "too hot (hardware)", 0x80: "power brake"}
# From the fastest to the slowest, as the legend of `nvidia-smi topo -m` says.
LINKS = ("NV", "PIX", "PXB", "PHB", "NODE", "SYS")


def parse_gpus(text: str) -> list[dict[str, Any]]:
    """Read `nvidia-smi --query-gpu=... --format=csv,noheader,nounits` with the fields of `QUERY`.

    Returns:
        One dictionary a GPU with the keys of `QUERY`; None where the GPU does not tell ([N/A], [Not Supported]).
    """
    gpus = []
    for values in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(values) != len(QUERY):
            continue
        gpu: dict[str, Any] = dict(zip(QUERY, (value.strip() for value in values), strict=True))
        for name in NUMBERS:
            gpu[name] = _number(gpu[name])
        reasons = gpu["throttle_reasons"]
        bits = int(reasons, 16) if re.fullmatch(r"0x[0-9A-Fa-f]+", reasons) else 0
        gpu["throttle_reasons"] = [word for bit, word in THROTTLE_REASONS.items() if bits & bit]
        gpus.append(gpu)
    return gpus


def parse_cuda_version(text: str) -> str | None:
    """Find the newest CUDA that the driver can run in the header that `nvidia-smi` prints; of drivers of today too."""
    match = re.search(r"CUDA (?:UMD )?Version:\s*([0-9]+\.[0-9]+)", text)
    return match[1] if match else None


def parse_topology(text: str) -> dict[str, int]:
    """Count the links between pairs of GPUs in what `nvidia-smi topo -m` prints: {"NV18": 28}."""
    rows = {line.split()[0]: line.split()[1:] for line in _plain(text).splitlines() if re.match(r"GPU\d+\s", line)}
    names = list(rows)
    pairs: Counter[str] = Counter()
    for first, values in enumerate(rows.values()):
        pairs.update(value for value in values[first + 1 : len(names)] if value.startswith(LINKS))
    return dict(pairs)


def ask_nvidia_smi() -> dict[str, Any]:
    """Return `gpus`, `driver_cuda` and `topology` of this machine; `gpu_problem` where nvidia-smi fails."""
    try:
        with ThreadPoolExecutor() as pool:  # each takes a second or more where there are many GPUs
            texts = [pool.submit(_query), pool.submit(_run), pool.submit(_run, "topo", "-m", must_succeed=False)]
        listing, header, topology = (text.result() for text in texts)
        gpus = parse_gpus(listing)
        return {"gpus": gpus, "driver_cuda": parse_cuda_version(header), "topology": parse_topology(topology)}
    except FileNotFoundError:
        return {"gpus": []}
    except (subprocess.SubprocessError, OSError) as error:
        said = getattr(error, "stdout", "") or getattr(error, "stderr", "") or str(error)
        return {"gpus": [], "gpu_problem": " ".join(str(said).split())[:200]}


def _query() -> str:
    """Ask by the fields' names of today, and where the driver is too old for one, by the old ones."""
    names = list(QUERY.values())
    try:
        return _run(f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits")
    except subprocess.CalledProcessError as error:
        if "not a valid field" not in error.stdout + error.stderr:
            raise
        names = [OLD_NAMES.get(name, name) for name in names]
        return _run(f"--query-gpu={','.join(names)}", "--format=csv,noheader,nounits")


def _run(*arguments: str, must_succeed: bool = True) -> str:
    command = ["nvidia-smi", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=must_succeed).stdout


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


def _plain(text: str) -> str:
    """Take away the underlining that `topo -m` prints even into a pipe."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)
