"""The numbers of a point by the names under which TensorBoard and the trackers draw them; None for what is unknown."""

from __future__ import annotations

from training.base.points import EpochPoint, RunPoint, StepPoint

Scalars = dict[str, float | None]


def step_scalars(point: StepPoint) -> Scalars:
    """Return the numbers of a logging point."""
    return {
        "train/loss": point.loss,
        "train/learning_rate": point.learning_rate,
        "train/gradient_norm": point.gradient_norm,
        "speed/images_per_second": point.images_per_second,
        "speed/data_wait_share": point.data_wait_share,
        "memory/bytes_per_rank": point.device.memory_bytes,
        "memory/allocated_bytes_per_rank": point.device.memory_allocated_bytes,
        "memory/reserved_bytes_per_rank": point.device.memory_reserved_bytes,
    } | _time_and_speed(point)


def epoch_scalars(point: EpochPoint) -> Scalars:
    """Return the numbers of an epoch."""
    return {
        "epoch/train_loss": point.train_loss,
        "epoch/train_top1": point.train_top1,
        "epoch/val_loss": point.validation.loss,
        "epoch/val_top1": point.validation.top1,
        "epoch/val_top5": point.validation.top5,
        "epoch/val_lowest_recall": point.lowest_recall,
        f"epoch/val_{point.best_by}": point.score,
        "epoch/raw_loss": point.raw.loss if point.raw else None,
        "epoch/raw_top1": point.raw.top1 if point.raw else None,
    }


def run_scalars(point: RunPoint) -> Scalars:
    """Return the numbers of a whole run."""
    scalars = {"speed/images_per_second": point.images_per_second} | _time_and_speed(point)
    return {f"run/{tag}": value for tag, value in scalars.items()}


def _time_and_speed(point: StepPoint | RunPoint) -> Scalars:
    return {f"time/{name}": share for name, share in point.time_shares.items()} | {
        "speed/tflops_per_second": point.device.tflops_per_second,
        "speed/mfu": point.device.mfu,
        "speed/gpu_utilization": point.device.gpu_utilization,
    }
