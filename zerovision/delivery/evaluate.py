"""Evaluates a trained model exactly, in one process or on all ranks, and writes the evaluation files."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from rich.table import Table
from torch import nn

from zerovision.delivery.activation_map import explainer
from zerovision.delivery.calibration import Views, read_calibration
from zerovision.delivery.evaluation_data import EvaluationData, load_evaluation_data, run_data
from zerovision.delivery.evaluation_files import write_evaluation
from zerovision.delivery.fit_calibration import Calibrator, read_reject
from zerovision.delivery.settings import EvaluateSettings
from zerovision.delivery.trained_model import TrainedModel, find_model
from zerovision.delivery.views import checked_views, views_of
from zerovision.training.base.errors import UserError, printable
from zerovision.training.base.files import errors_of_writing
from zerovision.training.base.points import has_top5, show_score
from zerovision.training.base.run_folder import CARD, EVALUATION, TEST_EVALUATION, slug
from zerovision.training.base.units import percent
from zerovision.training.checkpoint.weights import load_model
from zerovision.training.config import TrainConfig
from zerovision.training.data.bad_images import bad_image_lines, check_bad_images
from zerovision.training.data.loader import Loader, automatic_workers
from zerovision.training.data.reader import Batch
from zerovision.training.data.reading.sources import FileSource
from zerovision.training.data.sampler import EvaluationPlan
from zerovision.training.engines.precision import resolve_precision, under_autocast
from zerovision.training.observe.evaluation import check_replaceable, describe_scores, read_scores
from zerovision.training.observe.loggers.text import open_console
from zerovision.training.observe.new_run import remove_leftovers_of_run
from zerovision.training.tasks.labels import mean_log_probabilities
from zerovision.training.tasks.scores import Scores, keeps_probabilities
from zerovision.training.world.collectives import agreed
from zerovision.training.world.preserved_process import preserved_process
from zerovision.training.world.world import World, start_world, stop_world

CLASSES_SHOWN = 20
OWN_FOLDERS = {"val": EVALUATION, "test": TEST_EVALUATION}
SCORES_SHOWN = {"top1": "top-1", "top5": "top-5", "loss": "loss"}


def evaluate(model: str | Path, data: str | Path = "", *, verbose: bool = False, **options: Any) -> dict[str, Any]:
    """Evaluate a trained model, write the evaluation files, and return the contents of scores.json.

    Under a launcher, this is a collective operation, and every rank returns the result. Otherwise, the current process
    evaluates the model; its signal handlers, environment, random generators and PyTorch settings are preserved.

    Args:
        model: a run's name or folder, or a safetensors file.
        data: data to evaluate on, in any form that the trainer's `--data` accepts; by default, the run's own data.
        verbose: whether to print scores and progress.
        options: the other fields of `EvaluateSettings`; with `output=None`, no files are written.

    Returns:
        The keys of `evaluation.describe_scores`, plus epoch, data, split and precision. With `flip` or `shift_pixels`,
            the result also contains "views", with both settings and the top1, top5 and loss of the mean probabilities.
            For a calibrated model, it also contains "rejection"; see
            `zerovision.delivery.fit_calibration.rejection_scores`.

    Raises:
        UserError: on all ranks, for a mistake in the arguments or for files that cannot be used.
    """
    settings = EvaluateSettings(model=str(model), data=str(data), **options)
    if settings.reject:
        read_reject(settings.reject)
    found = find_model(model)
    network = load_model(found.weights)
    views = checked_views(settings.flip, settings.shift_pixels, network[1])
    with preserved_process():
        world = start_world()
        try:
            evaluation = _prepare(settings, found, network, views, world)
            scores = _judge(evaluation, verbose=verbose)
            agreed(lambda: _write(evaluation, scores), world)
        finally:
            stop_world()
    if world.is_main and settings.reject and found.run is not None and (found.run / CARD).exists():
        from zerovision.delivery.publish import write_model_card  # imported late: it imports huggingface_hub

        write_model_card(found.run)
    if verbose and world.is_main:
        _show(scores, evaluation.folder, evaluation.data.notes)
    return scores


def run(settings: EvaluateSettings) -> int:
    """Run the command and return its exit code; every rank calls this."""
    evaluate(verbose=True, **vars(settings))
    return 0


@dataclass(frozen=True)
class Evaluation:
    """Model, data and settings of an evaluation, which are the same on every rank."""

    module: nn.Module  # on the rank's device, in evaluation mode
    metadata: dict[str, Any]  # of the network's weights
    data: EvaluationData
    world: World  # the ranks among which the images are divided
    settings: EvaluateSettings
    precision: str  # of the forward passes
    views: Views  # of each image; the mean probabilities over several views are also scored
    keeps_probabilities: bool  # see `SampleRecorder`
    calibrator: Calibrator | None  # collects the images' logits; None to keep no logits
    folder: Path | None  # for the evaluation files; None to write no files


def _prepare(
    settings: EvaluateSettings,
    model: TrainedModel,
    network: tuple[nn.Module, dict[str, Any]],
    views: Views,
    world: World,
) -> Evaluation:
    """Load the images, and prepare their evaluation; a collective operation."""
    module, metadata = network
    config, known = agreed(lambda: (model.config(), run_data(model)), world)
    data = agreed(lambda: load_evaluation_data(metadata, config, settings, known), world)
    precision = agreed(lambda: resolve_precision(settings.precision, world.device), world)
    folder = agreed(lambda: _output_folder(settings.output, model, config, data), world)
    if folder is not None:
        agreed(lambda: check_replaceable(folder), world)
    if model.run is not None and world.is_main:
        remove_leftovers_of_run(model.run)
    if settings.reject:
        data.task.check_use("--reject is", "the model has a threshold for each of its classes")
    calibration = None if settings.reject else agreed(lambda: read_calibration(model.weights), world)
    calibrator = None
    if settings.reject or (calibration is not None and views == calibration.views):
        calibrator = Calibrator(model.weights, settings.reject, views, calibration)
    best_by, images = config.best_by if config else "top1", len(data.datasets.val)
    keeps = keeps_probabilities(best_by, images, len(metadata["class_names"]), settings.batch_size, world.size)
    module.to(world.device).to(memory_format=torch.channels_last)  # the format of the images
    return Evaluation(module, metadata, data, world, settings, precision, views, keeps, calibrator, folder)


def _judge(evaluation: Evaluation, *, verbose: bool) -> dict[str, Any]:
    """Return the contents of scores.json; a collective operation."""
    metadata, data = evaluation.metadata, evaluation.data
    plain, of_views, trained_on = score(evaluation, verbose=verbose)
    about = {"data": data.data, "split": data.split}
    scores = {"epoch": metadata["extra"].get("epoch"), **about, "precision": evaluation.precision}
    scores |= describe_scores(plain, metadata["class_names"], data.datasets.val.source)
    if of_views is not None:
        scores["views"] = evaluation.views._asdict() | {key: getattr(of_views, key) for key in SCORES_SHOWN}
    if trained_on is not None:
        scores["trained_on"] = {key: getattr(trained_on, key) for key in ("samples", *SCORES_SHOWN)}
    if evaluation.calibrator is not None:
        before, are_seen = of_views or plain, plain is trained_on
        scores["rejection"] = evaluation.calibrator.finish(before, about, evaluation.world, are_seen=are_seen)
    return scores


def score(evaluation: Evaluation, *, verbose: bool) -> tuple[Scores, Scores | None, Scores | None]:
    """Return the exact scores of unseen images, of their mean probabilities over views, and of training images.

    This is a collective operation, which counts each image once. If the model was trained on all images, all scores are
    of these. The second scores are None for a single view, and the third if no training images are known. A UserError
    is raised on all ranks if more images are unreadable than may be skipped.
    """
    data, world, views = evaluation.data, evaluation.world, evaluation.views
    dataset, device = data.datasets.val, world.device
    plan = EvaluationPlan(len(dataset), evaluation.settings.batch_size, world.size)
    workers = automatic_workers(dataset, plan.batches_per_rank, world)
    loader = Loader(dataset, plan, world.rank, workers=workers, device=device)
    loader.watch(is_on=data.trained_images is not None)
    network = under_autocast(evaluation.module, evaluation.precision, device)
    label_map = data.label_map.to(device)
    task = data.task.to(device)
    plain = task.recorder(keeps_probabilities=evaluation.keeps_probabilities)
    trained_on, *of_views = (task.recorder() for _ in range(3))
    console = open_console(stderr=True)
    is_silent = not (verbose and world.is_main and console.is_terminal)

    def all_batches() -> None:
        with torch.inference_mode():
            for batch in track(loader, "evaluating", len(loader), console=console, transient=True, disable=is_silent):
                logits, labels = network(batch.images), label_map[batch.labels]
                known = _trained_on(data, batch).to(device)
                weights = batch.weights * torch.stack([~known, known])  # [2, B]
                plain.add(logits, labels, weights[0], batch.indices)
                trained_on.add(logits, labels, weights[1], batch.indices)
                mean = logits
                if views.are_several:
                    others = views_of(batch.images, views)
                    mean = mean_log_probabilities(
                        (weight, logits if view is batch.images else network(view)) for weight, view in others
                    )
                    for recorder, own in zip(of_views, weights, strict=True):
                        recorder.add(mean, labels, own, batch.indices)
                if evaluation.calibrator is not None:
                    evaluation.calibrator.add(mean, labels, weights, batch.indices)

    with contextlib.closing(loader):
        agreed(all_batches, world)
    check_bad_images(loader, world)
    for line in bad_image_lines([loader], world):
        if world.is_main:
            print(line, file=sys.stderr)
    apart, scores = trained_on.gather(world), plain.gather(world)
    averaged = of_views[not scores.samples].gather(world) if views.are_several else None
    return scores if scores.samples else apart, averaged, apart if apart.samples else None


def _trained_on(data: EvaluationData, batch: Batch) -> torch.Tensor:
    """Return whether the model was trained on each image of a batch, bool [B]."""
    source = data.datasets.val.source
    if data.trained_images is None or not isinstance(source, FileSource):
        return torch.zeros(len(batch.indices), dtype=torch.bool)
    paths = [*source.images.paths(batch.indices.numpy())]
    return torch.from_numpy(data.trained_images.contain(batch.digests, paths))


def _output_folder(
    output: str | Path | None, model: TrainedModel, config: TrainConfig | None, data: EvaluationData
) -> Path | None:
    """Return the folder for the evaluation files, by default in the run or next to the weights; None to write none.

    A UserError is raised for the current folder, which would be replaced.
    """
    if output is None:
        return None
    if str(output):
        folder = Path(os.path.expanduser(output))
        if folder.is_dir() and folder.samefile("."):
            raise UserError(
                f"--output {output} is the current folder, which an evaluation would replace: "
                f"use a new folder, such as {folder / EVALUATION}."
            )
        return folder
    if model.run is None or config is None:
        return model.weights.with_name(f"{model.weights.stem}-{EVALUATION}")
    if data.is_own and data.split in OWN_FOLDERS:
        return model.run / OWN_FOLDERS[data.split]
    folder = model.run / f"{EVALUATION}-{slug(Path(data.data).name)}-{data.split}"
    numbered = (folder.with_name(f"{folder.name}-{number}") for number in count(2))
    return next(one for one in chain([folder], numbered) if not _is_of_other_data(one, data.data))


def _is_of_other_data(folder: Path, data: str) -> bool:
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
        scores = read_scores(folder)
        return scores is not None and scores["data"] != data
    return False


def _write(evaluation: Evaluation, scores: dict[str, Any]) -> None:
    """Write the evaluation files, on rank 0 only."""
    folder = evaluation.folder
    if folder is not None and evaluation.world.is_main:
        explain = explainer(evaluation.module, evaluation.metadata["preprocessing"])
        with errors_of_writing(folder):
            write_evaluation(folder, scores, evaluation.data.datasets.val.source.read, explain)


def _show(scores: dict[str, Any], folder: Path | None, notes: Sequence[str]) -> None:
    """Print the overall and per-class scores; if there are many classes, show only the classes with the lowest F1."""
    console = open_console()
    for note in notes:
        console.print(f"note: {printable(note)}", soft_wrap=True)
    shows_top5 = has_top5(scores)
    average_precision = f"  mAP {percent(scores['map'])}" if "map" in scores else ""
    console.print(
        f"{_of(scores, shows_top5)}  ECE {percent(scores['ece'])}  "
        f"macro F1 {percent(scores['macro']['f1'])}{average_precision}  on {scores['samples']} images "
        f"({printable(scores['data'])}, {scores['split']})",
        soft_wrap=True,
    )
    if "views" in scores:
        views = Views(scores["views"]["flip"], scores["views"]["shift_pixels"])
        console.print(f"{_of(scores['views'], shows_top5)}  of the mean of {views}", soft_wrap=True)
    if known := scores.get("trained_on"):
        are_all = known["samples"] == scores["samples"] and known["loss"] == scores["loss"]
        console.print(
            f"{_of(known, shows_top5)}  on {known['samples']} images that the model was trained on, "
            f"{'which are all of the data' if are_all else 'which the scores above do not include'}",
            soft_wrap=True,
        )
    if found := scores.get("rejection"):
        accuracy = "" if found["accuracy"] is None else f"; {percent(found['accuracy'])} of these are correct"
        before, after, kept = (percent(found[key]) for key in ("ece_before", "ece", "coverage"))
        console.print(
            f"calibrated: temperature {found['temperature']:.4g}  ECE {before} -> {after}  "
            f"threshold {found['threshold']:.4f}: {kept} of the images are not rejected{accuracy}",
            soft_wrap=True,
        )
    classes, title = scores["classes"], None
    if len(classes) > CLASSES_SHOWN:
        title = f"the {CLASSES_SHOWN} classes with the lowest F1, of {len(classes)}"
        classes = sorted(classes, key=lambda one: one["f1"])[:CLASSES_SHOWN]
    table = Table("class", "images", "precision", "recall", "F1", title=title, box=None, header_style="bold")
    for column in table.columns[1:]:
        column.justify = "right"
    for one in classes:
        ratios = (percent(one[key]) for key in ("precision", "recall", "f1"))
        table.add_row(printable(one["name"]), str(one["support"]), *ratios)
    console.print(table)
    if folder is not None:
        console.print(f"files  {printable(str(folder))}", soft_wrap=True)


def _of(scores: dict[str, float], shows_top5: bool) -> str:
    shown = {key: name for key, name in SCORES_SHOWN.items() if shows_top5 or key != "top5"}
    return "  ".join(f"{name} {show_score(key, scores[key])}" for key, name in shown.items())
