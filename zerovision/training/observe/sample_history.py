"""Records the network's predictions for each training image in each epoch, for the audit of labels."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import numpy as np
import torch

from zerovision.models.ensemble import log_mean_probability
from zerovision.training.base.files import replacing
from zerovision.training.data.batch_transforms import to_device
from zerovision.training.observe.observer import Observer, Seen
from zerovision.training.tasks.scores import rows_of_all
from zerovision.training.world.world import World

HISTORY = "history"  # subfolder of the run's folder, with 001.npy and so on
ROW = np.dtype([("image", "<i4"), ("label", "<i4"), ("other", "<i4"), ("own_log", "<f4"), ("other_log", "<f4")])
MOST_IMAGES = 100_000  # of the largest data set whose labels and outliers an audit checks
MOST_EPOCHS = 16  # that are recorded, evenly spaced
HELD_NUMBERS = 2**20  # logits kept on the device before they are reduced


class SampleHistory(Observer):
    """Records two log-probabilities of each training image per epoch, before the step that trains on the image.

    The first is the label's log-probability, which is the negative cross-entropy; the second is that of the most
    probable other class. Their difference is the margin. Images in mixed batches and images with non-finite
    log-probabilities are left out.

    Args:
        folder: the run's folder.
        world: the ranks.
        epochs: number of epochs of the run.
        steps_per_epoch: number of optimizer steps per epoch.
    """

    span = "logging"

    def __init__(self, folder: Path, world: World, epochs: int, steps_per_epoch: int) -> None:
        self._folder, self._world, self._every = folder / HISTORY, world, -(-epochs // MOST_EPOCHS)
        self._steps_per_epoch, self._epoch = steps_per_epoch, 0
        self._held: list[tuple[torch.Tensor, ...]] = []
        self._rows: list[torch.Tensor] = []

    def before_step(self, position: int) -> None:
        self._epoch = position // self._steps_per_epoch

    def seen(self, seen: Seen) -> None:
        """Keep the results of a micro-batch."""
        batch, logits = seen.batch, seen.logits
        if (self._epoch + 1) % self._every:
            return
        # If images are mixed on this rank, weights are 0: every rank must have the same number of rows.
        weights = torch.zeros_like(batch.weights) if batch.targets is not None else batch.weights
        # A replayed CUDA graph overwrites these logits.
        self._held.append((weights, batch.indices, batch.labels, logits.detach().clone()))
        if len(self._held) * logits.numel() > HELD_NUMBERS:
            self._reduce()

    def after_steps(self) -> None:
        """Add the rows that all ranks have recorded since the last call to the epoch's file; a collective.

        A step that is repeated after an interruption produces the same rows, which are stored only once. Rows that
        cannot be written are lost.
        """
        self._reduce()
        rows, self._rows = self._rows, []
        if not rows:
            return
        found = rows_of_all(rows, self._world).numpy()
        found = found[(found[:, 0] > 0) & np.isfinite(found).all(1)]
        if not (len(found) and self._world.is_main):
            return
        table = np.empty(len(found), ROW)
        for name, column in zip(ROW.names or (), found[:, 1:].T, strict=True):
            table[name] = column
        path = self._folder / f"{self._epoch + 1:03}.npy"
        with suppress(OSError):
            self._folder.mkdir(exist_ok=True)
            with replacing(path) as new, new.open("wb") as stream:
                np.save(stream, np.unique(np.concatenate([_rows_of(path), table])))

    def _reduce(self) -> None:
        held, self._held = self._held, []
        if not held:
            return
        weights, images, labels, logits = (torch.cat(one) for one in zip(*held, strict=True))
        logits, images = logits.float(), to_device(images, logits.device)
        of_each = logits.log_softmax(1) if logits.ndim == 2 else log_mean_probability(logits)
        others = of_each.scatter(1, labels[:, None], -torch.inf).max(1)
        columns = (weights, images, labels, others.indices, of_each.gather(1, labels[:, None])[:, 0], others.values)
        self._rows.append(torch.stack([column.double() for column in columns], dim=1))


def mean_probabilities(run: Path, labels: np.ndarray, num_classes: int) -> np.ndarray:
    """Return a run's predicted probabilities for each training image, averaged over its epochs, float64 [N, C].

    The probability that remains after the two recorded classes is divided equally among all other classes. Images
    without records have NaN; if the records do not match `labels`, all images have NaN.

    Args:
        run: the run's folder.
        labels: int64 [N], labels of the training images.
        num_classes: number of classes, C.
    """
    means, rests, counts = np.zeros((len(labels), num_classes)), np.zeros(len(labels)), np.zeros(len(labels))
    for path in sorted((run / HISTORY).glob("*.npy")):
        rows = _rows_of(path)
        images, own, other = rows["image"], rows["label"], rows["other"]
        is_inside = (images >= 0) & (images < len(labels)) & (other >= 0) & (other < num_classes)
        if not is_inside.all() or (labels[images] != own).any():
            return np.full_like(means, np.nan)
        of_own, of_other = (np.exp(rows[name].astype(np.float64)) for name in ("own_log", "other_log"))
        rest = np.maximum(1 - of_own - of_other, 0) / max(num_classes - 2, 1)
        np.add.at(means, (images, own), of_own - rest)
        np.add.at(means, (images, other), of_other - rest)
        np.add.at(rests, images, rest)
        np.add.at(counts, images, 1)
    means += rests[:, None]
    means /= np.maximum(counts, 1)[:, None]
    means[counts == 0] = np.nan
    return means


def _rows_of(path: Path) -> np.ndarray:
    """Return the rows of a file, or no rows if the file is missing or damaged."""
    with suppress(OSError, ValueError, EOFError):
        rows = np.load(path)
        if rows.dtype == ROW:
            return rows
    return np.empty(0, ROW)
