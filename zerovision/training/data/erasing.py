"""Random erasing of whole batches on the device, drawn from (seed, epoch, index), as in timm's `RandomErasing`."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from zerovision.models.sides import ImageSize, sides
from zerovision.training.data.randomness import FIRST_ERASING_DRAW, uniform_draws
from zerovision.training.data.transfer import to_device

# Zhong et al., "Random Erasing Data Augmentation", arXiv:1708.04896; the values of timm
AREA = (0.02, 1 / 3)  # of the image
RATIO = (0.3, 1 / 0.3)  # height / width
TRIES = 10
ERASING_DRAWS = 4 + 2 * TRIES  # whether, top, left, place in the noise, areas, shapes
NOISE_LENGTH = 2**20


class RandomErasing:
    """Erases a rectangle in some images of a batch.

    Args:
        probability: Probability that an image is erased.
        mode: "const" for zeros, which is the mean; "rand" for one normal number per channel; "pixel" for one per pixel.
        size: Size of the images in pixels.
        seed: The run's seed.
        channels: C of the images.
    """

    def __init__(self, probability: float, mode: str, size: ImageSize, seed: int, channels: int = 3) -> None:
        self._probability, self._size, self._seed = probability, size, seed
        self._noise_shape = {"const": None, "rand": (1, 1, channels), "pixel": (*sides(size), channels)}[mode]
        self._noise_on: dict[torch.device, torch.Tensor] = {}

    def __call__(self, images: torch.Tensor, epoch: int, indices: np.ndarray) -> torch.Tensor:
        """Erase in place.

        Args:
            images: float32 [B, C, S, S], normalized, channels_last.
            epoch: Decides, with the indices, what is erased.
            indices: int64 [B], positions in the data set.
        """
        draws = uniform_draws(self._seed, epoch, indices, ERASING_DRAWS, first=FIRST_ERASING_DRAW)
        boxes = erased_boxes(self._size, self._probability, draws)
        if boxes.shape[1] == 0:
            return images
        slots, top, left, height, width, start = to_device(torch.from_numpy(boxes), images.device).unsqueeze(2)
        down, along = (torch.arange(side, device=images.device) for side in sides(self._size))
        rows, columns = (down >= top) & (down < top + height), (along >= left) & (along < left + width)
        inside = rows[:, :, None, None] & columns[:, None, :, None]
        slots, pixels = slots.squeeze(1), images.permute(0, 2, 3, 1)  # in the order of the memory
        pixels.index_copy_(0, slots, torch.where(inside, self._fill(start), pixels.index_select(0, slots)))
        return images

    def _fill(self, start: torch.Tensor) -> torch.Tensor:
        """Return the fill: float32 [], or [K, 1 or H, 1 or W, C]: the noise from `start` (int64 [K, 1])."""
        if self._noise_shape is None:
            return torch.zeros((), device=start.device)
        places = start + torch.arange(math.prod(self._noise_shape), device=start.device)
        return self._noise(start.device)[places % NOISE_LENGTH].view(-1, *self._noise_shape)

    def _noise(self, device: torch.device) -> torch.Tensor:
        """Return normal numbers, float32 [NOISE_LENGTH]; new numbers for every pixel would take longer than a step.

        NumPy keeps the numbers of `RandomState` the same in all versions.
        """
        if device not in self._noise_on:
            noise = np.random.RandomState(self._seed).standard_normal(NOISE_LENGTH)
            self._noise_on[device] = to_device(torch.from_numpy(noise.astype(np.float32)), device)
        return self._noise_on[device]

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_noise_on": {}}  # tensors on a GPU are not sent to worker processes


def erased_boxes(size: ImageSize, probability: float, draws: np.ndarray) -> np.ndarray:
    """Choose the rectangles to erase: area and shape (log-uniform) are drawn until they fit, at most 10 times.

    Args:
        size: Size of the images in pixels.
        probability: Probability of a rectangle.
        draws: float64 [B, ERASING_DRAWS], uniform in [0, 1).

    Returns:
        int64 [6, K]: slot in the batch, top, left, height, width, and place in the noise of K <= B rectangles.
    """
    rows, columns = sides(size)
    log_low, log_high = map(math.log, RATIO)
    area = rows * columns * (AREA[0] + (AREA[1] - AREA[0]) * draws[:, 4 : 4 + TRIES])
    ratio = np.exp(log_low + (log_high - log_low) * draws[:, 4 + TRIES :])
    heights, widths = np.rint(np.sqrt(area * ratio)), np.rint(np.sqrt(area / ratio))
    fits = (heights < rows) & (widths < columns)
    slots = np.flatnonzero(fits.any(1) & (draws[:, 0] < probability))
    attempt, (top, left, start) = fits[slots].argmax(1), draws[slots, 1:4].T
    height, width = heights[slots, attempt], widths[slots, attempt]
    tops, lefts = np.floor(top * (rows - height + 1)), np.floor(left * (columns - width + 1))
    return np.stack([slots, tops, lefts, height, width, np.floor(start * NOISE_LENGTH)]).astype(np.int64)
