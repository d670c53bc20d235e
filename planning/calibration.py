"""What was measured, in place of tables: links of a cluster by the doctor, and how fast a rank computes by a run."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from planning.communication import measured_link
from planning.machines import Machine
from training.errors import UserError, one_line
from training.observe.run_folder import METRICS, PREDICTION

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


def measured_scale(folder: str, model_type: str, gpu: str) -> float:
    """Return how many times as long as predicted the ranks of a run computed: forward, backward and update.

    Args:
        folder: of the run, with its prediction and the `end` line of its metrics.
        model_type: of the run that is planned.
        gpu: of its ranks; 'cpu' for none.

    Raises:
        UserError: if the folder is not that of a run that ended, or of another model or device.
    """
    name = f"--measured-run {one_line(folder, 100)}"
    try:
        prediction = json.loads((Path(folder) / PREDICTION).read_text(encoding="utf-8"))
        end = json.loads((Path(folder) / METRICS).read_bytes().splitlines()[-1])
        shares = sum(float(end["time_shares"][span]) for span in ("forward", "backward", "optimizer"))
        measured_s = shares * prediction["images_per_step"] / float(end["images_per_second"])
        predicted_s = sum(float(prediction["seconds"][part]) for part in ("forward_s", "backward_s", "update_s"))
        of_run = prediction["model_type"], prediction["gpu"]
        scale = measured_s / predicted_s
        if not 0 < scale < math.inf:
            raise ValueError
    except (OSError, ValueError, KeyError, TypeError, IndexError, ZeroDivisionError):
        raise UserError(
            f"{name}: expected the folder of a run that has ended, such as logs/runs/NAME, with its {PREDICTION} and "
            f"{METRICS}."
        ) from None
    for said, asked, found in zip(("--model-type", "--gpu"), (model_type, gpu), of_run, strict=True):
        if asked != found:
            raise UserError(
                f"{name}: a run of {one_line(str(found), 50)}, and {asked} is planned: give {said} "
                f"{one_line(str(found), 50)}, or another run."
            )
    return scale


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
