"""Writes scalars, the configuration, a sample of augmented images and confusion matrices for TensorBoard."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

import torch
from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import SummaryWriter

from zerovision.training.base.points import EpochPoint, RunLogger, RunPoint, StepPoint
from zerovision.training.base.run_folder import RunFolder
from zerovision.training.observe.loggers.confusion import confusion_picture

LARGEST_PICTURE = 200  # classes
SECONDS_BETWEEN_PICTURES = 30.0  # drawing a picture takes as long as a step


class TensorBoardLogger(RunLogger):
    """Writes event files to logs/tensorboard/<run>/."""

    def __init__(self, folder: RunFolder, config: dict[str, Any], facts: dict[str, Any], first_step: int) -> None:
        # After a resume, the earlier values of steps that are repeated are void.
        purge_step = first_step + 1 if first_step else None
        self._next_picture = 0.0
        self._writer = SummaryWriter(str(folder.tensorboard), flush_secs=10, purge_step=purge_step)
        self._writer.add_text("configuration", _as_code(config))
        self._writer.add_text("environment", _as_code(facts))

    def images(self, images: torch.Tensor) -> None:
        self._writer.add_images("augmented training images", images, global_step=0)

    def steps(self, point: StepPoint) -> None:
        scalars = {
            "train/loss": point.loss,
            "train/learning_rate": point.learning_rate,
            "train/gradient_norm": point.gradient_norm,
            "speed/images_per_second": point.images_per_second,
            "speed/data_wait_share": point.data_wait_share,
            "memory/bytes_per_rank": point.device.memory_bytes,
            "memory/allocated_bytes_per_rank": point.device.memory_allocated_bytes,
            "memory/reserved_bytes_per_rank": point.device.memory_reserved_bytes,
            "disk/free_bytes": point.device.disk_free_bytes,
            **{f"speed/cpu_utilization/{host}": share for host, share in point.cpu_utilization.items()},
        }
        self._write_scalars(scalars | _time_and_speed(point), point.step)

    def epoch(self, point: EpochPoint) -> None:
        """Write the scalars of an epoch, and the confusion matrix in the first, the last and some other epochs."""
        scalars = {
            "epoch/train_loss": point.train_loss,
            "epoch/train_top1": point.train_top1,
            "epoch/val_loss": point.validation.loss,
            "epoch/val_top1": point.validation.top1,
            "epoch/val_top5": point.validation.top5,
            "epoch/val_lowest_recall": point.summary.lowest_recall,
            f"epoch/val_{point.summary.best_by}": point.summary.score,
        }
        self._write_scalars(scalars, point.epoch)
        details, classes = point.validation.details, len(point.class_names)
        is_due = point.epoch == point.epochs or time.monotonic() >= self._next_picture
        if is_due and details is not None and point.validation.thresholds is None and classes <= LARGEST_PICTURE:
            self._next_picture = time.monotonic() + SECONDS_BETWEEN_PICTURES
            picture = confusion_picture(details.confusion(classes), point.class_names)
            self._writer.add_image("confusion matrix", picture, point.epoch, dataformats="HWC")

    def end(self, point: RunPoint) -> None:
        """Write the numbers of the whole run, each as a single point."""
        scalars = {"speed/images_per_second": point.images_per_second} | _time_and_speed(point)
        self._write_scalars({f"run/{tag}": value for tag, value in scalars.items()}, point.step)

    def close(self) -> None:
        self._writer.close()

    def _write_scalars(self, scalars: Mapping[str, float | None], step: int) -> None:
        """Write all scalars in one record, because each record takes time."""
        values = [Summary.Value(tag=tag, simple_value=value) for tag, value in scalars.items() if value is not None]
        self._writer._get_file_writer().add_summary(Summary(value=values), step)


def _time_and_speed(point: StepPoint | RunPoint) -> dict[str, float | None]:
    return {f"time/{name}": share for name, share in point.time_shares.items()} | {
        "speed/tflops_per_second": point.device.tflops_per_second,
        "speed/mfu": point.device.mfu,
        "speed/gpu_utilization": point.device.gpu_utilization,
    }


def _as_code(values: dict[str, Any]) -> str:
    # Four spaces make a code block in TensorBoard's Markdown.
    return "    " + json.dumps(values, indent=2, default=str).replace("\n", "\n    ")
