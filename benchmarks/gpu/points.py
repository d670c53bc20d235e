"""The step times that were predicted for 40 points before any GPU was measured, and their measurement.

    python -m benchmarks.gpu.points              # predict: writes predictions.jsonl, which is then committed
    python benchmarks/gpu/run.py --points        # measure all points on a GPU in one call, and add them to the ledger

A point is a model, a batch, an image size and a precision, trained by our engine under ddp on one GPU with images in
its memory. A prediction once committed is not changed: a better model of the step gets a file of its own.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.contestants import make_network, our_contestant
from benchmarks.gpu.measure import QUICK, Effort, make_batch, release, seconds_per_step
from benchmarks.our_engine import engine_of
from benchmarks.report import Section, save, show, today, versions
from models.build import build_model
from models.dry_run import without_data
from models.operators import count_operators
from planning.ledger import STEP, LedgerEntry, replace_entries
from planning.machines import GPUS, find_machine, gpu_of_device
from planning.step_time import predict_step
from training.parallel.strategies import plan_of
from training.parallel.world import World

PREDICTIONS = Path(__file__).with_name("predictions.jsonl")
CLASSES = 1000
MODELS = (
    *("mobilenet", "efficientnet", "vgg", "cnn_lstm", "ensemble"),
    *("timm:mobilenetv3_large_100", "timm:resnet50", "timm:vit_small_patch16_224"),
)
SETTINGS = ((16, 224, "bf16"), (128, 224, "bf16"), (64, 224, "fp16"), (64, 224, "fp32"), (128, 160, "bf16"))
FEWEST_ROUNDS = 3


def points() -> list[tuple[str, int, int, str]]:
    """Return model, images per GPU, pixels and precision of each point."""
    return [(model, *setting) for model in MODELS for setting in SETTINGS]


def predict_point(model: str, batch_size: int, image_size: int, precision: str) -> dict[str, Any]:
    """Return a point's line: seconds of a step by GPU."""
    with torch.device("meta"):
        module = build_model(model, num_classes=CLASSES, image_size=image_size).module
    operators = count_operators(without_data(module), image_size)
    assert operators is not None
    parameters = sum(parameter.numel() for parameter in module.parameters())

    def step_s(gpu: str) -> float:
        options: dict[str, Any] = {"engine": "deepspeed", "batch_size": batch_size, "precision": precision}
        return predict_step(operators, parameters, find_machine(gpu, 1), plan_of("ddp", 1), **options).step_s

    names = [name for name, gpu in GPUS.items() if precision in gpu.peaks]
    seconds = {name: float(f"{step_s(name):.4g}") for name in names}
    point = {"model": model, "batch_size": batch_size, "image_size": image_size, "precision": precision}
    return point | {"predicted_s": seconds}


def measure_points(effort: Effort, world: World, deadline: float, command: str) -> None:
    """Measure the predicted points that the time allows, print them, and write them into the ledger."""
    name = "cpu"
    if world.device.type == "cuda":
        properties = torch.cuda.get_device_properties(world.device)
        name = gpu_of_device(properties.name, properties.total_memory)
    entries, left_out = [], []
    for line in map(json.loads, PREDICTIONS.read_text().splitlines()):
        predicted = line["predicted_s"].get(name)
        if effort is QUICK:  # to see that it runs: nothing is written
            line |= {"batch_size": 4, "image_size": effort.image_size, "precision": "fp32"}
        if time.monotonic() > deadline or (predicted is None and effort is not QUICK):
            left_out.append(line["model"])
            continue
        try:
            measured = _measure(line, effort, world)
        except Exception as error:  # time on a GPU is dear: the other points are still measured
            print(f"left out: {line}: {type(error).__name__}: {str(error)[:200]}", flush=True)
            continue
        finally:
            release(world)
        print(f"{line['model']}, {line['batch_size']} images: {1000 * measured:.2f} ms", flush=True)
        if predicted is not None:
            entries.append(_entry(line, name, predicted, measured, world))
    if left_out:
        print(f"left out, no time or no prediction: {len(left_out)} points")
    if entries:
        replace_entries(entries)
        section = _section(entries)
        show(section)
        save("predicted-points", f"Predicted steps on {name}", versions("torch", "deepspeed"), command, [section])


def _measure(point: dict[str, Any], effort: Effort, world: World) -> float:
    """Return the median of a step's seconds over rounds."""
    shape = Effort(image_size=point["image_size"], num_classes=CLASSES)
    batch = make_batch(shape, point["batch_size"], world)
    network = make_network(point["model"], point["image_size"], CLASSES, point["batch_size"])
    contestant = our_contestant(network, world, point["batch_size"], precision=point["precision"])
    try:
        step_s = seconds_per_step(contestant, batch, effort.warmup_steps, world)
        steps = effort.steps_of(step_s)
        return statistics.median(seconds_per_step(contestant, batch, steps, world) for _ in range(FEWEST_ROUNDS))
    finally:
        contestant.close()


def _entry(point: dict[str, Any], gpu: str, predicted: float, measured: float, world: World) -> LedgerEntry:
    module = make_network(point["model"], point["image_size"], CLASSES, point["batch_size"])
    return LedgerEntry(
        kind=STEP,
        device=gpu,
        model=point["model"],
        engine=engine_of(module, "ddp", world.device, 1),
        strategy="ddp",
        ranks=1,
        batch_size=point["batch_size"],
        image_size=point["image_size"],
        classes=CLASSES,
        precision=point["precision"],
        predicted=predicted,
        measured=measured,
        peak=GPUS[gpu].peaks[point["precision"]],
        bandwidth=GPUS[gpu].bandwidth_bytes_per_s,
        machine=world.describe(),
        versions=versions("torch", "deepspeed", "timm"),
        date=today(),
    )


def _section(entries: list[LedgerEntry]) -> Section:
    rows = [
        (
            *(one.model, str(one.batch_size), str(one.image_size), one.precision),
            *(f"{1000 * one.predicted:.2f}", f"{1000 * one.measured:.2f}", f"{one.error:+.0%}"),
        )
        for one in entries
    ]
    columns = ("model", "images", "pixels", "precision", "predicted, ms", "measured, ms", "error")
    return Section("Points", "One GPU, ddp, AdamW; medians. Predicted before any GPU was measured.", columns, rows)


def main() -> None:
    """Write the predictions, once."""
    if PREDICTIONS.exists():
        raise SystemExit(f"{PREDICTIONS} exists: predictions are not changed afterwards")
    PREDICTIONS.write_text("".join(json.dumps(predict_point(*point)) + "\n" for point in points()))
    print(f"written: {PREDICTIONS}, {len(points())} points")


if __name__ == "__main__":
    main()
