"""Runs an export from beginning to end: load, write, reopen, compare, publish."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import pkgutil
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from zerovision.delivery.calibration import read_calibration
from zerovision.delivery.evaluation_data import load_evaluation_data, run_data
from zerovision.delivery.export import ExportRefused, check_choice
from zerovision.delivery.export.comparison import (
    Agreement,
    check_agreement,
    compare,
    compare_pictures,
    milliseconds_per_image,
)
from zerovision.delivery.export.export_job import ExportJob, load_calibration_images, load_check_images
from zerovision.delivery.export.output_folder import (
    PREPROCESSING,
    check_calibration,
    check_output,
    files_about,
    unfinished_files,
)
from zerovision.delivery.export.pictures import FromPictures
from zerovision.delivery.settings import ExportSettings
from zerovision.delivery.trained_model import TrainedModel, find_model
from zerovision.training.base.control_groups import limit_threads
from zerovision.training.base.errors import printable
from zerovision.training.base.files import sha256_of, sync_to_disk
from zerovision.training.base.run_folder import EXPORT, slug
from zerovision.training.base.units import percent, plural
from zerovision.training.checkpoint.weights import load_model
from zerovision.training.observe.new_run import remove_leftovers_of_run

CALIBRATION = "calibration.json"  # next to the model: the temperature and the threshold
LATENCY_BATCHES = (1, 16)


@dataclass(frozen=True)
class Exported:
    """Result of an export."""

    files: list[Path]  # the model's file first
    agreement: Agreement  # with the PyTorch module
    images: str  # name of the images on which the agreement was measured
    sizes: dict[str, int]  # bytes of the file and of its fp32 counterpart, by precision; empty without a counterpart
    latencies: dict[tuple[str, int], float]  # milliseconds per image of these files, by precision and batch size


def run(settings: ExportSettings) -> int:
    """Run the command and return its exit code."""
    try:
        _show(export_model(settings), settings)
    except ExportRefused as refusal:
        print(f"export: {refusal}", file=sys.stderr)
        return 1
    return 0


def export_model(settings: ExportSettings) -> Exported:
    """Export a model, or raise a UserError or ExportRefused; files receive their final names only after the check."""
    chosen = check_choice(settings.format, settings.precision, with_preprocessing=settings.with_preprocessing)
    limit_threads()
    model = find_model(settings.model)
    job = _prepare(settings, model)
    if model.run:
        remove_leftovers_of_run(model.run)
    default = model.run / EXPORT if model.run else model.weights.parent
    output = Path(os.path.expanduser(settings.output)) if settings.output else default
    about, calibration = files_about(job.metadata), read_calibration(model.weights)
    kind = "-with-preprocessing" if settings.with_preprocessing else ""
    name = f"{slug(job.metadata['description'].model_type)}-{settings.precision}{kind}{chosen.extension}"
    if settings.with_preprocessing:
        job = dataclasses.replace(job, module=FromPictures(job.module, job.metadata, calibration).eval())
        about.pop(PREPROCESSING)  # the exported file itself contains the preprocessing and the calibration
        calibration = None
    elif (settings.output or not model.run) and not (output / name).exists():  # otherwise, it is of the replaced model
        check_calibration(output / CALIBRATION, job.origin["weights_sha256"])
    check_output(output, about)
    if calibration is not None:
        about[CALIBRATION] = (json.dumps(calibration.facts, indent=1) + "\n").encode()
    write, open_exported = (pkgutil.resolve_name(name) for name in (chosen.write, chosen.open))
    with unfinished_files(output) as folder:
        file = folder / f"model{chosen.extension}"
        fp32 = write(job, file)
        for fact, content in about.items():
            (folder / fact).write_bytes(content)
        forward = open_exported(file, settings.threads)
        if settings.with_preprocessing:
            agreement, bound = compare_pictures(forward, job), f"{settings.precision} of pictures"
        else:
            agreement, bound = compare(forward, job.check, settings.batch_size), settings.precision
        check_agreement(agreement, bound, settings.max_accuracy_loss)
        sizes, latencies = {}, {}
        if fp32 is not None:
            opened = {"fp32": open_exported(fp32, settings.threads), settings.precision: forward}
            sizes = {name: os.path.getsize(path) for name, path in (("fp32", fp32), (settings.precision, file))}
            latencies = {
                (name, size): milliseconds_per_image(run, job.check.images, size)
                for name, run in opened.items()
                for size in LATENCY_BATCHES
            }
        names = {fact: fact for fact in about} | {file.name: name}
        for written, final in names.items():  # the checked files receive their final names
            sync_to_disk(folder / written)
            os.replace(folder / written, output / final)
        if not (settings.with_preprocessing or CALIBRATION in about):
            (output / CALIBRATION).unlink(missing_ok=True)  # of an earlier export
        sync_to_disk(output)
    return Exported([output / final for final in reversed(names.values())], agreement, job.check.name, sizes, latencies)


def _show(exported: Exported, settings: ExportSettings) -> None:
    """Print the comparison with PyTorch, the comparison with an fp32 file if there is one, and the files."""
    found = exported.agreement
    sizes = ", ".join(map(str, found.batch_sizes))
    print(f"compared with PyTorch on {found.images} images ({printable(exported.images)}), in batches of {sizes}")
    print(f"  largest difference of a logit  {found.difference:.3g}  (largest logit {found.scale:.3g})")
    print(f"  root mean square difference    {found.rms_share:.2%} of the logits")
    print(f"  difference between batch sizes {found.batch_difference:.3g}")
    print(f"  equal top-1                    {percent(found.equal_top1)}")
    print(f"  top-1                          {percent(found.model_top1)} -> {percent(found.file_top1)}")
    if exported.sizes:
        _show_against_fp32(exported, settings)
    for file in exported.files:
        print(f"file  {printable(str(file))} ({os.path.getsize(file):,} bytes)")


def _show_against_fp32(exported: Exported, settings: ExportSettings) -> None:
    """Print accuracy, size and time per image for fp32 and for the smaller precision, side by side."""
    found, sizes = exported.agreement, exported.sizes
    times = [f"ms/image, batch {size}" for size in LATENCY_BATCHES]
    table = Table("", "top-1", "bytes", "size", *times, box=None, header_style="bold")
    for name, top1 in (("fp32", found.model_top1), (settings.precision, found.file_top1)):
        shown = [f"{exported.latencies[name, size]:.3f}" for size in LATENCY_BATCHES]
        table.add_row(name, percent(top1), f"{sizes[name]:,}", f"{sizes[name] / sizes['fp32']:.3f}", *shown)
    for column in table.columns[1:]:
        column.justify = "right"
    Console(highlight=False).print(table)
    unsure = found.points_lost_interval[1] > settings.max_accuracy_loss
    doubt = f"; with so few images, a loss of more than {settings.max_accuracy_loss:g} is possible" if unsure else ""
    print(f"  {found.describe_loss(settings.precision)}{doubt}")
    print(f"  medians of onnxruntime with {plural(settings.threads, 'thread')} on this machine")


def _prepare(settings: ExportSettings, model: TrainedModel) -> ExportJob:
    module, metadata = load_model(model.weights)
    data = load_evaluation_data(metadata, model.config(), settings, run_data(model))
    check = load_check_images(data, module, settings)
    calibration = load_calibration_images(data, settings.calibration_images) if settings.precision == "int8" else None
    origin = {  # without paths on this machine
        "model": metadata["description"].model_type,
        "run": model.run.resolve().name if model.run else None,
        "weights": model.weights.name,
        "weights_sha256": sha256_of(model.weights),
        "precision": settings.precision,
        "epoch": metadata["extra"].get("epoch"),
        "top1": metadata["extra"].get("top1"),
        "versions": {name: importlib.metadata.version(name) for name in ("torch", "timm")},
    }
    return ExportJob(settings, module, metadata, origin, check, calibration)
