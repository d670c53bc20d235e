"""The step times that were predicted for 40 points before any GPU was measured, and their measurement.

    python -m benchmarks.gpu.points --predict            # writes predictions.jsonl, which is then committed
    python benchmarks/gpu/run.py --parts points          # measures all points on a GPU in one call
    python -m benchmarks.gpu.points --add lines.jsonl    # adds what was measured to the ledger

A point is a model, a batch, an image size and a precision, trained by DeepSpeed under ddp on one GPU with images in
its memory. A prediction once committed is not changed: a better model of the step gets a file of its own.
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.contestants import make_network, our_contestant
from benchmarks.gpu.lines import attempt, emit, read_lines
from benchmarks.gpu.measure import Effort, make_batch, release, seconds_per_step
from benchmarks.gpu.options import Options, part_options
from benchmarks.report import today, versions
from models.build import build_model
from models.dry_run import without_data
from models.operators import count_operators
from planning.ledger import STEP, LedgerEntry, replace_entries
from planning.machines import GPUS, find_machine, gpu_of_device
from planning.step_time import predict_step
from training.parallel.strategies import plan_of
from training.parallel.world import World, start_world, stop_world

PREDICTIONS = Path(__file__).with_name("predictions.jsonl")
CLASSES = 1000
ENGINE = "deepspeed"  # that --engine auto took when the points were predicted
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
        options: dict[str, Any] = {"engine": ENGINE, "batch_size": batch_size, "precision": precision}
        return predict_step(operators, parameters, find_machine(gpu, 1), plan_of("ddp", 1), **options).step_s

    names = [name for name, gpu in GPUS.items() if precision in gpu.peaks]
    seconds = {name: float(f"{step_s(name):.4g}") for name in names}
    point = {"model": model, "batch_size": batch_size, "image_size": image_size, "precision": precision}
    return point | {"predicted_s": seconds}


def measure_points(options: Options, world: World) -> None:
    """Measure the predicted points that the time allows, and emit each as an entry of the ledger."""
    name = "cpu"
    if world.device.type == "cuda":
        properties = torch.cuda.get_device_properties(world.device)
        name = gpu_of_device(properties.name, properties.total_memory)
    for line in map(json.loads, PREDICTIONS.read_text().splitlines()):
        predicted = line["predicted_s"].get(name)
        if options.is_quick:  # to see that it runs
            line |= {"batch_size": 4, "image_size": options.effort.image_size, "precision": "fp32"}
            predicted = 1.0
        what = f"{line['model']}, {line['batch_size']} images of {line['image_size']} pixels, {line['precision']}"
        if predicted is None:
            emit("left_out", what=what)
        else:
            attempt(what, partial(_emit_point, line, name, predicted, options.effort, world), options.deadline)
        release(world)


def _emit_point(point: dict[str, Any], gpu: str, predicted: float, effort: Effort, world: World) -> None:
    entry = _entry(point, gpu, predicted, _measure(point, effort, world), world)
    emit("point", **dataclasses.asdict(entry))


def add_to_ledger(lines: Path) -> None:
    """Add the points of a file of lines to the ledger."""
    found = [
        {key: value for key, value in line.items() if key != "kind"}
        for line in read_lines(lines)
        if line["kind"] == "point"
    ]
    replace_entries([LedgerEntry(**fields) for fields in found])
    print(f"{len(found)} points are in the ledger")


def _measure(point: dict[str, Any], effort: Effort, world: World) -> float:
    """Return the median of a step's seconds over rounds."""
    shape = Effort(image_size=point["image_size"], num_classes=CLASSES)
    batch = make_batch(shape, point["batch_size"], world)
    network = make_network(point["model"], point["image_size"], CLASSES, point["batch_size"])
    contestant = our_contestant(network, world, point["batch_size"], ENGINE, point["precision"])
    try:
        step_s = seconds_per_step(contestant, batch, effort.warmup_steps, world)
        steps = effort.steps_of(step_s)
        return statistics.median(seconds_per_step(contestant, batch, steps, world) for _ in range(FEWEST_ROUNDS))
    finally:
        contestant.close()


def _entry(point: dict[str, Any], gpu: str, predicted: float, measured: float, world: World) -> LedgerEntry:
    return LedgerEntry(
        kind=STEP,
        device=gpu,
        model=point["model"],
        engine=ENGINE,
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


def predict_points() -> None:
    """Write the predictions, once."""
    if PREDICTIONS.exists():
        raise SystemExit(f"{PREDICTIONS} exists: predictions are not changed afterwards")
    PREDICTIONS.write_text("".join(json.dumps(predict_point(*point)) + "\n" for point in points()))
    print(f"written: {PREDICTIONS}, {len(points())} points")


def main() -> None:
    """Predict, measure, or add what was measured."""
    if sys.argv[1:2] == ["--predict"]:
        predict_points()
    elif sys.argv[1:2] == ["--add"]:
        add_to_ledger(Path(sys.argv[2]))
    else:
        options, world = part_options(__doc__), start_world()
        measure_points(options, world)
        stop_world()


if __name__ == "__main__":
    main()
