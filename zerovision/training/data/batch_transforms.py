"""Transforms batches on the device: shifts, mirrors and normalizes images, erases rectangles, and mixes images.

8-bit images are transferred as bytes, which are a quarter of the size of float32. Random numbers are drawn on the CPU
as a function of (seed, epoch, index), and images are shifted by whole pixels, so a GPU produces the same result as a
CPU.
The result has the channels_last memory format, in which convolutions are fastest.

Mixup and cutmix make one random choice per micro-batch, with the distribution of timm's `Mixup` in mode "batch". The
choice is a function of (seed, epoch, leaf), so it is the same on any number of ranks and after a resume (see
`base.leaves`). Erasing follows timm's `RandomErasing`.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import pad

from zerovision.models import ImageSize, sides
from zerovision.models.weights_metadata import Preprocessing
from zerovision.training.data import DataOptions
from zerovision.training.data.augmentations import Augmentation
from zerovision.training.data.randomness import FIRST_ERASING_DRAW, uniform_draws
from zerovision.training.data.reading.image_numbers import BYTES

# Zhong et al., "Random Erasing Data Augmentation", arXiv:1708.04896; values as in timm
AREA = (0.02, 1 / 3)  # of the image
RATIO = (0.3, 1 / 0.3)  # height / width
TRIES = 10
ERASING_DRAWS = 4 + 2 * TRIES  # whether to erase, top, left, place in the noise, areas, shapes
NOISE_LENGTH = 2**20


class RandomErasing:
    """Erases a rectangle in some images of a batch.

    The mode says what fills the rectangle: "const" for zeros (the mean color), "rand" for normal noise with one number
    per channel, or "pixel" for normal noise with one number per pixel and channel.
    """

    def __init__(self, probability: float, mode: str, size: ImageSize, seed: int, channels: int = 3) -> None:
        self._probability, self._size, self._seed = probability, size, seed
        self._noise_shape = {"const": None, "rand": (1, 1, channels), "pixel": (*sides(size), channels)}[mode]

    def __call__(self, images: torch.Tensor, epoch: int, draw_keys: np.ndarray) -> torch.Tensor:
        """Erase rectangles in place in images, float32 [B, C, S, S], normalized and channels_last.

        For `draw_keys`, see `BatchKey`.
        """
        draws = uniform_draws(self._seed, epoch, draw_keys, ERASING_DRAWS, first=FIRST_ERASING_DRAW)
        boxes = erased_boxes(self._size, self._probability, draws)
        if boxes.shape[1] == 0:
            return images
        slots, top, left, height, width, start = to_device(torch.from_numpy(boxes), images.device).unsqueeze(2)
        down, along = (torch.arange(side, device=images.device) for side in sides(self._size))
        rows, columns = (down >= top) & (down < top + height), (along >= left) & (along < left + width)
        inside = rows[:, :, None, None] & columns[:, None, :, None]
        slots, pixels = slots.squeeze(1), images.permute(0, 2, 3, 1)  # in memory order
        pixels.index_copy_(0, slots, torch.where(inside, self._fill(start), pixels.index_select(0, slots)))
        return images

    def _fill(self, start: torch.Tensor) -> torch.Tensor:
        """Return zero, float32 [], or the noise at offset `start` (int64 [K, 1]), float32 [K, 1 or H, 1 or W, C]."""
        if self._noise_shape is None:
            return torch.zeros((), device=start.device)
        places = start + torch.arange(math.prod(self._noise_shape), device=start.device)
        return _noise(self._seed, start.device)[places % NOISE_LENGTH].view(-1, *self._noise_shape)


@lru_cache(maxsize=2)
def _noise(seed: int, device: torch.device) -> torch.Tensor:
    """Return fixed normal noise, float32 [NOISE_LENGTH]; drawing it for every pixel would take longer than a step."""
    noise = np.random.RandomState(seed).standard_normal(NOISE_LENGTH)  # the same numbers in all versions of NumPy
    return to_device(torch.from_numpy(noise.astype(np.float32)), device)


def erased_boxes(size: ImageSize, probability: float, draws: np.ndarray) -> np.ndarray:
    """Choose the rectangles to erase; an area and a log-uniform aspect ratio are drawn up to 10 times until they fit.

    The draws, float64 [B, ERASING_DRAWS], are uniform in [0, 1). The result is int64 [6, K] for K <= B rectangles:
    slot in the batch, top, left, height, width, and offset in the noise.
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


SHIFT_FRACTION = 0.1
BATCH_DRAWS = 3  # mirrored or not, rows and columns to shift by


class BatchTransforms:
    """The last steps of an augmentation, for a batch of images of one size: uint8, or float32 from `to_values`."""

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

    def __call__(self, images: torch.Tensor, epoch: int, draw_keys: np.ndarray) -> torch.Tensor:
        """Return float32 [B, C, S, S], normalized and channels_last, for uint8 or float32 [B, 1 or C, S, S].

        The images may be on any device. See `BatchKey` for `draw_keys`, int64 [B].
        """
        images = images.permute(0, 2, 3, 1)
        if self.augmentation.shift:
            return self.from_set(self.with_border(images), np.arange(len(draw_keys)), epoch, draw_keys)
        if self.augmentation.mirror != "off":
            mirrored = self._is_mirrored(self._draws(epoch, draw_keys), epoch, draw_keys)
            chosen = torch.from_numpy(np.arange(len(draw_keys)) + len(draw_keys) * mirrored)
            # selecting from both orientations is four times as fast as `torch.where` on bytes
            images = torch.cat([images, images.flip(2)]).index_select(0, to_device(chosen, images.device))
        return self._finish(images, epoch, draw_keys)

    def with_border(self, images: torch.Tensor) -> torch.Tensor:
        """Pad images [N, S, S, 1 or C] with zeros or a reflection, wide enough for the largest shift."""
        if self.augmentation.shift_padding == "zeros":
            return pad(images, [0, 0] + [self.border] * 4)
        for dimension, side in enumerate(self.sides, 1):  # `pad` cannot reflect bytes
            reflected = torch.from_numpy(np.pad(np.arange(side), self.border, mode="reflect"))
            images = images.index_select(dimension, to_device(reflected, images.device))
        return images

    def from_set(self, padded: torch.Tensor, positions: np.ndarray, epoch: int, draw_keys: np.ndarray) -> torch.Tensor:
        """Transform the images at `positions`, int64 [B], of a set padded by `with_border`; see `__call__`.

        The padded set is uint8 or float32 [N, S + 2 * border, S + 2 * border, 1 or C].
        """
        if not self.augmentation.shift and self.augmentation.mirror == "off":
            places = to_device(torch.from_numpy(positions), padded.device)
            return self._finish(padded.index_select(0, places), epoch, draw_keys)
        draws = self._draws(epoch, draw_keys)
        tops, lefts = (draws[:, 1:] * (2 * self.border + 1)).astype(np.int64).T
        # only a few numbers are copied; the device computes the position of every pixel from them
        chosen = np.stack([positions, tops, lefts, self._is_mirrored(draws, epoch, draw_keys)])
        images, top, left, mirrored = to_device(torch.from_numpy(chosen), padded.device).unsqueeze(2)
        down, along = (torch.arange(side, device=padded.device) for side in self.sides)
        rows = images * padded.shape[1] + top + down
        columns = left + torch.where(mirrored > 0, len(along) - 1 - along, along)
        pixels = (rows[:, :, None] * padded.shape[2] + columns[:, None, :]).view(-1)
        flat = padded.view(-1, padded.shape[3])
        return self._finish(flat.index_select(0, pixels).view(len(positions), *self.sides, -1), epoch, draw_keys)

    def _draws(self, epoch: int, draw_keys: np.ndarray) -> np.ndarray:
        return uniform_draws(self.seed, epoch, draw_keys, BATCH_DRAWS)

    def _is_mirrored(self, draws: np.ndarray, epoch: int, draw_keys: np.ndarray) -> np.ndarray:
        """Return which images to mirror, bool [B], given the epoch's draws.

        With "alternate", only the orientation in the first epoch is random; it then changes in every epoch (Jordan,
        "94% on CIFAR-10 in 3.29 Seconds on a Single GPU", arXiv:2404.00498).
        """
        if self.augmentation.mirror == "alternate":
            return (self._draws(0, draw_keys)[:, 0] < 0.5) ^ (epoch % 2 == 1)
        return (draws[:, 0] < 0.5) & (self.augmentation.mirror == "random")

    def _finish(self, images: torch.Tensor, epoch: int, draw_keys: np.ndarray) -> torch.Tensor:
        """Normalize images and erase rectangles: uint8 or float32 [B, S, S, 1 or C] to float32 [B, C, S, S]."""
        if images.device not in self._factors_on:
            self._factors_on[images.device] = [to_device(factors, images.device) for factors in self._factors]
        scale, offset = self._factors_on[images.device]
        (height, width), channels = self.sides, self.channels
        rows = images.expand(-1, -1, -1, channels).reshape(-1, height, channels * width).float()
        images = torch.addcmul(offset, rows, scale).view(-1, height, width, channels).permute(0, 3, 1, 2)
        return self._erase(images, epoch, draw_keys) if self.augmentation.erasing else images

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_factors_on": {}}  # tensors on a GPU are not sent to worker processes


class Mix(NamedTuple):
    """How to mix the images of a micro-batch."""

    share: float  # of the image itself, from 0 to 1; the rest comes from the image's partner
    box: tuple[int, int, int, int] | None  # top, bottom, left and right of what cutmix copies; None for mixup


class Mixing:
    """Mixes batches for training by mixup (Zhang et al., arXiv:1710.09412) or cutmix (Yun et al., arXiv:1905.04899)."""

    def __init__(self, options: DataOptions, num_classes: int) -> None:
        self._options, self._num_classes = options, num_classes

    def __call__(
        self,
        images: torch.Tensor,
        labels: torch.Tensor,
        weights: np.ndarray,
        epoch: int,
        leaf: int,
        targets: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return a mixed micro-batch and its targets, float32 [B, C]; both are unchanged if nothing is mixed.

        Samples are paired from both ends: the first with the last, the second with the second to last, and so on.
        Samples with weight 0 (padding, unreadable images) have no partner and are not mixed into other samples.

        The images, float32 [B, channels, S, S], normalized and channels_last, may be changed in place. By default,
        the labels, int64 [B], are the targets. Weights are float32 [B], and `leaf` is the micro-batch's index in its
        epoch, over all ranks.
        """
        height, width = images.shape[2:]
        mix = self.drawn(epoch, leaf, (height, width))
        if mix is None:
            return images, targets
        real, partners = np.flatnonzero(weights), np.arange(len(weights))
        partners[real] = real[::-1]
        partner = to_device(torch.from_numpy(partners), images.device)
        if targets is None:
            targets = torch.zeros(len(labels), self._num_classes, device=images.device)
            targets.scatter_(1, labels[:, None], 1)
        targets = torch.lerp(targets.index_select(0, partner), targets, mix.share)
        pixels = images.permute(0, 2, 3, 1)  # in memory order, because `index_select` does not preserve channels_last
        if mix.box is None:
            return torch.lerp(pixels.index_select(0, partner), pixels, mix.share).permute(0, 3, 1, 2), targets
        top, bottom, left, right = mix.box
        part = pixels[:, top:bottom, left:right]
        part.copy_(part.index_select(0, partner))
        return images, targets

    def drawn(self, epoch: int, leaf: int, shape: tuple[int, int]) -> Mix | None:
        """Return how to mix a micro-batch of images with this height and width; None for no mixing."""
        options = self._options
        if options.mixup_off_epochs and epoch >= options.epochs - options.mixup_off_epochs:
            return None
        # NumPy guarantees RandomState's numbers in all versions; those of its newer generators may change.
        draws = np.random.RandomState(np.random.MT19937(np.random.SeedSequence((options.seed, epoch, leaf))))
        if draws.rand() >= options.mixup_probability:
            return None
        cuts = options.cutmix > 0
        if cuts and options.mixup > 0:
            cuts = draws.rand() < options.mixup_switch_probability
        alpha = options.cutmix if cuts else options.mixup
        share = float(draws.beta(alpha, alpha))
        if not cuts:
            return Mix(share, None)
        # The box has the images' aspect ratio and the partner's share of the area. Its center is a random pixel, and
        # only the part inside the image counts for the targets.
        ends = []
        for size in shape:
            side, centre = int(size * np.sqrt(1 - share)), int(draws.randint(size))
            ends += [max(centre - side // 2, 0), min(centre + (side + 1) // 2, size)]
        top, bottom, left, right = ends
        return Mix(1 - (bottom - top) * (right - left) / math.prod(shape), (top, bottom, left, right))


def to_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a tensor to a device; copying from the host to a GPU does not wait for the GPU's pending work.

    A copy is asynchronous only from page-locked memory. PyTorch reuses page-locked memory only after all copies from it
    are done, so the source may be released immediately.
    """
    if device.type == "cuda" and tensor.device.type == "cpu" and not tensor.is_pinned():
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
