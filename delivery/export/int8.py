"""The int8 version of a model: all layers where accuracy allows it, else all but the few that int8 harms most."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from onnx import ModelProto

from delivery.export import ExportRefused
from delivery.export.comparison import ROUNDING
from delivery.export.job import ExportJob, Written, run_in_batches
from delivery.export.onnx_session import open_session
from delivery.export.quantizer import CALIBRATION_METHODS, Quantizer

IMAGES_PER_LAYER = 64  # that a single layer is judged on


def quantize(job: ExportJob, model: ModelProto, folder: Path) -> tuple[ModelProto, Written]:
    """Quantize a graph so that it loses no more accuracy than the job allows.

    Each method of calibration is tried on all layers; where none is good enough, the better one goes on with layers
    left in fp32.

    Args:
        job: the export, with calibration images.
        model: as `export_graph` returned it.
        folder: for temporary files.

    Raises:
        ExportRefused: where half of the layers in fp32 do not help either.
    """
    assert job.calibration is not None  # `run.export_model` loads them for every precision that needs them
    quantizer = Quantizer(model, job.calibration, folder)
    lost: dict[str, float] = {}
    for method in CALIBRATION_METHODS:
        candidate = quantizer.quantize(quantizer.layers, method)
        lost[method] = _points_lost(job, candidate)
        job.tell(f"int8, {method} ranges of {len(job.calibration)} images: {lost[method]:.2f} points of top-1 lost")
        if lost[method] <= job.max_accuracy_loss + ROUNDING:
            return candidate, Written(quantizer.fp32_file, method, len(quantizer.layers))
    best = min(lost, key=lambda method: lost[method])
    left_out = _layers_to_leave(job, quantizer, best)
    kept = [name for name in quantizer.layers if name not in left_out]
    candidate = quantizer.quantize(kept, best, stored_only=left_out)
    # Most layers are harmed by the rounding of activations: then their weights can be small all the same.
    all_stored = _points_lost(job, candidate) <= job.max_accuracy_loss + ROUNDING
    written = Written(quantizer.fp32_file, best, len(quantizer.layers), tuple(left_out), all_stored)
    return candidate if all_stored else quantizer.quantize(kept, best), written


def fewest(is_enough: Callable[[int], bool], most: int) -> int | None:
    """Return the smallest number from 1 to `most` that is enough: doubled until it is, then bisected.

    As every bisection it takes for granted that more than enough is enough.

    Returns:
        The number, or None where `most` is not enough.
    """
    too_few, number = 0, 1
    while not is_enough(min(number, most)):
        if number >= most:
            return None
        too_few, number = number, 2 * number
    enough = min(number, most)
    while enough - too_few > 1:
        middle = (too_few + enough) // 2
        if is_enough(middle):
            enough = middle
        else:
            too_few = middle
    return enough


def _layers_to_leave(job: ExportJob, quantizer: Quantizer, method: str) -> list[str]:
    layers, most = quantizer.layers, len(quantizer.layers) // 2
    job.tell(f"int8 loses too much: each of {len(layers)} layers is quantized alone, to find those that it harms")
    errors = {name: _error_alone(job, quantizer, name, method) for name in layers}
    ranked = sorted(layers, key=lambda name: errors[name], reverse=True)
    lost: dict[int, float] = {}

    def is_enough(number: int) -> bool:
        kept = [name for name in layers if name not in ranked[:number]]
        lost[number] = _points_lost(job, quantizer.quantize(kept, method))
        return lost[number] <= job.max_accuracy_loss + ROUNDING

    number = fewest(is_enough, most) if most else None
    if number is None:
        still = f"{lost[most]:.2f} points" if most else "too much"
        raise ExportRefused(
            f"refused: int8 loses {still} of top-1 even with {most} of {len(layers)} layers in fp32, allowed are "
            f"{job.max_accuracy_loss:g}: give --precision bf16, more --calibration-images, or --max-accuracy-loss."
        )
    return ranked[:number]


def _points_lost(job: ExportJob, model: ModelProto) -> float:
    logits = run_in_batches(open_session(model.SerializeToString(), job.threads), job.check.images, job.batch_size)
    return 100 * (job.check.top1(job.check.logits) - job.check.top1(logits))


def _error_alone(job: ExportJob, quantizer: Quantizer, layer: str, method: str) -> float:
    """Return the mean squared error of the logits where this layer alone is quantized."""
    few = slice(0, IMAGES_PER_LAYER)
    run = open_session(quantizer.quantize([layer], method).SerializeToString(), job.threads)
    logits = run_in_batches(run, job.check.images[few], job.batch_size)
    return float(torch.nn.functional.mse_loss(logits, job.check.logits[few]))
