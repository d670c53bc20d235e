"""Fits the CPU's constants of `planning/step_time.py` to measured phases of steps, and prints them beside the code's.

    python benchmarks/fit_step_time.py              # from step_phases.jsonl, in some seconds

Linear least-squares problems of relative errors with coefficients that are not negative: the multiples from ranks that
have a core for themselves; then what threads cost, and what ranks cost each other that share the cores, from the same
networks' steps on one core; then what other engines add to the native one's steps.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch
from scipy.optimize import lsq_linear

from benchmarks.ledger_rank import CLASSES
from benchmarks.our_engine import as_convolutions
from benchmarks.report import Section, show
from benchmarks.step_phases import CORES, FITTED, Messages, Phases, read_messages, read_phases
from models.build import build_model
from models.dry_run import without_data
from models.operators import CONVOLUTION, DEPTHWISE, KINDS, POINTWISE, PRODUCT, Operator, count_operators
from planning.communication import GLOO_COPIES, GLOO_LATENCY_S, GLOO_SHARE, measured_link
from planning.machines import Gpu, Machine, find_interconnect, shared_memory
from planning.memory import FLOAT32_BYTES
from planning.run_workload import workload_of
from planning.step_time import (
    ADAMW_PASSES,
    CALIBRATIONS,
    Calibration,
    EngineCost,
    Multiples,
    Sharing,
    is_large_convolution,
    predict_step,
)
from training.config import TrainConfig
from training.parallel.strategies import plan_of

# Of each core that was measured, as `planning.machines` measures them.
CORE_FLOPS, CORE_BANDWIDTH, PRODUCT_SHARE = 250e9, 40e9, 0.42
CONVOLUTIONS = (CONVOLUTION, POINTWISE, DEPTHWISE)
PRODUCTS = (*CONVOLUTIONS, PRODUCT)
PHASE_NAMES = ("forward", "backward")
Works = Mapping[tuple[str, int, int], Phases]
"""Steps on one core by what they do."""
# No kernel is faster than this share of the peak for a product or a convolution of one pixel; the networks that were
# measured have too few of them to tell.
LEAST = {f"flops of {PRODUCT}": 0.95, f"flops of {POINTWISE}": 0.6}


@functools.cache
def blocks_of(model: str, image_size: int) -> int:
    """Return a network's blocks, which are gathered one at a time."""
    return workload_of(TrainConfig(model_type=model), CLASSES, image_size).blocks


@functools.cache
def counted(model: str, image_size: int) -> tuple[tuple[Operator, ...], int]:
    """Return a network's operators and parameters."""
    with torch.device("meta"):
        module = build_model(model, num_classes=CLASSES, image_size=image_size).module
    as_convolutions(module)  # which VGG and the ensemble were when they were measured
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
            peak = CORE_FLOPS * (PRODUCT_SHARE if kind == PRODUCT else 1)
            found[f"flops of {kind}"] += operator.flops * batch_size / peak
            large = is_backward and is_large_convolution(operator)
            found["large weights" if large else f"weights of {kind}"] += (
                FLOAT32_BYTES * operator.weights / CORE_BANDWIDTH
            )
        found["seconds of a convolution"] += kind in CONVOLUTIONS
    found.pop(f"weights of {DEPTHWISE}", None)  # hardly any
    return found


def solve(
    rows: Sequence[Mapping[str, float]],
    seconds: Sequence[float],
    least: Mapping[str, float] = {},
    weights: Sequence[float] | None = None,
) -> dict[str, float]:
    """Return the coefficients with which the sums of a row's columns differ least, in squares of shares, from seconds.

    Args:
        rows: columns of each measurement.
        seconds: measured.
        least: of the coefficients; 0 for those that are not in it.
        weights: seconds of which the differences are shares; None for those measured.
    """
    names = sorted({name for row in rows for name in row})
    wholes = np.array(seconds if weights is None else weights)
    design = np.array([[row.get(name, 0.0) for name in names] for row in rows]) / wholes[:, None]
    scale = np.abs(design).max(axis=0)  # the coefficients differ by orders of magnitude
    low = [least.get(name, 0.0) * each for name, each in zip(names, scale, strict=True)]
    found = lsq_linear(design / scale, np.array(seconds) / wholes, bounds=(low, np.inf)).x / scale
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


def fit_threads(measured: Sequence[Phases], phases: Sequence[Mapping[str, float]], alone: Works) -> Sharing:
    """Return what threads cost each other, from steps of one rank on all cores and the same ones on one core."""
    rows = []
    for one in measured:
        operators, base, single = counted(one.model, one.image_size)[0], 0.0, 0.0
        for is_backward, found in enumerate(phases):
            for name, ideal in columns(operators, one.batch_size, is_backward=bool(is_backward)).items():
                single += found[name] * ideal
                base += found[name] * ideal / (1 if name == "seconds of a convolution" else one.threads)
        known = sum(alone[work_of(one)].seconds[:2]) / single  # of this network, against the roofline
        rows.append({"factor": known * base, "operator_s": float(len(operators))})
    found = solve(rows, [sum(one.seconds[:2]) for one in measured])
    return Sharing(found["factor"], operator_s=found["operator_s"])


def fit_ranks(measured: Sequence[Phases], alone: Works) -> Sharing:
    """Return what ranks cost each other, from their steps and those of the same work on one core."""
    rows, seconds = [], []
    for one in measured:
        forward_s, backward_s, update_s = alone[work_of(one)].seconds
        slices = max(1.0, one.ranks / CORES)
        rows.append({"factor": slices * (forward_s + backward_s)})
        seconds.append(one.step_s - slices * update_s / one.ranks)
    return Sharing(**solve(rows, seconds))


def fit_engine(measured: Sequence[Phases], works: Works, calibration: Calibration) -> EngineCost:
    """Return what an engine does beside computing, updating and sending: what else its steps take."""
    rows, seconds, weights = [], [], []
    for one in measured:
        operators, parameters = counted(one.model, one.image_size)
        slices, sharing = max(1.0, one.ranks / CORES), calibration.sharing[CORES / one.ranks]
        blocks = blocks_of(one.model, one.image_size)
        layers = sum(operator.weights > 0 for operator in operators)
        row = {"threads_s" if one.threads > 1 else "layer_s": layers, "value_s": parameters}
        row["block_s"] = blocks if one.ranks > 1 else 0
        rows.append({name: slices * sharing.factor * value for name, value in row.items()})
        seconds.append(one.step_s - predicted_s(one, works, calibration))
        weights.append(one.step_s)
    return EngineCost(**solve(rows, seconds, weights=weights))


def predicted_s(one: Phases, works: Works, calibration: Calibration) -> float:
    """Predict a step from the same work on one core, without what the engine costs."""
    operators, parameters = counted(one.model, one.image_size)

    def step_s(machine: Machine, ranks: int, compute_scale: float) -> float:
        return predict_step(
            operators,
            parameters,
            machine,
            plan_of(one.strategy, ranks),
            engine=one.engine,
            batch_size=one.batch_size,
            blocks=blocks_of(one.model, one.image_size),
            compute_scale=compute_scale,
            calibration=calibration,
        ).step_s

    scale = works[work_of(one)].step_s / step_s(dataclasses.replace(share_of(CORES), ranks=1), 1, 1.0)
    return step_s(share_of(one.ranks), one.ranks, scale)


def share_of(ranks: int) -> Machine:
    """Return the machine that was measured, with so many ranks."""
    gpu = Gpu("cpu", 0, CORE_BANDWIDTH * CORES / ranks, {"fp32": CORE_FLOPS * CORES / ranks}, "", PRODUCT_SHARE)
    link = shared_memory(gpu.bandwidth_bytes_per_s)
    return Machine(gpu, ranks, link, find_interconnect("ethernet10"), CORES / ranks)


def fit_gloo(messages: Sequence[Messages]) -> dict[str, float]:
    """Return the constants of gloo in `planning.communication`."""
    rates: defaultdict[str, list[float]] = defaultdict(list)
    for wire in {one.mbit for one in messages if one.mbit}:
        trains = [one for one in messages if one.mbit == wire and one.messages > 1]
        seconds = {one.collective: median_s(trains, one.collective) for one in trains}
        for name, each in seconds.items():
            passes = 2 if name == "all_reduce" else 1
            rates[name].append(passes / 2 * seconds["all_reduce"] / each)
    inside = [one for one in messages if (one.mbit, one.ranks, one.messages) == (0, 2, 1)]
    if not inside:
        return {}
    sizes = sorted({one.bytes for one in inside})
    link = measured_link("", *((size, median_s([one for one in inside if one.bytes == size])) for size in sizes), 2)
    found = {f"gloo: {name}": statistics.median(values) for name, values in rates.items()}
    return found | {"gloo: copies": CORE_BANDWIDTH / link.bandwidth_bytes_per_s, "gloo: latency_s": link.latency_s}


def median_s(messages: Sequence[Messages], collective: str = "all_reduce") -> float:
    """Return the median of their seconds."""
    return statistics.median(one.seconds for one in messages if one.collective == collective)


def work_of(one: Phases) -> tuple[str, int, int]:
    """Return what a rank does in a step."""
    return one.model, one.batch_size, one.image_size


def fit(measured: Sequence[Phases]) -> Calibration:
    """Return the calibration of CPU ranks."""
    measured = [one for one in measured if not one.mbit]
    native = [one for one in measured if one.engine == "native"]
    alone = [one for one in native if one.ranks == one.threads == 1]
    works = {work_of(one): one for one in alone}
    phases = [fit_phase(alone, is_backward=is_backward) for is_backward in (False, True)]
    update, update_s = fit_update(alone)
    shared = [one for one in native if one.model in FITTED]
    sharing = {CORES: fit_threads([one for one in shared if one.threads == CORES], phases, works)}
    for ranks in (2, 4):
        sharing[CORES / ranks] = fit_ranks([one for one in shared if one.ranks == ranks], works)
    calibration = Calibration(
        forward=multiples(phases[0]),
        backward=multiples(phases[1]),
        large_weights=phases[1]["large weights"],
        update=update,
        update_s=update_s,
        dispatch_s=0.0,
        sharing=sharing,
    )
    others: defaultdict[tuple[str, int], list[Phases]] = defaultdict(list)
    for one in measured:
        if one.engine != "native" and one.model in FITTED:
            others[one.engine, plan_of(one.strategy, one.ranks).zero_stage].append(one)
    costs = {key: fit_engine(ones, works, calibration) for key, ones in others.items()}
    return dataclasses.replace(calibration, engines=costs)


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
        found |= {f"{cores:g} cores a rank: {key}": value for key, value in dataclasses.asdict(sharing).items()}
    for (engine, stage), cost in calibration.engines.items():
        found |= {f"{engine}, stage {stage}: {key}": value for key, value in dataclasses.asdict(cost).items()}
    return found


def gloo_numbers() -> dict[str, float]:
    """Return the code's constants of gloo by name."""
    found = {f"gloo: {name}": share for name, share in GLOO_SHARE.items()}
    return found | {"gloo: copies": GLOO_COPIES, "gloo: latency_s": GLOO_LATENCY_S}


def main() -> None:
    """Fit and print."""
    measured = read_phases()
    fitted, code = numbers(fit(measured)) | fit_gloo(read_messages()), numbers(CALIBRATIONS["cpu"]) | gloo_numbers()
    rows = [(name, f"{value:.3g}", f"{code.get(name, 0):.3g}") for name, value in fitted.items() if value]
    show(Section("Constants", f"From {len(measured)} steps.", ("constant", "fitted", "in the code"), rows))


if __name__ == "__main__":
    main()
