"""Test-time augmentation: the mean probabilities of several views of each image."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from zerovision.delivery.calibration import Calibration, Views
from zerovision.models.sides import sides
from zerovision.training.base.errors import UserError
from zerovision.training.tasks.multilabel import thresholds_of


def checked_views(flip: bool, shift_pixels: int, metadata: dict[str, Any]) -> Views:
    """Return the views of the images of a model with this metadata.

    Raises:
        UserError: if an image cannot be shifted that far.
    """
    size = metadata["preprocessing"].image_size
    farthest = min(sides(size)) - 1
    if (flip or shift_pixels) and thresholds_of(metadata) is not None:
        raise UserError("--flip and --shift-pixels are for one label: the thresholds are of plain images.")
    if not 0 <= shift_pixels <= farthest:
        raise UserError(f"--shift-pixels {shift_pixels}: images of {size} pixels can be shifted by 0 to {farthest}.")
    return Views(flip, shift_pixels)


def mean_log_probabilities(
    network: nn.Module, images: torch.Tensor, logits: torch.Tensor, views: Views
) -> torch.Tensor:
    """Return the logarithm of the weighted mean of all views' probabilities, float32 [B, classes].

    Args:
        network: float32 [B, C, S, S] to logits [B, classes], in evaluation mode.
        images: float32 [B, C, H, W], both above `views.shift_pixels`.
        logits: what the network made of the images.
        views: the views.
    """
    weighted = []
    for weight, view in _views(images, views):
        of_view = logits if view is images else network(view)
        weighted.append(of_view.float().log_softmax(1) + math.log(weight))
    return torch.stack(weighted).logsumexp(0)


def probabilities_of(
    network: nn.Module, images: torch.Tensor, views: Views, calibration: Calibration | None, *, is_multilabel: bool
) -> torch.Tensor:
    """Return what `predict` says of images, float32 [B, classes]; arguments as of `mean_log_probabilities`."""
    logits = network(images)
    if is_multilabel:
        return logits.float().sigmoid()
    logarithms = mean_log_probabilities(network, images, logits, views)
    if calibration is not None:
        logarithms = (logarithms / calibration.temperature).log_softmax(1)
    return logarithms.exp()


def _views(images: torch.Tensor, views: Views) -> Iterable[tuple[float, torch.Tensor]]:
    """Return the weight and the images of each view; the first are the images themselves."""
    weighted, far, (height, width) = [(1.0, images)], views.shift_pixels, images.shape[2:]
    if far:
        padded = nn.functional.pad(images, (far,) * 4, mode="reflect")
        corners = (padded[..., start : start + height, start : start + width] for start in (0, 2 * far))
        weighted = [(1 / 2, images), *((1 / 4, corner) for corner in corners)]
    if views.flip:
        return ((weight / 2, both) for weight, view in weighted for both in (view, view.flip(3)))
    return weighted
