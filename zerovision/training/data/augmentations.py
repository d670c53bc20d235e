"""Parses the flags for augmentation and progressive resizing; imports neither torch nor Pillow."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import TYPE_CHECKING

from zerovision.models import LARGEST_IMAGE_SIZE
from zerovision.training.base.errors import UserError, check_name, either, one_line, shown

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import torch

    from zerovision.training.data import DataOptions
    from zerovision.training.data.settings import DataFields


RANDAUGMENT = "rand-m9-mstd0.5"
CROP_SCALE, CROP_RATIO = "0.08,1", "3/4,4/3"  # as in torchvision's `RandomResizedCrop`

# timm's keys: magnitude, number of operations, probability, deviation of the magnitude, direction, set of operations
_RANDAUGMENT_PATTERN = re.compile(
    r"rand(-(m[0-9]{1,2}|n[1-9]|p(0\.[0-9]{1,6}|1)|mstd[0-9]{1,3}(\.[0-9]{1,6})?|inc[01]|t(weights|3aw|3a)))*"
)
_NUMBER = r"[0-9]{0,3}(?:\.[0-9]{1,6}|[0-9](?:/[1-9][0-9]{0,3})?)"
_RANGE_PATTERN = re.compile(f"({_NUMBER}),({_NUMBER})")
_LARGEST_RATIO = 100


@dataclass(frozen=True)
class Augmentation:
    """The steps applied to training images, in this order, but `function` after `policy`.

    The values are those of an entry of `AUGMENTATIONS`, possibly changed by flags.

    Attributes:
        crop: Whether to crop a random part of the image before resizing.
        crop_scale: Smallest and largest share of the area that a crop covers.
        crop_ratio: Smallest and largest width of a crop, as a multiple of its height.
        policy: A key of `augment.POLICIES`, or '' for none.
        randaugment: RandAugment string in timm's format, used by the policy "randaugment".
        color_jitter: Largest relative change of brightness, contrast and saturation; 0 for no change.
        shift: Whether to shift images.
        shift_pixels: Largest shift in pixels; None for 10 % of the image size (3 pixels at 32).
        shift_padding: What fills the edges: "zeros", or "reflect" for a reflection of the image.
        mirror: Horizontal mirroring: "off", "random" (half of the time) or "alternate" (every other epoch).
        erasing: Probability of erasing a rectangle.
        erasing_mode: What fills the rectangle; see `batch_transforms.RandomErasing`.
        function: A user's function, applied after `policy`, which takes uint8 [C, H, W] and a NumPy generator and
            returns an image of the same shape. This generator and the global ones of Python, NumPy and torch are seeded
            by (seed, epoch, index).
    """

    crop: bool = False
    crop_scale: tuple[float, float] = (0.08, 1.0)
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    policy: str = ""
    randaugment: str = RANDAUGMENT
    color_jitter: float = 0.0
    shift: bool = False
    shift_pixels: int | None = None
    shift_padding: str = "zeros"
    mirror: str = "off"
    erasing: float = 0.0
    erasing_mode: str = "pixel"
    function: Callable[[torch.Tensor, np.random.Generator], torch.Tensor] | None = None

    def __post_init__(self) -> None:
        if "<" in getattr(self.function, "__qualname__", ""):  # a lambda, or defined inside a function
            raise UserError("an augmentation's function is a `def` at the top of a file: workers find it by its name.")

    @property
    def uses_pillow(self) -> bool:
        """Whether Pillow transforms single images on the CPU."""
        return bool(self.policy or self.color_jitter)

    @property
    def draws_globally(self) -> bool:
        """Whether single images are transformed with random numbers from the global generators."""
        return self.uses_pillow or self.function is not None

    @property
    def is_none(self) -> bool:
        """Whether each image is the same in every epoch."""
        return self.in_batches and self.mirror == "off" and not (self.shift or self.erasing)

    @property
    def in_batches(self) -> bool:
        """Whether all steps can be applied to whole batches of images of one size."""
        return not (self.crop or self.draws_globally)


AUGMENTATIONS: dict[str, Augmentation] = {
    "none": Augmentation(),
    "shift": Augmentation(shift=True),
    "shift_flip": Augmentation(shift=True, mirror="random"),
    "crop_flip": Augmentation(crop=True, mirror="random"),
    "randaugment": Augmentation(crop=True, policy="randaugment", mirror="random"),
    "trivialaugment": Augmentation(crop=True, policy="trivialaugment", mirror="random"),
    "autoaugment": Augmentation(crop=True, policy="autoaugment_imagenet", mirror="random"),
    "autoaugment_cifar10": Augmentation(policy="autoaugment_cifar10", shift=True, mirror="random"),
    "autoaugment_svhn": Augmentation(policy="autoaugment_svhn", shift=True),
    "3augment": Augmentation(crop=True, policy="3augment", mirror="random"),
}


def augmentation_of(given: DataOptions | DataFields, default: str) -> Augmentation:
    """Return the selected entry of `AUGMENTATIONS`, changed as the other settings require.

    Args:
        given: The user's choices.
        default: The name that "auto" stands for.

    Raises:
        UserError: If a name or range is invalid, or a setting does not apply to the selected augmentation.
    """
    check_name("augmentation", given.augmentation, ("auto", *AUGMENTATIONS))  # auto selects the data set's default
    name = default if given.augmentation == "auto" else given.augmentation
    line = AUGMENTATIONS[name]
    if not _RANDAUGMENT_PATTERN.fullmatch(given.randaugment):
        raise UserError(
            f"--augmentation randaugment:{one_line(given.randaugment, 100)}: expected timm's format, such as "
            f"{RANDAUGMENT} or rand-m7-n2-mstd0.5-inc1, where m is the magnitude, mstd its standard deviation, n the "
            "number of operations, p their probability, t their set, and inc1 makes effects grow with m."
        )
    scale = _read_range("--crop-scale", given.crop_scale, 1)
    ratio = _read_range("--crop-scale RATIO", given.crop_ratio, _LARGEST_RATIO)
    if (given.crop_scale, given.crop_ratio) != (CROP_SCALE, CROP_RATIO) and not line.crop:
        cropping = either(name for name, line in AUGMENTATIONS.items() if line.crop)
        raise UserError(f"--crop-scale: the augmentation {name} does not crop: use {cropping}.")
    is_own_shift = given.shift_pixels == "auto"
    return replace(
        line,
        crop_scale=scale,
        crop_ratio=ratio,
        randaugment=given.randaugment,
        color_jitter=given.color_jitter,
        shift=line.shift if is_own_shift else given.shift_pixels != 0,
        shift_pixels=None if is_own_shift else int(given.shift_pixels),
        shift_padding=given.shift_padding,
        mirror=line.mirror if given.mirror == "auto" else given.mirror,
        erasing=given.random_erasing,
        erasing_mode=given.random_erasing_mode,
    )


def _read_range(flag: str, text: str, most: int) -> tuple[float, float]:
    """Parse "LOW,HIGH"; fractions are allowed, because 4/3 has no exact decimal form."""
    found = _RANGE_PATTERN.fullmatch(text)
    low, high = (Fraction(number) for number in found.groups()) if found else (Fraction(0), Fraction(0))
    if not 0 < low <= high <= most:
        raise UserError(
            f"{flag} {shown(text)}: expected LOW,HIGH, two numbers above 0 and at most {most}, such as 0.35,1 or 3/4,1."
        )
    return float(low), float(high)


MIN_IMAGE_SIZE = 8  # pixels
USAGE = "LOW:FIRST:LAST"
STEP, SMALL_STEP, SMALL_BELOW = 32, 4, 128  # pixels


@dataclass(frozen=True)
class SizeRamp:
    """Progressive resizing as in ffcv-imagenet's `get_resolution`."""

    low: int  # side of the images in pixels, up to and including epoch `first`
    first: int
    last: int  # the first epoch with images of full size, if it is later than `first`

    def size(self, epoch: int, full: int) -> int:
        """Return the side of an epoch's images in pixels, which grows linearly between epochs `first` and `last`.

        The side is rounded to the nearest multiple of 32, or of 4 if `full` is below 128 pixels.
        """
        if epoch <= self.first:
            return self.low
        if epoch >= self.last:
            return full
        between = self.low + (full - self.low) * (epoch - self.first) / (self.last - self.first)
        step = STEP if full >= SMALL_BELOW else SMALL_STEP
        return min(max(round(between / step) * step, self.low), full)

    def sizes(self, full: int) -> list[int]:
        """Return all sides that occur in any epoch, in ascending order."""
        return sorted({self.size(epoch, full) for epoch in range(self.first, self.last + 2)})


def size_ramp(value: str) -> SizeRamp | None:
    """Parse a value of `--progressive-size`; return None for an empty value.

    Raises:
        UserError: If the value does not have the form LOW:FIRST:LAST, or its numbers are out of range or not in order.
    """
    if not value:
        return None
    numbers = [int(word) for word in value.split(":")] if re.fullmatch(r"[0-9]{1,6}(:[0-9]{1,6}){2}", value) else []
    if not (numbers and MIN_IMAGE_SIZE <= numbers[0] <= LARGEST_IMAGE_SIZE and numbers[1] <= numbers[2]):
        raise UserError(
            f"--progressive-size {shown(value)}: expected {USAGE}, such as 128:6:13 for 128 pixels in epochs 0 to 6, "
            f"then growing to full size by epoch 13; LOW is at least {MIN_IMAGE_SIZE}, and FIRST at most LAST."
        )
    return SizeRamp(*numbers)
