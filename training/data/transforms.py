"""From a raw image to what the model sees; all randomness comes from the generators that `randomness` seeds.

Every transform takes a uint8 tensor [3, H, W] of any size and gives float32 [3, S, S], normalised.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torchvision.transforms import InterpolationMode, v2

Transform = Callable[[torch.Tensor], torch.Tensor]

SHIFT_FRACTION = 0.1
RANDAUGMENT = "rand-m9-mstd0.5"


def evaluation_transform(preprocessing: dict[str, Any]) -> Transform:
    """Build the transform that `DataBundle.preprocessing` describes.

    Args:
        preprocessing: `image_size` S in pixels; `resize_size`: the shorter side is resized to it and the centre is cut
            out, or None: the image is resized to S x S at once; `mean` and `std` per channel of values in 0..1;
            `interpolation`, a name of torchvision's `InterpolationMode`.

    Returns:
        A function from uint8 [3, H, W] to float32 [3, S, S].
    """
    return v2.Compose([*_evaluation_geometry(preprocessing), *_normalise(preprocessing)])


def training_transform(augmentation: str, preprocessing: dict[str, Any]) -> Transform:
    """Build the transform of the training images: a name from `AUGMENTATIONS` other than "auto"."""
    return v2.Compose([*_BUILDERS[augmentation](preprocessing), *_normalise(preprocessing)])


def _evaluation_geometry(preprocessing: dict[str, Any]) -> list[Transform]:
    size, resize_size = preprocessing["image_size"], preprocessing["resize_size"]
    filter_mode = InterpolationMode(preprocessing["interpolation"])
    if resize_size is None:
        return [v2.Resize([size, size], interpolation=filter_mode, antialias=True)]
    return [v2.Resize(resize_size, interpolation=filter_mode, antialias=True), v2.CenterCrop(size)]


def _normalise(preprocessing: dict[str, Any]) -> list[Transform]:
    return [v2.ToDtype(torch.float32, scale=True), v2.Normalize(preprocessing["mean"], preprocessing["std"])]


def _shift(preprocessing: dict[str, Any]) -> list[Transform]:
    size = preprocessing["image_size"]
    return [*_evaluation_geometry(preprocessing), v2.RandomCrop(size, padding=int(SHIFT_FRACTION * size))]


def _shift_flip(preprocessing: dict[str, Any]) -> list[Transform]:
    return [*_shift(preprocessing), v2.RandomHorizontalFlip()]


def _crop_flip(preprocessing: dict[str, Any]) -> list[Transform]:
    filter_mode = InterpolationMode(preprocessing["interpolation"])
    crop = v2.RandomResizedCrop(preprocessing["image_size"], interpolation=filter_mode, antialias=True)
    return [crop, v2.RandomHorizontalFlip()]


def _randaugment(preprocessing: dict[str, Any]) -> list[Transform]:
    from timm.data.auto_augment import rand_augment_transform  # timm takes seconds to import

    size, mean = preprocessing["image_size"], preprocessing["mean"]
    fill = tuple(round(255 * value) for value in mean)
    policy = rand_augment_transform(RANDAUGMENT, {"translate_const": int(0.45 * size), "img_mean": fill})
    return [*_crop_flip(preprocessing), v2.ToPILImage(), policy, v2.PILToTensor()]


_BUILDERS: dict[str, Callable[[dict[str, Any]], list[Transform]]] = {
    "none": _evaluation_geometry,
    "shift": _shift,
    "shift_flip": _shift_flip,
    "crop_flip": _crop_flip,
    "randaugment": _randaugment,
}
