"""Steps of several ranks as `planning/` predicts them, beside recorded and published ones; measures nothing.

    python benchmarks/predicted_steps.py

The recorded steps are those of results/exchange_2cpu_2026-11-22.md: two machines with one CPU rank each. What a rank
computes is taken from the step at the fastest wire, and the wire's other speeds are predicted from it.
"""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.report import Section, save, show, versions
from planning.communication import communication_s
from planning.machines import find_interconnect, find_machine
from planning.scaling import ScaleJob, scale
from training.parallel.strategies import plan_of

MOBILENET = 1_528_106  # parameters, with 10 classes
BACKWARD_SHARE = 0.75  # of forward and backward, on a CPU
# Milliseconds of a step by the wire's Mbit/s; the first calibrates.
RECORDED = {
    "torch": ("tuned DDP", {10_000: 61, 1000: 88, 100: 547}),
    "native": ("ours", {10_000: 70, 1000: 105, 100: 706}),
}
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


def step_s(engine: str, mbit: int, compute_s: float) -> float:
    """Predict a step of two machines."""
    wire = find_interconnect(f"ethernet{mbit / 1000:g}")
    machine = dataclasses.replace(find_machine("a100-40gb", 1), between=wire)  # the GPU plays no part
    exchange = communication_s(
        engine,
        plan_of("ddp", 2),
        MOBILENET,
        machine,
        forward_s=(1 - BACKWARD_SHARE) * compute_s,
        backward_s=BACKWARD_SHARE * compute_s,
    )
    return compute_s + exchange.exposed_s


def recorded_rows() -> list[tuple[str, ...]]:
    """Predict the recorded steps from the one at the fastest wire."""
    rows = []
    for engine, (name, recorded) in RECORDED.items():
        (fastest, milliseconds), *others = recorded.items()
        compute_s = milliseconds / 1e3
        for _ in range(20):  # until the step at the fastest wire is as recorded
            compute_s += milliseconds / 1e3 - step_s(engine, fastest, compute_s)
        for mbit, measured in others:
            predicted = 1e3 * step_s(engine, mbit, compute_s)
            rows.append((name, str(mbit), f"{predicted:.0f}", str(measured), f"{predicted / measured - 1:+.0%}"))
    return rows


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
    sections = [
        Section(
            "Two machines",
            "mobilenet, 16 images of 64 pixels per rank, fp32, AdamW, a thread each; given: 10,000 Mbit/s.",
            ("contestant", "Mbit/s", "predicted, ms", "recorded, ms", "error"),
            recorded_rows(),
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
