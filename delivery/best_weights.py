"""The best epoch's weights: which ones a file holds, and bringing them along to a run that goes on elsewhere."""

from __future__ import annotations

import shutil
from pathlib import Path

from delivery.evaluation_files import read_scores, write_scores
from delivery.weights import read_metadata
from training.durable import replacing, sync_to_disk
from training.errors import UserError
from training.run_folder import EVALUATION, WEIGHTS, RunFolder


def epoch_of(weights: Path) -> int | None:
    """Return the epoch, from 1, whose weights a file holds; None for no file, or one that says nothing of it."""
    try:
        return read_metadata(weights)["extra"].get("epoch")
    except (UserError, AttributeError):
        return None


def bring_along(checkpoint: Path, folder: RunFolder, best_epoch: int) -> str | None:
    """Copy the best weights so far, with their scores, from the run that a checkpoint is of; on rank 0 alone.

    A run that goes on in its own folder has them already. A kill leaves what was there before, or the whole file.

    Args:
        checkpoint: RUN/checkpoints/NAME.
        folder: of the run that goes on from it.
        best_epoch: as the checkpoint says; 0 for none yet.

    Returns:
        A line for the log; None if there is nothing to say.
    """
    run = checkpoint.absolute().parent.parent
    if best_epoch == 0 or run.resolve() == folder.path.resolve():
        return None
    weights = run / WEIGHTS
    if epoch_of(weights) != best_epoch:
        return f"note: {weights} does not hold the weights of the best epoch so far, epoch {best_epoch}"
    try:
        with replacing(folder.weights) as temporary:
            shutil.copyfile(weights, temporary)
            sync_to_disk(temporary)
        sync_to_disk(folder.path)
        scores = read_scores(run / EVALUATION)
        if scores is not None and scores["epoch"] == best_epoch:
            write_scores(folder.evaluation, scores)
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"note: the best weights so far could not be copied from {run} ({type(error).__name__}: {error})"
    return f"the weights of the best epoch so far, epoch {best_epoch}, come along from {weights}"
