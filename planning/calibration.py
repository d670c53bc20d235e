"""Links of a cluster as the doctor measured them, in place of tables."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from planning.communication import measured_link
from planning.machines import Machine
from training.errors import UserError, one_line

BACKENDS = {True: "nccl", False: "gloo"}  # by whether the ranks have GPUs


def calibrate(machine: Machine, path: str) -> Machine:
    """Return a machine with the link that limited the all-reduce in a report of the doctor.

    Args:
        machine: with the table's links.
        path: file with what `scripts/doctor.py --json` printed.

    Raises:
        UserError: if the file has no measured all-reduce, or one of ranks that exchange in another way.
    """
    name = f"--calibrate {one_line(path, 100)}"
    try:
        measured = json.loads(Path(path).read_text(encoding="utf-8"))["all_reduce"]
        ranks, machines, backend = int(measured["ranks"]), int(measured["machines"]), measured["backend"]
        sizes = small, large = _size_and_seconds(measured["small"]), _size_and_seconds(measured["large"])
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(
            f"{name}: expected a file that `python scripts/doctor.py --hostfile hostfile.txt --json` wrote, with a "
            "measured all-reduce of two or more ranks."
        ) from None
    rises = all(0 < before < after for before, after in zip(*sizes, strict=True))
    if not (rises and 0 < machines <= ranks and ranks > 1 and ranks % machines == 0):
        raise UserError(f"{name}: the all-reduce in it is not usable, measure again: {one_line(str(measured), 200)}.")
    has_gpus = machine.gpu.name != "cpu"
    if backend != BACKENDS[has_gpus]:
        raise UserError(
            f"{name}: measured over {one_line(str(backend), 20)}, and {machine.gpu.name} ranks exchange over "
            f"{BACKENDS[has_gpus]}: run the doctor where the training is to run."
        )
    if machines == 1 and not has_gpus:
        raise UserError(f"{name}: CPU ranks of one machine share memory: measure between machines.")
    return with_measured_link(machine, ranks, machines, small, large)


def with_measured_link(
    machine: Machine, ranks: int, machines: int, small: tuple[float, float], large: tuple[float, float]
) -> Machine:
    """Replace the link between machines, or that inside one if there was one alone.

    Over several machines it is that of `planning.communication.collective_s`'s ring, one per rank of a machine. If the
    links inside were slower than all of those together, they were what was measured, and this one is at least as fast.

    Args:
        machine: one of those that took part, by the tables.
        ranks: that took part.
        machines: that they filled.
        small: bytes and seconds of an all-reduce that latency decides.
        large: of one that bandwidth decides.
    """
    link = measured_link("measured", small, large, ranks)
    if machines == 1:
        return dataclasses.replace(machine, inside=link)
    inside_s = (ranks - machines) * machine.inside.latency_s
    latency_s = max(((ranks - 1) * link.latency_s - inside_s) / (machines - 1), 0.0)
    each = link.bandwidth_bytes_per_s * machines / ranks
    return dataclasses.replace(
        machine, between=dataclasses.replace(link, latency_s=latency_s, bandwidth_bytes_per_s=each)
    )


def _size_and_seconds(values: Any) -> tuple[float, float]:
    size, seconds = map(float, values)
    return size, seconds
