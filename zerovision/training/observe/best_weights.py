"""Writes the best epoch's weights, reads their epoch, and copies them for a run that resumes in a different folder."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from zerovision.models.build import BuiltModel
from zerovision.training.base.errors import UserError
from zerovision.training.base.files import replacing, unfinished
from zerovision.training.base.plugins import IN_FILES, loaded, names_of
from zerovision.training.base.run_folder import EVALUATION, TEST_EVALUATION, WEIGHTS, RunFolder
from zerovision.training.checkpoint.weights import read_metadata, save_weights, write_class_map
from zerovision.training.data.datasets import DatasetPair
from zerovision.training.observe.evaluation import describe_scores, read_scores, write_scores
from zerovision.training.tasks.labels import THRESHOLDS
from zerovision.training.tasks.scores import Scores


def epoch_of(weights: Path) -> int | None:
    """Return the epoch that a weights file is from, counted from 1, or None if the file or its epoch is missing."""
    try:
        return read_metadata(weights)["extra"].get("epoch")
    except (UserError, AttributeError):
        return None


def write_best(
    folder: RunFolder,
    weights: dict[str, torch.Tensor],
    built: BuiltModel,
    data: DatasetPair,
    scores: Scores,
    judged: dict[str, Any],
) -> Callable[[], None]:
    """Return a function that writes an epoch's weights and scores; only rank 0 calls this function.

    Args:
        folder: the run's folder.
        weights: fp32 tensors by name.
        built: the model.
        data: the data, with its classes, preprocessing and validation set.
        scores: scores of the validation set.
        judged: dict with `epoch`, counted from 1, and `data`, the value of `--data`.
    """
    more = {} if scores.thresholds is None else {THRESHOLDS: scores.thresholds.tolist()}
    more |= {IN_FILES: names_of(loaded())} if loaded() else {}

    def write() -> None:
        _remove_test_scores(folder)
        save_weights(
            folder.weights,
            weights,
            description=built.description,
            class_names=data.class_names,
            preprocessing=data.preprocessing,
            extra={"epoch": judged["epoch"], "top1": scores.top1, "top5": scores.top5, "loss": scores.loss, **more},
        )
        write_class_map(folder.path, data.class_names)
        facts = describe_scores(scores, data.class_names, data.val.source)
        write_scores(folder.path / EVALUATION, judged | {"split": "val"} | facts)

    return write


def _remove_test_scores(folder: RunFolder) -> None:
    """Remove the evaluation of the test part, because the weights that it is about will be replaced."""
    if (path := folder.path / TEST_EVALUATION).exists():
        shutil.rmtree(path.rename(unfinished(path, "tmp")), ignore_errors=True)


def keep_finished(folder: RunFolder, before: int, position: int, epochs: int) -> str | None:
    """Keep the finished weights when a run returns to an earlier epoch to train for more epochs; only on rank 0.

    Args:
        folder: the run's folder.
        before: the run's number of epochs up to now; 0 if it is not known.
        position: the epoch to continue with, from 0.
        epochs: the run's new number of epochs.

    Returns:
        A line for the log; None if the number of epochs does not increase, if no weights are newer than the checkpoint,
            or if the weights have already been kept.
    """
    epoch, kept = epoch_of(folder.weights), folder.path / f"model-{before}-epochs.safetensors"
    if not 0 < before < epochs or epoch is None or epoch <= position or kept.exists():
        return None
    try:
        os.link(folder.weights, kept)  # new weights are written to a different file, which then takes over the old name
    except OSError as error:
        return f"note: the weights of the run of {before} epochs could not be kept as {kept} ({error.strerror})"
    return f"the weights of epoch {epoch}, of the run of {before} epochs, are kept as {kept.name}"


def bring_along(checkpoint: Path, folder: RunFolder, best_epoch: int) -> str | None:
    """Copy the best weights so far, with their scores, from the run that saved a checkpoint; only on rank 0.

    A run that resumes in its own folder already has these weights. If the process is killed, either the previous file
    or the complete new file remains.

    Args:
        checkpoint: path of the checkpoint, RUN/checkpoints/NAME.
        folder: folder of the run that resumes from the checkpoint.
        best_epoch: number of the checkpoint's best epoch; 0 if it has none yet.

    Returns:
        A line for the log, or None if there is nothing to copy.
    """
    run = checkpoint.absolute().parent.parent
    if best_epoch == 0 or run.resolve() == folder.path.resolve():
        return None
    weights = run / WEIGHTS
    if epoch_of(weights) != best_epoch:
        return f"note: {weights} does not contain the weights of the best epoch so far, epoch {best_epoch}"
    try:
        with replacing(folder.weights, durable=True) as temporary:
            shutil.copyfile(weights, temporary)
            _remove_test_scores(folder)
        write_class_map(folder.path, read_metadata(weights)["class_names"])
        if (scores := read_scores(run / EVALUATION)) is not None and scores["epoch"] == best_epoch:
            write_scores(folder.path / EVALUATION, scores)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"note: the best weights so far could not be copied from {run} ({type(error).__name__}: {error})"
    return f"the weights of the best epoch so far, epoch {best_epoch}, are copied from {weights}"
