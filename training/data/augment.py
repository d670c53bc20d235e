"""What happens to an image before it is stacked into a batch: cut, resized, or left to timm's RandAugment.

Training and evaluation give uint8 [3, S, S]; moving, mirroring and normalising follow on the device, a batch at a time
(`training.data.device`). `evaluation_transform` is the whole of it for one image, for whoever uses a trained model.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torchvision.transforms import InterpolationMode, v2

Transform = Callable[[torch.Tensor], torch.Tensor]

SHIFT_FRACTION = 0.1
RANDAUGMENT = "rand-m9-mstd0.5"


@dataclass(frozen=True)
class Steps:
    """What an augmentation is made of.

    Attributes:
        crop: Whether a random part is resized, in place of the whole image.
        randaugment: Whether timm's RandAugment follows.
        shift: Whether the image is moved by up to `SHIFT_FRACTION` of its size.
        mirror: Whether it is mirrored left to right half of the time.
    """

    crop: bool = False
    randaugment: bool = False
    shift: bool = False
    mirror: bool = False

    @property
    def in_batches(self) -> bool:
        """Whether all of it can be done on whole batches of images of one size."""
        return not (self.crop or self.randaugment)


STEPS: dict[str, Steps] = {
    "none": Steps(),
    "shift": Steps(shift=True),
    "shift_flip": Steps(shift=True, mirror=True),
    "crop_flip": Steps(crop=True, mirror=True),
    "randaugment": Steps(crop=True, randaugment=True, mirror=True),
}


def evaluation_transform(preprocessing: dict[str, Any]) -> Transform:
    """Build the transform that `DatasetPair.preprocessing` describes.

    Args:
        preprocessing: `image_size` S in pixels; `resize_size`: the shorter side is resized to it and the centre is cut
            out, or None: the image is resized to S x S at once; `mean` and `std` per channel of values in 0..1;
            `interpolation`, a name of torchvision's `InterpolationMode`.

    Returns:
        A function from uint8 [3, H, W] to float32 [3, S, S].
    """
    normalise = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(preprocessing["mean"], preprocessing["std"])]
    return v2.Compose([evaluation_geometry(preprocessing), *normalise])


def evaluation_geometry(preprocessing: dict[str, Any]) -> Transform:
    """Build the part of `evaluation_transform` before normalisation: from uint8 [C, H, W] to uint8 [C, S, S]."""
    size, resize_size = preprocessing["image_size"], preprocessing["resize_size"]
    filter_mode = InterpolationMode(preprocessing["interpolation"])
    if resize_size is None:
        return v2.Resize([size, size], interpolation=filter_mode, antialias=True)
    return v2.Compose([v2.Resize(resize_size, interpolation=filter_mode, antialias=True), v2.CenterCrop(size)])


def resize(image: torch.Tensor, preprocessing: dict[str, Any]) -> torch.Tensor:
    """Resize uint8 [3, h, w] to [3, S, S] with antialiasing; fastest where the channels lie innermost in memory."""
    size = preprocessing["image_size"]
    mode = preprocessing["interpolation"]
    # the new dimension is put before the height, else torch does not see that the channels lie innermost
    batch = image.permute(1, 2, 0)[None].permute(0, 3, 1, 2)
    return torch.nn.functional.interpolate(batch, (size, size), mode=mode, antialias=True)[0]


def randaugment(preprocessing: dict[str, Any]) -> Transform:
    """Build timm's RandAugment, from uint8 [3, S, S] to the same; draws from the generators of Python and NumPy."""
    from timm.data.auto_augment import rand_augment_transform  # timm takes seconds to import

    size, mean = preprocessing["image_size"], preprocessing["mean"]
    fill = tuple(round(255 * value) for value in mean)
    policy = rand_augment_transform(RANDAUGMENT, {"translate_const": int(0.45 * size), "img_mean": fill})
    return v2.Compose([v2.ToPILImage(), policy, v2.PILToTensor()])
