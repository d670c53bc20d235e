"""Fits the CPU's constants of `planning/step_time.py` to measured phases of steps, and prints them beside the code's.

    python benchmarks/fit_step_time.py              # from step_phases.jsonl, in some seconds
    python benchmarks/fit_step_time.py --measure    # measures the phases again, on a quiet machine, and fits them

Two linear least-squares problems of relative errors with coefficients that are not negative: the multiples from ranks
that have a core for themselves, then what ranks cost each other that share the cores, from the whole steps of others.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import sys
import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from scipy.optimize import lsq_linear

from benchmarks.launch import torchrun
from benchmarks.report import Section, show
from models.build import build_model
from models.dry_run import without_data
from models.operators import CONVOLUTION, DEPTHWISE, KINDS, POINTWISE, PRODUCT, Operator, count_operators
from planning.memory import FLOAT32_BYTES
from planning.step_time import ADAMW_PASSES, CALIBRATIONS, LARGE_WEIGHT, Calibration, Multiples, Sharing

PHASES = Path(__file__).with_name("step_phases.jsonl")
CLASSES = 10
CORES = 2  # of the machine that was measured
CORE_FLOPS, CORE_BANDWIDTH = 100e9, 20e9  # of each, as `planning.machines` measures them
CONVOLUTIONS = (CONVOLUTION, POINTWISE, DEPTHWISE)
PRODUCTS = (*CONVOLUTIONS, PRODUCT)
PHASE_NAMES = ("forward", "backward")
# No kernel is faster than this share of the peak for a product or a convolution of one pixel; the networks that were
# measured have too few of them to tell.
LEAST = {f"flops of {PRODUCT}": 0.95, f"flops of {POINTWISE}": 0.6}


@dataclass(frozen=True)
class Phases:
    """Medians of a step's phases.

    Attributes:
        ranks: of the job, under ddp with the native engine.
        threads: of a rank.
        model: as `--model-type`, for `CLASSES` classes.
        batch_size: images of a rank.
        image_size: pixels.
        seconds: of forward, backward and update.
    """

    ranks: int
    threads: int
    model: str
    batch_size: int
    image_size: int
    seconds: tuple[float, float, float]


def read_phases() -> list[Phases]:
    """Return what was measured."""
    return [Phases(**json.loads(line)) for line in PHASES.read_text(encoding="utf-8").splitlines()]


@functools.cache
def counted(model: str, image_size: int) -> tuple[tuple[Operator, ...], int]:
    """Return a network's operators and parameters."""
    with torch.device("meta"):
        module = build_model(model, num_classes=CLASSES, image_size=image_size).module
    operators = count_operators(without_data(module), image_size)
    assert operators is not None
    return operators, sum(parameter.numel() for parameter in module.parameters())


def columns(operators: Sequence[Operator], batch_size: int, *, is_backward: bool) -> dict[str, float]:
    """Return the seconds of a phase on the core that each constant is a multiple of; of operators their number."""
    found: defaultdict[str, float] = defaultdict(float)
    for operator in operators:
        kind, is_product = operator.kind, operator.kind in PRODUCTS
        moved = FLOAT32_BYTES * batch_size * operator.activations / CORE_BANDWIDTH
        found["activations of products" if is_product else f"activations of {kind}"] += moved
        if is_product:
            found[f"flops of {kind}"] += operator.flops * batch_size / CORE_FLOPS
            large = is_backward and operator.weights > LARGE_WEIGHT
            found["large weights" if large else f"weights of {kind}"] += (
                FLOAT32_BYTES * operator.weights / CORE_BANDWIDTH
            )
        found["seconds of a convolution"] += kind in CONVOLUTIONS
    found.pop(f"weights of {DEPTHWISE}", None)  # hardly any
    return found


def solve(
    rows: Sequence[Mapping[str, float]], seconds: Sequence[float], least: Mapping[str, float] = {}
) -> dict[str, float]:
    """Return the coefficients with which the sums of a row's columns differ least, in squares of shares, from seconds.

    Args:
        rows: columns of each measurement.
        seconds: measured.
        least: of the coefficients; 0 for those that are not in it.
    """
    names = sorted({name for row in rows for name in row})
    design = np.array([[row.get(name, 0.0) for name in names] for row in rows]) / np.array(seconds)[:, None]
    low = [least.get(name, 0.0) for name in names]
    found = lsq_linear(design, np.ones(len(rows)), bounds=(low, np.inf)).x
    return dict(zip(names, map(float, found), strict=True))


def fit_phase(measured: Sequence[Phases], *, is_backward: bool) -> dict[str, float]:
    """Return the coefficients of a phase from ranks that have a core for themselves."""
    rows = [columns(counted(one.model, one.image_size)[0], one.batch_size, is_backward=is_backward) for one in measured]
    least = {name: value * (1 + is_backward) for name, value in LEAST.items()}  # backward has twice the operations
    return solve(rows, [one.seconds[is_backward] for one in measured], least)


def multiples(found: Mapping[str, float]) -> dict[str, Multiples]:
    """Return a phase's coefficients as `planning.step_time` has them."""
    return {
        kind: Multiples(
            found.get(f"flops of {kind}", 0.0),
            found["activations of products" if kind in PRODUCTS else f"activations of {kind}"],
            found.get(f"weights of {kind}", 0.0),
            found["seconds of a convolution"] if kind in CONVOLUTIONS else 0.0,
        )
        for kind in KINDS
    }


def fit_update(measured: Sequence[Phases]) -> tuple[float, float]:
    """Return the multiple of AdamW's passes and the seconds beside them."""
    passes = [ADAMW_PASSES * FLOAT32_BYTES * counted(one.model, one.image_size)[1] / CORE_BANDWIDTH for one in measured]
    found = solve([{"passes": one, "fixed": 1.0} for one in passes], [one.seconds[2] for one in measured])
    return found["passes"], found["fixed"]


def fit_sharing(measured: Sequence[Phases], phases: Sequence[Mapping[str, float]], cores: float) -> Sharing:
    """Return what ranks cost each other that have so many cores each, from their whole steps."""
    rows = []
    for one in measured:
        operators, base = counted(one.model, one.image_size)[0], 0.0
        for is_backward, found in enumerate(phases):
            for name, ideal in columns(operators, one.batch_size, is_backward=bool(is_backward)).items():
                base += found[name] * ideal / (1 if name == "seconds of a convolution" else cores)
        rows.append({"factor": base, "operator_s": float(len(operators))})
    found = solve(rows, [sum(one.seconds) for one in measured])
    return Sharing(found["factor"], found["operator_s"])


def fit(measured: Sequence[Phases]) -> Calibration:
    """Return the calibration of CPU ranks."""
    alone = [one for one in measured if one.ranks == one.threads == 1]
    phases = [fit_phase(alone, is_backward=is_backward) for is_backward in (False, True)]
    update, update_s = fit_update(alone)
    return Calibration(
        forward=multiples(phases[0]),
        backward=multiples(phases[1]),
        large_weights=phases[1]["large weights"],
        update=update,
        update_s=update_s,
        dispatch_s=0.0,
        sharing={
            cores: fit_sharing(
                [one for one in measured if one.ranks * cores == CORES and one not in alone], phases, cores
            )
            for cores in (2, 1, 0.5)
        },
    )


def numbers(calibration: Calibration) -> dict[str, float]:
    """Return a calibration's constants by name."""
    found = {
        f"{phase}, {kind}: {field}": value
        for phase in PHASE_NAMES
        for kind, of_kind in getattr(calibration, phase).items()
        for field, value in dataclasses.asdict(of_kind).items()
    }
    found |= {name: getattr(calibration, name) for name in ("large_weights", "update", "update_s", "dispatch_s")}
    for cores, sharing in calibration.sharing.items():
        found |= {f"{cores} cores a rank: {key}": value for key, value in dataclasses.asdict(sharing).items()}
    return found


def measure() -> None:
    """Measure what `PHASES` has again, a job for each number of ranks and threads, and replace the file."""
    jobs: defaultdict[tuple[int, int], list[Phases]] = defaultdict(list)
    for one in read_phases():
        jobs[one.ranks, one.threads].append(one)
    lines = []
    for (ranks, threads), ones in jobs.items():
        cases = json.dumps([[one.model, one.batch_size, one.image_size, "ddp"] for one in ones])
        with tempfile.TemporaryDirectory() as folder:
            result = Path(folder) / "seconds.jsonl"
            words = (f"--cases={cases}", "--seconds=1", f"--result={result}")
            torchrun(ranks, "benchmarks.ledger_rank", *words, threads=threads)
            seconds = [json.loads(line) for line in result.read_text().splitlines()]
        lines += [dataclasses.replace(one, seconds=found) for one, found in zip(ones, seconds, strict=True)]
    PHASES.write_text("".join(json.dumps(dataclasses.asdict(line)) + "\n" for line in lines))


def main() -> None:
    """Measure if that is asked for, fit, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="measure the phases again first")
    if parser.parse_args().measure:
        measure()
    measured = read_phases()
    fitted, code = numbers(fit(measured)), numbers(CALIBRATIONS["cpu"])
    rows = [(name, f"{value:.3g}", f"{code[name]:.3g}") for name, value in fitted.items() if value or code[name]]
    show(Section("Constants", f"From {len(measured)} steps.", ("constant", "fitted", "in the code"), rows))


if __name__ == "__main__":
    main()
