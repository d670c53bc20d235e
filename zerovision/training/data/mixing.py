"""Mixup and cutmix of whole batches on the device: the images of a micro-batch and their targets are blended in pairs.

There is one choice per micro-batch, with the distribution of timm's `Mixup` in mode "batch". It is a function of (seed,
epoch, leaf), so it is the same on any number of ranks and after a resume; for leaves see `base.leaves`.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch

from zerovision.training.data import DataOptions
from zerovision.training.data.transfer import to_device


class Mix(NamedTuple):
    """How to mix the images of a micro-batch.

    Attributes:
        share: Share of the image itself, 0 to 1; the rest is its partner's.
        box: Top, bottom, left and right of the rectangle that cutmix copies from the partner; None for mixup.
    """

    share: float
    box: tuple[int, int, int, int] | None


class Mixing:
    """Mixes the batches of a training set.

    Mixup: Zhang et al., arXiv:1710.09412; cutmix: Yun et al., arXiv:1905.04899.

    Args:
        options: Parameters of the two beta distributions, probabilities, and epochs.
        num_classes: Classes C.
    """

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
        """Mix a micro-batch; the images may be changed in place.

        The partner of the first sample is the last one, that of the second the last but one, and so on. Samples with
        weight 0 (padding, unreadable images) have no partner and are not mixed into others.

        Args:
            images: float32 [B, channels, S, S], normalized, channels_last.
            labels: int64 [B], on the same device.
            weights: float32 [B].
            epoch: Decides, with the leaf, how to mix.
            leaf: Index of the micro-batch in its epoch, over all ranks.
            targets: float32 [B, C]; None to use the labels.

        Returns:
            The images and their targets, float32 [B, C]; unchanged if nothing is mixed.
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
        pixels = images.permute(0, 2, 3, 1)  # in the order of the memory, which `index_select` does not keep
        if mix.box is None:
            return torch.lerp(pixels.index_select(0, partner), pixels, mix.share).permute(0, 3, 1, 2), targets
        top, bottom, left, right = mix.box
        part = pixels[:, top:bottom, left:right]
        part.copy_(part.index_select(0, partner))
        return images, targets

    def drawn(self, epoch: int, leaf: int, shape: tuple[int, int]) -> Mix | None:
        """Return how to mix a micro-batch of images with this height and width, or None."""
        options = self._options
        if options.mixup_off_epochs and epoch >= options.epochs - options.mixup_off_epochs:
            return None
        # NumPy keeps the numbers of RandomState the same in all versions; those of its newer generators may change.
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
        # the images' shape with the rest of the area, around any pixel; the targets count what of it is inside
        ends = []
        for size in shape:
            side, centre = int(size * np.sqrt(1 - share)), int(draws.randint(size))
            ends += [max(centre - side // 2, 0), min(centre + (side + 1) // 2, size)]
        top, bottom, left, right = ends
        part = (bottom - top) * (right - left) / math.prod(shape)
        return Mix(1 - part, (top, bottom, left, right))
