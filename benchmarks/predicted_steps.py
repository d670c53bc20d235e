"""Steps of several ranks as `planning/` predicts them, beside measured and published ones; measures nothing.

    python benchmarks/predicted_steps.py

Two machines: `step_phases.py` measured them, with one CPU rank each. What a rank computes is taken from one measured
step of a rank on one core, and the link from the all-reduces that the doctor would measure on that wire.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.ledger import said_of
from benchmarks.ledger_rank import CLASSES
from benchmarks.report import Section, save, show, versions
from benchmarks.step_phases import PHASES, Messages, Phases, read_messages, read_phases
from planning.calibration import with_measured_link
from planning.ledger import cpu_machine
from planning.machines import Machine, find_machine
from planning.run_workload import workload_of
from planning.scaling import ScaleJob, scale
from planning.step_time import predict_step
from training.config import TrainConfig
from training.parallel.strategies import plan_of

# Images/s of one GPU, parameters, images per GPU (assumed), GPUs, images/s of all of them. NVIDIA DeepLearningExamples,
# PyTorch/Classification/ConvNets/efficientnet, 8 A100 80 GB per machine; Lambda's benchmarks for ResNet-50 on H100 SXM.
B0, B4, RESNET = 5_288_548, 19_341_616, 25_557_032
PUBLISHED = (
    ("EfficientNet-B0, mixed precision", "a100-80gb", 2489, B0, 256, 8, 16652),
    ("EfficientNet-B0, mixed precision", "a100-80gb", 2489, B0, 256, 16, 29332),
    ("EfficientNet-B0, TF32", "a100-80gb", 1078, B0, 256, 8, 8193),
    ("EfficientNet-B0, TF32", "a100-80gb", 1078, B0, 256, 16, 16137),
    ("EfficientNet-B4, mixed precision", "a100-80gb", 331, B4, 128, 8, 2570),
    ("EfficientNet-B4, mixed precision", "a100-80gb", 331, B4, 128, 64, 18900),
    ("ResNet-50, fp16", "h100-80gb", 2790, RESNET, 256, 8, 22060),
)


def two_machines(messages: Sequence[Messages], mbit: int) -> Machine:
    """Return one of two machines with a core each, and the link as the doctor's all-reduces have it on this wire."""
    found = [one for one in messages if (one.mbit, one.collective, one.messages) == (mbit, "all_reduce", 1)]
    sizes = min(one.bytes for one in found), max(one.bytes for one in found)
    small, large = ((size, statistics.median(one.seconds for one in found if one.bytes == size)) for size in sizes)
    half = dataclasses.replace(cpu_machine(2), ranks=1)  # as the two share this machine
    return with_measured_link(half, 2, 2, small, large)


def step_s(one: Phases, machine: Machine, compute_scale: float = 1.0) -> float:
    """Predict a step on machines with one rank each, which has one core."""
    workload = workload_of(TrainConfig(model_type=one.model, batch_size=one.batch_size), CLASSES, one.image_size)
    return predict_step(
        workload.operators,
        workload.sizes.trained,
        machine,
        plan_of(one.strategy, one.ranks),
        engine=one.engine,
        batch_size=one.batch_size,
        blocks=workload.blocks,
        compute_scale=compute_scale,
    ).step_s


def measured_rows(phases: Sequence[Phases], messages: Sequence[Messages]) -> tuple[list[tuple[str, ...]], list[float]]:
    """Return a row for each measured step between machines, and the errors."""
    rows, errors = [], []
    for one in phases:
        if not one.mbit:
            continue
        alone = dataclasses.replace(one, ranks=1, engine="native", strategy="ddp", mbit=0, seconds=(0.0, 0.0, 0.0))
        (measured,) = (other for other in phases if dataclasses.replace(other, seconds=(0.0, 0.0, 0.0)) == alone)
        machine = two_machines(messages, one.mbit)
        predicted = step_s(one, machine, measured.step_s / step_s(alone, machine))
        errors.append(predicted / one.step_s - 1)
        link = machine.between
        rows.append(
            (
                *(f"{one.strategy}, {one.engine}", str(one.mbit), f"{8e-6 * link.bandwidth_bytes_per_s:.0f}"),
                *(f"{1e3 * one.step_s:.0f}", f"{1e3 * predicted:.0f}", f"{errors[-1]:+.0%}"),
            )
        )
    return rows, errors


def published_rows() -> list[tuple[str, ...]]:
    """Predict the efficiency of published trainings."""
    rows = []
    for model, gpu, images_per_s, parameters, batch_size, ranks, all_images_per_s in PUBLISHED:
        alone_s, published = batch_size / images_per_s, all_images_per_s / images_per_s / ranks
        machine = find_machine(gpu, 8)
        job = ScaleJob("torch", "ddp", parameters, machine, batch_size, alone_s / 3, alone_s * 2 / 3, 0.0, 1)
        predicted = scale(job, [ranks])[0].efficiency
        error = f"{100 * (predicted - published):+.1f} points"
        rows.append((model, f"{ranks} x {gpu}", f"{predicted:.1%}", f"{published:.1%}", error))
    return rows


def main() -> None:
    """Predict, print and save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--phases", type=Path, default=PHASES, help="what `step_phases.py` wrote")
    path = parser.parse_args().phases
    rows, errors = measured_rows(read_phases(path), read_messages(path))
    sections = [
        Section(
            "Two machines",
            "mobilenet, 16 images of 64 pixels per rank, fp32, AdamW, a thread each; given: the step of a rank on one "
            f"core, and the doctor's all-reduces. {said_of('Errors', errors)}",
            ("strategy, engine", "Mbit/s", "by the doctor", "measured, ms", "predicted, ms", "error"),
            rows,
        ),
        Section(
            "Published efficiency",
            "From one GPU's published images/s; none of these was measured here.",
            ("model", "GPUs", "predicted", "published", "error"),
            published_rows(),
        ),
    ]
    for section in sections:
        show(section)
    command = "python benchmarks/predicted_steps.py"
    save("predicted_steps", "Predicted steps of several ranks", versions("torch"), command, sections)


if __name__ == "__main__":
    main()
