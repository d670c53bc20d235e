"""How long an exported file takes for an image, against another one, on this machine."""

from __future__ import annotations

import platform
import random
import statistics
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from delivery.export.job import Run

ROUNDS, FEWEST_ROUNDS = 40, 5
SECONDS = 20.0  # after which no further round begins


def measure_latency(
    runs: Mapping[str, Run], images: torch.Tensor, batch_sizes: tuple[int, ...]
) -> dict[tuple[str, int], float]:
    """Return milliseconds per image of each file and batch size: medians over rounds in shuffled order.

    Args:
        runs: the files by name.
        images: float32 [N, 3, S, S], repeated where a batch needs more.
        batch_sizes: images of one run.
    """
    largest = max(batch_sizes)
    images = images.repeat(-(-largest // len(images)), 1, 1, 1)[:largest]
    cases = [(name, size) for name in runs for size in batch_sizes]
    seconds: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    order, started = random.Random(0), time.perf_counter()
    for name, size in cases:
        runs[name](images[:size])  # the first run allocates
    for number in range(ROUNDS):
        if number >= FEWEST_ROUNDS and time.perf_counter() - started > SECONDS:
            break
        for name, size in order.sample(cases, len(cases)):
            start = time.perf_counter()
            runs[name](images[:size])
            seconds[name, size].append(time.perf_counter() - start)
    return {(name, size): 1e3 * statistics.median(values) / size for (name, size), values in seconds.items()}


def processor_name() -> str:
    """Return the processor's name as Linux tells it, else the architecture."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
