"""Transforms batches of images into model input on the device: shifts, mirrors, normalizes, erases.

Bytes are transferred as bytes, a quarter of the size of float32. Random numbers are drawn on the CPU as a function of
(seed, epoch, index), and pixels move by whole numbers, so a GPU gives the same result as a CPU. The result is in
channels_last order, in which convolutions are fastest.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.nn.functional import pad

from zerovision.models.weights_metadata import Preprocessing
from zerovision.training.data.augmentations import Augmentation
from zerovision.training.data.erasing import RandomErasing
from zerovision.training.data.randomness import uniform_draws
from zerovision.training.data.transfer import to_device
from zerovision.training.data.values import BYTES

SHIFT_FRACTION = 0.1
BATCH_DRAWS = 3  # mirrored or not, rows and columns to shift by


class BatchTransforms:
    """The last part of an augmentation, on a batch of images of one size: uint8, or float32 from `to_values`.

    Args:
        preprocessing: See `DatasetPair.preprocessing`.
        augmentation: The augmentation, whose shift, mirror and erasing are applied here.
        seed: Seed of the augmentation.
    """

    def __init__(self, preprocessing: Preprocessing, augmentation: Augmentation, seed: int) -> None:
        self.augmentation, self.seed, self.sides = augmentation, seed, preprocessing.sides
        farthest, size = augmentation.shift_pixels, preprocessing.image_size
        farthest = int(SHIFT_FRACTION * min(self.sides)) if farthest is None else farthest
        self.border, self.channels = farthest if augmentation.shift else 0, preprocessing.channels
        self._erase = RandomErasing(augmentation.erasing, augmentation.erasing_mode, size, seed, self.channels)
        mean, std = (np.array(each, dtype=np.float64) for each in (preprocessing.mean, preprocessing.std))
        # (x / largest - mean) / std is x * scale + offset; repeated for each pixel of a row, because the arithmetic on
        # a CPU is four times as fast along whole rows as along the channels
        largest = 255 if preprocessing.values == BYTES else 1
        factors = (1 / (largest * std), -mean / std)
        self._factors = [torch.from_numpy(np.tile(values, self.sides[1])).float() for values in factors]
        self._factors_on: dict[torch.device, list[torch.Tensor]] = {}

    def __call__(self, images: torch.Tensor, epoch: int, indices: np.ndarray) -> torch.Tensor:
        """Transform a batch.

        Args:
            images: uint8 or float32 [B, 1 or C, S, S] on any device.
            epoch: Decides the augmentation.
            indices: int64 [B], the `draw_keys` of a `BatchKey`.

        Returns:
            float32 [B, C, S, S], channels_last, normalized.
        """
        images = images.permute(0, 2, 3, 1)
        if self.augmentation.shift:
            return self.from_set(self.with_border(images), np.arange(len(indices)), epoch, indices)
        if self.augmentation.mirror != "off":
            mirrored = self._is_mirrored(self._draws(epoch, indices), epoch, indices)
            chosen = torch.from_numpy(np.arange(len(indices)) + len(indices) * mirrored)
            # choosing from both is four times as fast as `torch.where` on bytes
            images = torch.cat([images, images.flip(2)]).index_select(0, to_device(chosen, images.device))
        return self._finish(images, epoch, indices)

    def with_border(self, images: torch.Tensor) -> torch.Tensor:
        """Pad images [N, S, S, 1 or C], wide enough for the farthest shift, with zeros or their mirror image."""
        if self.augmentation.shift_padding == "zeros":
            return pad(images, [0, 0] + [self.border] * 4)
        for dimension, side in enumerate(self.sides, 1):  # `pad` reflects no bytes
            reflected = torch.from_numpy(np.pad(np.arange(side), self.border, mode="reflect"))
            images = images.index_select(dimension, to_device(reflected, images.device))
        return images

    def from_set(self, bordered: torch.Tensor, positions: np.ndarray, epoch: int, indices: np.ndarray) -> torch.Tensor:
        """Take images from a set padded by `with_border`, and transform them.

        Args:
            bordered: uint8 or float32 [N, S + 2 * border, S + 2 * border, 1 or C].
            positions: int64 [B], positions of the images in `bordered`.
            epoch: Decides the augmentation.
            indices: int64 [B], the `draw_keys` of a `BatchKey`.
        """
        if not self.augmentation.shift and self.augmentation.mirror == "off":
            places = to_device(torch.from_numpy(positions), bordered.device)
            return self._finish(bordered.index_select(0, places), epoch, indices)
        draws = self._draws(epoch, indices)
        tops, lefts = (draws[:, 1:] * (2 * self.border + 1)).astype(np.int64).T
        # few numbers are copied; the position of every pixel follows from them on the device
        chosen = np.stack([positions, tops, lefts, self._is_mirrored(draws, epoch, indices)])
        images, top, left, mirrored = to_device(torch.from_numpy(chosen), bordered.device).unsqueeze(2)
        down, along = (torch.arange(side, device=bordered.device) for side in self.sides)
        rows = images * bordered.shape[1] + top + down
        columns = left + torch.where(mirrored > 0, len(along) - 1 - along, along)
        pixels = (rows[:, :, None] * bordered.shape[2] + columns[:, None, :]).view(-1)
        flat = bordered.view(-1, bordered.shape[3])
        taken = flat.index_select(0, pixels).view(len(positions), *self.sides, -1)
        return self._finish(taken, epoch, indices)

    def _draws(self, epoch: int, indices: np.ndarray) -> np.ndarray:
        return uniform_draws(self.seed, epoch, indices, BATCH_DRAWS)

    def _is_mirrored(self, draws: np.ndarray, epoch: int, indices: np.ndarray) -> np.ndarray:
        """Return bool [B]; `draws` are the epoch's draws.

        "alternate" draws only the first epoch's side (Jordan, "94% on CIFAR-10 in 3.29 Seconds on a Single GPU",
        arXiv:2404.00498).
        """
        if self.augmentation.mirror == "alternate":
            return (self._draws(0, indices)[:, 0] < 0.5) ^ (epoch % 2 == 1)
        return (draws[:, 0] < 0.5) & (self.augmentation.mirror == "random")

    def _finish(self, images: torch.Tensor, epoch: int, indices: np.ndarray) -> torch.Tensor:
        """Normalize and erase: from uint8 or float32 [B, S, S, 1 or C] to float32 [B, C, S, S]."""
        images = self._normalise(images)
        return self._erase(images, epoch, indices) if self.augmentation.erasing else images

    def _normalise(self, images: torch.Tensor) -> torch.Tensor:
        """Convert uint8 or float32 [B, S, S, 1 or C] to float32 [B, C, S, S]."""
        if images.device not in self._factors_on:
            self._factors_on[images.device] = [to_device(factors, images.device) for factors in self._factors]
        scale, offset = self._factors_on[images.device]
        (height, width), channels = self.sides, self.channels
        rows = images.expand(-1, -1, -1, channels).reshape(-1, height, channels * width).float()
        return torch.addcmul(offset, rows, scale).view(-1, height, width, channels).permute(0, 3, 1, 2)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_factors_on": {}}  # tensors on a GPU are not sent to worker processes
