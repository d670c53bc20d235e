"""Evaluates a trained model: exact scores of every image, and the files of them; on one process or on all ranks."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from rich.progress import track
from rich.table import Table
from torch import nn

from zerovision.delivery.activation_map import Explain, explainer
from zerovision.delivery.calibration import read_calibration
from zerovision.delivery.evaluation_data import EvaluationChoice, EvaluationData, load_evaluation_data, run_data
from zerovision.delivery.evaluation_files import write_evaluation
from zerovision.delivery.fit_calibration import Calibrator, read_reject
from zerovision.delivery.flags import evaluate_parser
from zerovision.delivery.trained_model import TrainedModel, find_model, slug
from zerovision.delivery.views import PLAIN, Views, checked_views, mean_log_probabilities
from zerovision.training.base.atomic_write import errors_of_writing
from zerovision.training.base.errors import UserError, printable
from zerovision.training.base.points import show_score
from zerovision.training.base.run_folder import CARD, EVALUATION, TEST_EVALUATION
from zerovision.training.base.units import percent
from zerovision.training.checkpoint.weights import load_model
from zerovision.training.config import TrainConfig
from zerovision.training.data.bad_images import bad_image_lines, check_bad_images
from zerovision.training.data.loader import Loader, automatic_workers
from zerovision.training.data.reader import Batch
from zerovision.training.data.reading.sources import FileSource
from zerovision.training.data.sampler import EvaluationPlan
from zerovision.training.engines.precision import resolve_precision, under_autocast
from zerovision.training.observe.class_scores import keeps_probabilities
from zerovision.training.observe.console import open_console
from zerovision.training.observe.evaluation import check_replaceable, describe_scores, read_scores
from zerovision.training.observe.multilabel import thresholds_of
from zerovision.training.observe.new_run import remove_leftovers_of_run
from zerovision.training.observe.scores import SampleRecorder, Scores, sample_losses
from zerovision.training.world.collectives import agreed
from zerovision.training.world.preserved_process import preserved_process
from zerovision.training.world.world import World, start_world, stop_world

CLASSES_SHOWN = 20
OWN_FOLDERS = {"val": EVALUATION, "test": TEST_EVALUATION}
SCORES_SHOWN = {"top1": "top-1", "top5": "top-5", "loss": "loss"}


def evaluate(
    model: str | Path,
    data: str | Path = "",
    *,
    split: str = "auto",
    data_root: str = "",
    bad_images: str = "",
    allow_missing_classes: bool = False,
    flip: bool = False,
    shift_pixels: int = 0,
    reject: str = "",
    path_column: str = "",
    label_column: str = "",
    max_megapixels: int = 0,
    batch_size: int = 64,
    precision: str = "auto",
    output: str | Path | None = "",
    verbose: bool = False,
) -> dict[str, Any]:
    """Evaluate a trained model, write the files of the evaluation, and return what scores.json contains.

    Started by a launcher this is a collective, whose result every rank returns. Otherwise one process evaluates, and
    its signal handlers, environment, random generators and PyTorch's settings are left as they were.

    Args:
        model: a run's name or folder, or a safetensors file.
        data: images to evaluate on, as `--data` of the training; default: the run's own.
        split: "val", "train", "all", or "auto": what the run held out, or all of a folder that it was not trained on.
        data_root: folder of torchvision's data sets; default: the run's own.
        bad_images: "error", "skip" or "skip:SHARE", as in training; default: the run's own.
        allow_missing_classes: whether the data may lack some of the model's classes.
        flip: whether to score the mean probabilities of each image and its mirror image, too.
        shift_pixels: how far to shift each image for more views of it, whose mean probabilities are scored, too.
        reject: an accuracy, such as "0.95", or a threshold, such as "below:0.7": calibrates the model for `predict`,
            see `zerovision.delivery.fit_calibration`, on images that it was not trained on.
        path_column: as in training; default: the run's own.
        label_column: as `path_column`.
        max_megapixels: of the largest image file, as in training; 0: the run's own.
        batch_size: images per rank and forward pass.
        precision: "auto", "bf16", "fp16" or "fp32", as in training.
        output: folder of the files; default: in the run's folder; None: no files are written.
        verbose: whether to print scores and progress.

    Returns:
        The keys of `evaluation.describe_scores`, and epoch, data, split and precision; with `flip`
        or `shift_pixels` also "views": both, and top1, top5 and loss of the mean probabilities; of a calibrated model
        also "rejection", see `zerovision.delivery.fit_calibration.rejection_scores`.

    Raises:
        UserError: for a mistake in the arguments, and for files that cannot be used; on all ranks.
    """
    evaluate_parser(None).check(shift_pixels=shift_pixels, batch_size=batch_size, precision=precision)
    places = (path_column, label_column, max_megapixels)
    choice = EvaluationChoice(str(data), split, data_root, bad_images, allow_missing_classes, *places)
    if reject:
        read_reject(reject)
    found = find_model(model)
    module, metadata = load_model(found.weights)
    views = checked_views(flip, shift_pixels, metadata)
    with preserved_process():
        world = start_world()
        try:
            config, known = agreed(lambda: (found.config(), run_data(found)), world)
            evaluated = agreed(lambda: load_evaluation_data(metadata, config, choice, known), world)
            used_precision = agreed(lambda: resolve_precision(precision, world.device), world)
            folder = agreed(lambda: _output_folder(output, found, config, evaluated), world)
            if folder is not None:
                agreed(lambda: check_replaceable(folder), world)
            if found.run is not None and world.is_main:
                remove_leftovers_of_run(found.run)
            module.to(world.device).to(memory_format=torch.channels_last)  # as the images are
            network = under_autocast(module, used_precision, world.device)
            num_classes = len(metadata["class_names"])
            best_by, images = config.best_by if config else "top1", len(evaluated.datasets.val)
            keeps = keeps_probabilities(best_by, images, num_classes, batch_size, world.size)
            thresholds = thresholds_of(metadata)
            if reject and thresholds is not None:
                raise UserError("--reject is for one label: the model has a threshold for each of its classes.")
            known_calibration = None if reject else agreed(lambda: read_calibration(found.weights), world)
            calibrator = None
            if reject or (
                known_calibration is not None and Views(known_calibration.flip, known_calibration.shift_pixels) == views
            ):
                calibrator = Calibrator(found.weights, reject, views, known_calibration)
            result = score(
                network,
                evaluated,
                world,
                num_classes,
                batch_size,
                views,
                calibrator=calibrator,
                thresholds=thresholds,
                keeps_probabilities=keeps,
                verbose=verbose,
            )
            scores = {"epoch": metadata["extra"].get("epoch"), "data": evaluated.data, "split": evaluated.split}
            scores |= {"precision": used_precision}
            scores |= describe_scores(result.plain, metadata["class_names"], evaluated.datasets.val.source.name)
            if result.views is not None:
                scores["views"] = views._asdict() | {key: getattr(result.views, key) for key in SCORES_SHOWN}
            if result.trained_on is not None:
                scores["trained_on"] = {key: getattr(result.trained_on, key) for key in ("samples", *SCORES_SHOWN)}
            if calibrator is not None:
                before, told = result.views or result.plain, (evaluated.data, evaluated.split)
                scores["rejection"] = calibrator.finish(before, *told, num_classes, world)
            if folder is not None:
                explain = explainer(module, metadata["preprocessing"])
                agreed(lambda: _write(folder, scores, evaluated, explain) if world.is_main else None, world)
        finally:
            stop_world()
    if world.is_main and reject and found.run is not None and (found.run / CARD).exists():
        from zerovision.delivery.model_card import write_model_card  # imported late: it imports the hub's library

        write_model_card(found.run)
    if verbose and world.is_main:
        _show(scores, folder, evaluated.notes)
    return scores


class Result(NamedTuple):
    """The scores of an evaluation.

    Attributes:
        plain: of the images that the model was not trained on; of all of them, if it was trained on all.
        views: of the mean of several views of these; None without.
        trained_on: of the images that the model was trained on; None if there are none, or it is not known.
    """

    plain: Scores
    views: Scores | None = None
    trained_on: Scores | None = None


def score(
    network: nn.Module,
    data: EvaluationData,
    world: World,
    num_classes: int,
    batch_size: int,
    views: Views = PLAIN,
    *,
    calibrator: Calibrator | None = None,
    thresholds: np.ndarray | None = None,
    keeps_probabilities: bool = False,
    verbose: bool = False,
) -> Result:
    """Return the exact scores of every image, each counted once, apart for those that were trained on; a collective.

    Args:
        network: images float32 [B, C, S, S] to logits [B, classes], in evaluation mode, on the rank's device.
        data: the images and the model's number of each of their classes.
        world: the ranks, which share the images.
        num_classes: classes of the model.
        batch_size: images of one forward pass of one rank.
        views: what to average of each image, too.
        calibrator: gets the logits of the images that the model was not trained on; None for none.
        thresholds: as `SampleRecorder`.
        keeps_probabilities: as `SampleRecorder`.
        verbose: whether to show a progress bar on a terminal.

    Raises:
        UserError: on all ranks, if an image on any rank cannot be read, or more of them than may be skipped.
    """
    dataset = data.datasets.val
    plan = EvaluationPlan(len(dataset), batch_size, world.size)
    workers = automatic_workers(dataset, plan.batches_per_rank, world)
    loader = Loader(dataset, plan, world.rank, workers=workers, device=world.device)
    loader.watch(is_on=data.trained_images is not None)
    label_map = data.label_map.to(world.device)
    label_sets = None if data.label_sets is None else data.label_sets.to(world.device)
    recorder = partial(SampleRecorder, num_classes, label_sets=label_sets, thresholds=thresholds)
    plain, of_views, trained_on = recorder(keeps_probabilities=keeps_probabilities), recorder(), recorder()
    console = open_console(stderr=True)
    is_silent = not (verbose and world.is_main and console.is_terminal)

    def all_batches() -> None:
        with torch.inference_mode():
            for batch in track(loader, "evaluating", len(loader), console=console, transient=True, disable=is_silent):
                logits, labels = network(batch.images), label_map[batch.labels]
                known = _trained_on(data, batch).to(world.device)
                losses, fresh = sample_losses(logits, labels, label_sets), batch.weights * ~known
                plain.add(losses, logits, labels, fresh, batch.indices)
                trained_on.add(losses, logits, labels, batch.weights * known, batch.indices)
                mean = logits
                if views.are_several:
                    mean = mean_log_probabilities(network, batch.images, logits, views)
                    of_views.add(sample_losses(mean, labels), mean, labels, fresh, batch.indices)
                if calibrator is not None:
                    calibrator.add(mean, labels, fresh, batch.indices)

    try:
        agreed(all_batches, world)
    finally:
        loader.close()
    check_bad_images(loader, world)
    for line in bad_image_lines([loader], world):
        if world.is_main:
            print(line, file=sys.stderr)
    apart = trained_on.gather(world)
    scores = Result(
        plain.gather(world), of_views.gather(world) if views.are_several else None, apart if apart.samples else None
    )
    return scores if scores.plain.samples else scores._replace(plain=apart)


def _trained_on(data: EvaluationData, batch: Batch) -> torch.Tensor:
    """Return which images of a batch the model was trained on, bool [B]."""
    source = data.datasets.val.source
    if data.trained_images is None or not isinstance(source, FileSource):
        return torch.zeros(len(batch.indices), dtype=torch.bool)
    paths = [source.path(index) for index in batch.indices.tolist()]
    return torch.from_numpy(data.trained_images.contain(batch.digests, paths))


def _output_folder(
    output: str | Path | None, model: TrainedModel, config: TrainConfig | None, data: EvaluationData
) -> Path | None:
    """Return the folder of the files; by default the run's own evaluation, or another one beside it.

    Raises:
        UserError: if it is the current one, which would be gone for the shell in it.
    """
    if output is None:
        return None
    if str(output):
        folder = Path(os.path.expanduser(output))
        if folder.is_dir() and folder.samefile("."):
            raise UserError(
                f"--output {output} is the current folder, which an evaluation would replace: "
                f"give a new one, such as {folder / EVALUATION}."
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


def _write(folder: Path, scores: dict[str, Any], data: EvaluationData, explain: Explain | None) -> None:
    with errors_of_writing(folder):
        write_evaluation(folder, scores, data.datasets.val.source.read, explain)


def _show(scores: dict[str, Any], folder: Path | None, notes: Sequence[str]) -> None:
    """Print the scores and the classes, of many those with the lowest F1."""
    console = open_console()
    for note in notes:
        console.print(f"note: {printable(note)}", soft_wrap=True)
    average_precision = f"  mAP {percent(scores['map'])}" if "map" in scores else ""
    console.print(
        f"{_of(scores)}  ECE {percent(scores['ece'])}  "
        f"macro F1 {percent(scores['macro']['f1'])}{average_precision}  on {scores['samples']} images "
        f"({printable(scores['data'])}, {scores['split']})",
        soft_wrap=True,
    )
    if "views" in scores:
        views = Views(scores["views"]["flip"], scores["views"]["shift_pixels"])
        console.print(f"{_of(scores['views'])}  of the mean of {views}", soft_wrap=True)
    if known := scores.get("trained_on"):
        are_all = known["samples"] == scores["samples"] and known["loss"] == scores["loss"]
        console.print(
            f"{_of(known)}  on {known['samples']} images that the model was trained on, "
            f"{'which are all of them' if are_all else 'which are not among the ones above'}",
            soft_wrap=True,
        )
    if found := scores.get("rejection"):
        accuracy = "" if found["accuracy"] is None else f", {percent(found['accuracy'])} of them right"
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


def _of(scores: dict[str, float]) -> str:
    return "  ".join(f"{name} {show_score(key, scores[key])}" for key, name in SCORES_SHOWN.items())
