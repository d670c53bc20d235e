"""Test-time augmentation: the mean probabilities of several views of each image."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from zerovision.delivery.calibration import Calibration, Views
from zerovision.models import sides
from zerovision.training.base.errors import UserError
from zerovision.training.tasks.labels import OneLabel, task_of


def checked_views(flip: bool, shift_pixels: int, metadata: dict[str, Any]) -> Views:
    """Return the views of an image, or raise a UserError if the model's image size or task does not support them."""
    size = metadata["preprocessing"].image_size
    farthest = min(sides(size)) - 1
    if flip or shift_pixels:
        task_of(metadata).check_use("--flip and --shift-pixels are", "the thresholds apply to plain images")
    if not 0 <= shift_pixels <= farthest:
        raise UserError(f"--shift-pixels {shift_pixels}: images of {size} pixels can be shifted by 0 to {farthest}.")
    return Views(flip, shift_pixels)


def probabilities_of(
    network: nn.Module, images: torch.Tensor, views: Views, calibration: Calibration | None, task: OneLabel
) -> torch.Tensor:
    """Return probabilities averaged over the views, float32 [B, classes]; `network` must be in evaluation mode."""
    weighted = [(weight, network(view)) for weight, view in views_of(images, views)]
    return task.mean_probabilities(weighted, None if calibration is None else calibration.temperature)


def views_of(images: torch.Tensor, views: Views) -> Iterable[tuple[float, torch.Tensor]]:
    """Return the weight and the images of each view, starting with the unchanged images."""
    weighted, far, (height, width) = [(1.0, images)], views.shift_pixels, images.shape[2:]
    if far:
        padded = nn.functional.pad(images, (far,) * 4, mode="reflect")
        corners = (padded[..., start : start + height, start : start + width] for start in (0, 2 * far))
        weighted = [(1 / 2, images), *((1 / 4, corner) for corner in corners)]
    if views.flip:
        return ((weight / 2, both) for weight, view in weighted for both in (view, view.flip(3)))
    return weighted
