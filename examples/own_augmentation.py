"""An augmentation of your own: `--plugin examples/own_augmentation.py --augmentation turned` (or `thinned`).

An augmentation is a function of an image, uint8 [C, H, W], and a generator. That generator and the global ones of
Python, NumPy and PyTorch are seeded by (seed, epoch, index): the same images on any number of ranks and after a resume.
"""

from __future__ import annotations

import numpy as np
import torch
from torchvision.transforms import v2

from zerovision import AUGMENTATIONS, Augmentation

policy = v2.Compose([v2.RandomRotation(15), v2.RandomPosterize(4)])


def turned(image: torch.Tensor, generator: np.random.Generator) -> torch.Tensor:
    """Apply what torchvision has; it draws from PyTorch's generator."""
    return policy(image)


def thinned(image: torch.Tensor, generator: np.random.Generator) -> torch.Tensor:
    """Blacken every pixel with a probability of 10 %."""
    return image * torch.from_numpy(generator.random(image.shape[1:]) > 0.1)


# What comes before (crop, shift) and after it (mirror, erasing) are those of all augmentations.
AUGMENTATIONS["turned"] = Augmentation(crop=True, mirror="random", function=turned)
AUGMENTATIONS["thinned"] = Augmentation(mirror="random", function=thinned)
