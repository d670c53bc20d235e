"""Policies that Pillow applies to single images: RandAugment, TrivialAugment, AutoAugment, 3-Augment, colour jitter.

They draw from the global generators of Python, NumPy and torch: see `randomness.seed_generators`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from PIL import Image, ImageFilter, ImageOps
from torchvision.transforms import InterpolationMode, v2

from zerovision.models.weights_metadata import Preprocessing
from zerovision.training.data.augment import Transform
from zerovision.training.data.augmentations import Augmentation

BLUR_RADIUS = (0.1, 2.0)  # pixels, standard deviation
SOLARIZED_FROM = 128  # grey level


def _randaugment(augmentation: Augmentation, preprocessing: Preprocessing) -> Callable:
    """Return timm's RandAugment, with its defaults for pixels from beyond the edge."""
    from timm.data import auto_augment  # timm takes seconds to import

    fill = tuple(round(255 * value) for value in preprocessing.mean)
    hyperparameters = {"translate_const": int(0.45 * min(preprocessing.sides)), "img_mean": fill}
    policy = auto_augment.rand_augment_transform(augmentation.randaugment, hyperparameters)
    for operation in policy.ops:
        if operation.aug_fn is auto_augment.posterize:
            operation.aug_fn = _posterize
    return policy


def _posterize(image: Image.Image, bits: int, **_: Any) -> Image.Image:
    """Keep 1 to 8 bits of each pixel, or none: black, as before Pillow 13, which refuses what timm asks for then."""
    return ImageOps.posterize(image, bits) if bits else Image.new(image.mode, image.size)


def _trivialaugment(augmentation: Augmentation, preprocessing: Preprocessing) -> Callable:
    return v2.TrivialAugmentWide(interpolation=InterpolationMode(preprocessing.interpolation))


def _autoaugment(augmentation: Augmentation, preprocessing: Preprocessing) -> Callable:
    """Return the policy that was found for ImageNet, CIFAR-10 or SVHN."""
    found_for = v2.AutoAugmentPolicy(augmentation.policy.removeprefix("autoaugment_"))
    return v2.AutoAugment(found_for, interpolation=InterpolationMode(preprocessing.interpolation))


def _three_augment(augmentation: Augmentation, preprocessing: Preprocessing) -> Callable:
    """Return grey, solarized or blurred, one of them (Touvron et al., "DeiT III", arXiv:2204.07118)."""
    return v2.RandomChoice([v2.Grayscale(3), v2.RandomSolarize(SOLARIZED_FROM, p=1.0), v2.Lambda(_blur)])


def _blur(image: Image.Image) -> Image.Image:
    return image.filter(ImageFilter.GaussianBlur(float(torch.empty(1).uniform_(*BLUR_RADIUS))))


POLICIES: dict[str, Callable[[Augmentation, Preprocessing], Callable]] = {
    "randaugment": _randaugment,
    "trivialaugment": _trivialaugment,
    "autoaugment_imagenet": _autoaugment,
    "autoaugment_cifar10": _autoaugment,
    "autoaugment_svhn": _autoaugment,
    "3augment": _three_augment,
}


def build_policy(augmentation: Augmentation, preprocessing: Preprocessing) -> Transform | None:
    """Return the policy and colour jitter of an augmentation, from uint8 [3, S, S] to the same; None if it has none."""
    steps = [POLICIES[augmentation.policy](augmentation, preprocessing)] if augmentation.policy else []
    if augmentation.color_jitter:
        steps.append(v2.ColorJitter(*[augmentation.color_jitter] * 3))  # timm's meaning of one number: hue stays
    return v2.Compose([v2.ToPILImage(), *steps, v2.PILToTensor()]) if steps else None
