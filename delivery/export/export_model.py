"""An export from beginning to end: load, write, open again, compare, publish."""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from delivery.evaluation_data import EvaluationChoice, load_evaluation_data
from delivery.export import check_choice
from delivery.export.calibration_images import load_calibration_images, load_check_images
from delivery.export.comparison import Agreement, check_agreement, compare
from delivery.export.job import ExportJob, Written
from delivery.export.latency import measure_latency
from delivery.export.sidecar import SIDECAR, check_sidecar, write_sidecar
from delivery.export.staging import Stage
from delivery.trained_model import TrainedModel, find_model
from training.checkpoint.weights import load_model
from training.errors import UserError

LATENCY_BATCHES = (1, 16)
HELD_OUT = EvaluationChoice(split="val")


@dataclass(frozen=True)
class ExportRequest:
    """What a user asks for; see the flags of scripts/export.py.

    Attributes:
        model: a run's name or folder, or a safetensors file.
        format: a name of `FORMATS`.
        precision: a name of `PRECISIONS`.
        output: folder of the files, empty for the default.
        choice: the images that the file is checked on.
        check_images: at most so many, 0 for as many as fit into memory.
        calibration_images: of the training split, for int8.
        batch_size: images of one run.
        max_accuracy_loss: points of top-1, 0 to 100.
        threads: of onnxruntime.
    """

    model: str
    format: str
    precision: str = "fp32"
    output: str = ""
    choice: EvaluationChoice = HELD_OUT
    check_images: int = 0
    calibration_images: int = 256
    batch_size: int = 64
    max_accuracy_loss: float = 1.0
    threads: int = 1


@dataclass(frozen=True)
class Comparison:
    """Two files of one model in fp32 and in the precision that was asked for.

    Attributes:
        sizes: bytes of each file, by precision.
        latencies: milliseconds per image, by precision and batch size.
    """

    sizes: dict[str, int]
    latencies: dict[tuple[str, int], float]


@dataclass(frozen=True)
class Exported:
    """What an export left.

    Attributes:
        files: the model's file first.
        agreement: what the comparison with PyTorch found.
        images: what it was made on.
        written: the writer's choices.
        comparison: size and speed against fp32, where the writer left a file for that.
    """

    files: list[Path]
    agreement: Agreement
    images: str
    written: Written
    comparison: Comparison | None


def export_model(request: ExportRequest, tell: Callable[[str], None]) -> Exported:
    """Export a model; files appear under their names only after the check.

    Args:
        request: what is asked for.
        tell: takes one line on what is going on.

    Raises:
        UserError: for a mistake in the request, and where the disk refuses.
        ExportRefused: where the file does not do what the model does.
    """
    chosen = check_choice(request.format, request.precision)
    model = find_model(request.model)
    job = prepare(request, model, tell)
    output = Path(request.output).expanduser() if request.output else _default_output(model)
    if output.exists() and not output.is_dir():
        raise UserError(f"--output '{output}' is a file: give a folder.")
    check_sidecar(output, job.metadata)
    writer = importlib.import_module(chosen.module)
    stage = Stage(output)
    with stage as folder:
        file, sidecar = folder / f"model{chosen.extension}", folder / SIDECAR
        written = writer.write(job, file)
        write_sidecar(sidecar, job.metadata)
        run = writer.open_exported(file, request.threads)
        agreement = compare(run, job.check, request.batch_size)
        check_agreement(agreement, request.precision, request.max_accuracy_loss)
        comparison = _compare_with_fp32(writer, written, file, job)
        name = f"{_slug(job.metadata['description']['model_type'])}-{request.precision}{chosen.extension}"
        files = stage.publish({sidecar: SIDECAR, file: name})
    return Exported(files[::-1], agreement, job.check.name, written, comparison)


def prepare(request: ExportRequest, model: TrainedModel, tell: Callable[[str], None]) -> ExportJob:
    """Load the model and the images.

    Raises:
        UserError: where one of them is not there or does not fit the other.
    """
    module, metadata = load_model(model.weights)
    data = load_evaluation_data(metadata, model.config(), request.choice)
    needs_calibration = request.precision == "int8"
    return ExportJob(
        module=module,
        metadata=metadata,
        origin=describe_origin(model, metadata, request.precision),
        precision=request.precision,
        check=load_check_images(data, module, most=request.check_images, batch_size=request.batch_size),
        calibration=load_calibration_images(data, request.calibration_images) if needs_calibration else None,
        batch_size=request.batch_size,
        max_accuracy_loss=request.max_accuracy_loss,
        threads=request.threads,
        tell=tell,
    )


def describe_origin(model: TrainedModel, metadata: dict[str, Any], precision: str) -> dict[str, Any]:
    """Return where an exported file comes from, without paths of this machine."""
    extra = metadata["extra"]
    with model.weights.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    return {
        "model": metadata["description"]["model_type"],
        "run": model.run.resolve().name if model.run else None,
        "weights": model.weights.name,
        "weights_sha256": digest,
        "precision": precision,
        "epoch": extra.get("epoch"),
        "top1": extra.get("top1"),
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "timm")},
    }


def _compare_with_fp32(writer: ModuleType, written: Written, file: Path, job: ExportJob) -> Comparison | None:
    if written.fp32 is None:
        return None
    files = {"fp32": written.fp32, job.precision: file}
    runs = {name: writer.open_exported(path, job.threads) for name, path in files.items()}
    with torch.inference_mode():
        latencies = measure_latency(runs, job.check.images, LATENCY_BATCHES)
    return Comparison({name: os.path.getsize(path) for name, path in files.items()}, latencies)


def _default_output(model: TrainedModel) -> Path:
    return model.run / "export" if model.run else model.weights.parent


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._]+", "-", name).strip("-")
