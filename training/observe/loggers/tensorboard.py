"""TensorBoard: scalars, the configuration as text, a sample of augmented images, the confusion matrix as a picture."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

import torch
from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import SummaryWriter

from training.base.points import EpochPoint, RunPoint, StepPoint
from training.base.run_folder import RunFolder
from training.base.run_logger import RunLogger
from training.observe.loggers.confusion import confusion_picture
from training.observe.loggers.scalars import epoch_scalars, run_scalars, step_scalars

LARGEST_PICTURE = 200  # classes
SECONDS_BETWEEN_PICTURES = 30.0  # drawing one takes as long as a step


class TensorBoardLogger(RunLogger):
    """Writes event files into logs/tensorboard/<run>/."""

    def __init__(self, folder: RunFolder, config: dict[str, Any], facts: dict[str, Any], first_step: int) -> None:
        # After a resume, steps from before it that are run again are void.
        purge_step = first_step + 1 if first_step else None
        self._next_picture = 0.0
        self._writer = SummaryWriter(str(folder.tensorboard), flush_secs=10, purge_step=purge_step)
        self._writer.add_text("configuration", _as_code(config))
        self._writer.add_text("environment", _as_code(facts))

    def images(self, images: torch.Tensor) -> None:
        self._writer.add_images("augmented training images", images, global_step=0)

    def steps(self, point: StepPoint) -> None:
        self._write_scalars(step_scalars(point), point.step)

    def epoch(self, point: EpochPoint) -> None:
        """Write the scalars of an epoch, and the confusion matrix of the first, the last, and some between."""
        self._write_scalars(epoch_scalars(point), point.epoch)
        details, classes = point.validation.details, len(point.class_names)
        is_due = point.epoch == point.epochs or time.monotonic() >= self._next_picture
        if is_due and details is not None and classes <= LARGEST_PICTURE:
            self._next_picture = time.monotonic() + SECONDS_BETWEEN_PICTURES
            picture = confusion_picture(details.confusion(classes), point.class_names)
            self._writer.add_image("confusion matrix", picture, point.epoch, dataformats="HWC")

    def end(self, point: RunPoint) -> None:
        """Write the whole run's numbers, one point each."""
        self._write_scalars(run_scalars(point), point.step)

    def close(self) -> None:
        self._writer.close()

    def _write_scalars(self, scalars: Mapping[str, float | None], step: int) -> None:
        """Write all in one record: one for each costs as much time for every scalar."""
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items() if value is not None]
        self._writer._get_file_writer().add_summary(Summary(value=values), step)


def _as_code(values: dict[str, Any]) -> str:
    # Four spaces make a code block in TensorBoard's Markdown.
    return "    " + json.dumps(values, indent=2, default=str).replace("\n", "\n    ")
