"""Transforms single images before batching: crops them, resizes them (even very thin ones), and applies a policy.

For training and evaluation, the result is uint8 (with `--decode numbers` also float32) [C, S, S]; shifting, mirroring
and normalization are applied later to whole batches on the device (see `batch_transforms`). `evaluation_transform` does
everything for a single image, for users of a trained model.

Pillow applies the policies (RandAugment, TrivialAugment, AutoAugment, 3-Augment and color jitter). They draw from the
global random generators of Python, NumPy and torch; see `randomness.seed_global_generators`.

Only the center of a thin image is enlarged. Enlarging the shorter side of a 3 x 9000 image to 256 pixels would make the
longer side 768,000 pixels long (590 MB), just for a center crop of 224 pixels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from PIL import Image, ImageFilter, ImageOps
from torchvision.transforms import InterpolationMode, v2
from torchvision.transforms.v2 import functional

from zerovision.models import ImageSize, sides
from zerovision.models.weights_metadata import BYTES, Preprocessing
from zerovision.training.data.augmentations import Augmentation

THINNEST_SIDES = 20  # largest ratio of the longer to the shorter side at which an image is enlarged as a whole
_WEIGHT_BITS = 14  # precision of PyTorch's fixed-point weights for bytes, if the largest weight is between 1 and 2

# Each filter's radius in pixels, and its weight as a function of distance; as in Pillow and antialiased PyTorch.
FILTERS = {
    InterpolationMode.BILINEAR: (1, lambda x: (1 - x).clamp(min=0)),
    InterpolationMode.BICUBIC: (
        2,
        lambda x: torch.where(x < 1, (1.5 * x - 2.5) * x * x + 1, (2 - x).clamp(min=0) ** 2 * (x - 1) / -2),
    ),
}


def resized_centre(
    image: torch.Tensor, resize_size: ImageSize, size: ImageSize, mode: InterpolationMode
) -> torch.Tensor:
    """Resize the shorter side (or cover a non-square size) of an image, [C, H, W], then crop the center.

    If an image thinner than 1:20 is enlarged, only the pixels that contribute to the center are read. The resulting
    bytes equal those of `resize` and `center_crop` where PyTorch resizes bytes natively (x86 with AVX2, ARM).
    Elsewhere, values of a uint8 image differ by at most 1, and those of a float32 image by rounding errors.
    """
    height, width = image.shape[-2:]
    (rows_there, columns_there), centre = sides(resize_size), sides(size)
    cuts_rows = columns_there * height >= rows_there * width
    if cuts_rows:
        rows_there = int(columns_there * height / width)
    else:
        columns_there = int(rows_there * width / height)
    if max(height, width) <= THINNEST_SIDES * min(height, width) or rows_there <= height:
        image = functional.resize(image, [rows_there, columns_there], mode, antialias=True)
    elif cuts_rows:  # columns first, like PyTorch, which rounds bytes after each direction
        first, weights = _centre_weights(height, rows_there, centre[0], mode)
        rows = image[:, first : first + weights.shape[1]]
        rows = functional.resize(rows, [rows.shape[1], columns_there], mode, antialias=True)
        image = _weighted(weights, rows)
    else:
        first, weights = _centre_weights(width, columns_there, centre[1], mode)
        columns = image[:, :, first : first + weights.shape[1]]
        columns = _weighted(weights, columns.transpose(1, 2)).transpose(1, 2)
        image = functional.resize(columns, [rows_there, centre[1]], mode, antialias=True)
    return functional.center_crop(image, list(centre))


def _centre_weights(side: int, resized: int, size: int, mode: InterpolationMode) -> tuple[int, torch.Tensor]:
    """Return the first pixel used for the center of an enlarged side, and the weights, float64 [size, pixels]."""
    centres = side / resized * (round((resized - size) / 2) + torch.arange(size, dtype=torch.float64) + 0.5)
    reach = FILTERS[mode][0]
    first, end = max(int(centres[0] - reach + 0.5), 0), min(int(centres[-1] + reach + 0.5), side)
    return first, resize_weights(torch.arange(first, end, dtype=torch.float64), centres, 1.0, mode)


def resize_weights(
    pixels: torch.Tensor, centres: torch.Tensor, step: torch.Tensor | float, mode: InterpolationMode
) -> torch.Tensor:
    """Return the weight of each original pixel in each resized pixel, along one side.

    The weights are those of PyTorch's `_compute_indices_min_size_weights_aa`
    (aten/src/ATen/native/cpu/UpSampleKernel.cpp).

    Args:
        pixels: Indices of the available pixels, float64 [P].
        centres: Centers of the resized pixels, in units of original pixels, float64 [S].
        step: Distance between centers, at least 1.
        mode: Bilinear or bicubic, with antialiasing.

    Returns:
        float64 [S, P]; each row sums to 1.
    """
    reach, weight_at = FILTERS[mode]
    centres = centres[:, None]
    lows, ends = ((centres + sign * reach * step + 0.5).trunc() for sign in (-1, 1))
    is_inside = (pixels >= lows) & (pixels < ends)
    weights = weight_at(((pixels - centres + 0.5) / step).abs()) * is_inside
    return weights / weights.sum(1, keepdim=True)


def _weighted(weights: torch.Tensor, image: torch.Tensor) -> torch.Tensor:
    """Return weighted sums [C, S, w] of the rows of `image` [C, h, w]; bytes are rounded as in PyTorch."""
    exact = image.dtype != torch.uint8
    one = 2**_WEIGHT_BITS
    factors = weights if exact else (weights * one + torch.where(weights < 0, -0.5, 0.5)).trunc()
    summed = factors.to(image.device) @ image.double()
    return (summed if exact else ((summed + one / 2) / one).floor().clamp(0, 255)).to(image.dtype)


Transform = Callable[[torch.Tensor], torch.Tensor]

TRIES = 10  # attempts at a random crop, as in torchvision's `RandomResizedCrop`
CROP_DRAWS = 2 * TRIES + 2


class Box(NamedTuple):
    """A part of an image, in whole pixels."""

    top: int
    left: int
    height: int
    width: int


BoxChooser = Callable[[int, int], Box]  # from an image's height and width to a part of the image


def random_box(
    height: int,
    width: int,
    draws: Sequence[float],
    scale: tuple[float, float] = (0.08, 1.0),
    ratio: tuple[float, float] = (3 / 4, 4 / 3),
) -> Box:
    """Choose a random part of an image, by default 8 to 100 % of its area with an aspect ratio of 3:4 to 4:3.

    The area and the log-uniform aspect ratio are drawn up to 10 times until they fit; if they never fit, the result is
    the largest central part with an allowed aspect ratio. The distribution is the same as in torchvision's
    `RandomResizedCrop.make_params`. `draws` are `CROP_DRAWS` numbers, uniform in [0, 1). `ratio` is the smallest and
    largest width, as a multiple of the height.
    """
    across, down = draws[0], draws[1]
    log_ratio = (math.log(ratio[0]), math.log(ratio[1]))
    for attempt in range(1, TRIES + 1):
        area = height * width * _between(*scale, draws[2 * attempt])
        shape = math.exp(_between(*log_ratio, draws[2 * attempt + 1]))
        w, h = round(math.sqrt(area * shape)), round(math.sqrt(area / shape))
        if 0 < w <= width and 0 < h <= height:
            return Box(int(down * (height - h + 1)), int(across * (width - w + 1)), h, w)
    w = min(width, max(1, round(height * ratio[1])))
    h = min(height, max(1, round(width / ratio[0])))
    return Box((height - h) // 2, (width - w) // 2, h, w)


def _between(low: float, high: float, share: float) -> float:
    return low + (high - low) * share


def evaluation_transform(preprocessing: Preprocessing) -> Transform:
    """Return a transform from [C, H, W], uint8 or `preprocessing.values`, to float32 [C, H, W] of size `image_size`."""
    steps = [evaluation_geometry(preprocessing), v2.ToDtype(torch.float32, scale=True)]
    if preprocessing.values != BYTES:  # only bytes are resized before conversion, and rounded
        steps.reverse()
    return v2.Compose([*steps, v2.Normalize(preprocessing.mean, preprocessing.std)])


def evaluation_geometry(preprocessing: Preprocessing) -> Transform:
    """Return the steps of `evaluation_transform` before normalization, from uint8 or float32 [C, H, W] to [C, S, S]."""
    size, resize_size = preprocessing.image_size, preprocessing.resize_size
    filter_mode = InterpolationMode(preprocessing.interpolation)
    if preprocessing.fit == "pad":
        return partial(padded, size=size, mode=filter_mode, colour=preprocessing.mean)
    if resize_size is None:
        return v2.Resize(sides(size), interpolation=filter_mode, antialias=True)
    return partial(resized_centre, resize_size=resize_size, size=size, mode=filter_mode)


def padded(image: torch.Tensor, size: ImageSize, mode: InterpolationMode, colour: Sequence[float]) -> torch.Tensor:
    """Resize an image [1 or C, H, W] with antialiasing to fit into `size`, and add bars on both sides: [C, h, w].

    The image is uint8 or float32, and so is the result. The bars' color has one value in 0..1 per channel; in a uint8
    image, 1 becomes 255.
    """
    inside, outer = image.shape[-2:], sides(size)
    fullest = 0 if outer[0] * inside[1] <= outer[1] * inside[0] else 1
    height, width = (max(round(outer[fullest] * side / inside[fullest]), 1) for side in inside)
    bars = torch.tensor(colour, dtype=torch.float64)
    bars = bars if len(image) == len(bars) else bars.mean(0, keepdim=True)  # a gray image, which gets C channels later
    bars = bars if image.is_floating_point() else (255 * bars).round().clamp(0, 255)
    whole = bars.to(image.dtype)[:, None, None].repeat(1, *outer)
    top, left = (outer[0] - height) // 2, (outer[1] - width) // 2
    whole[:, top : top + height, left : left + width] = functional.resize(image, [height, width], mode, antialias=True)
    return whole


def viewable(images: torch.Tensor) -> torch.Tensor:
    """Return the first 1 or 3 channels of images, [..., 1 or 3, H, W], for display in gray or RGB."""
    return images[..., : 3 if images.shape[-3] >= 3 else 1, :, :]


def unnormalized(images: torch.Tensor, preprocessing: Preprocessing) -> torch.Tensor:
    """Convert normalized images [..., C, H, W] back to values in 0..1."""
    means = (preprocessing.mean, preprocessing.std)
    mean, std = (torch.tensor(each, device=images.device)[:, None, None] for each in means)
    return images * std + mean


def resize(image: torch.Tensor, preprocessing: Preprocessing) -> torch.Tensor:
    """Resize uint8 or float32 [C, h, w] to [C, S, S] with antialiasing; unlike torchvision, do not copy a cropped view.

    Resizing is fastest if the channels are innermost in memory.
    """
    size, mode = preprocessing.image_size, preprocessing.interpolation
    # add the batch dimension before the height; otherwise, torch does not recognize that the channels are innermost
    batch = image.permute(1, 2, 0)[None].permute(0, 3, 1, 2)
    return torch.nn.functional.interpolate(batch, sides(size), mode=mode, antialias=True)[0]


BLUR_RADIUS = (0.1, 2.0)  # pixels, standard deviation
SOLARIZED_FROM = 128  # gray level


def _randaugment(augmentation: Augmentation, preprocessing: Preprocessing) -> Callable:
    """Return timm's RandAugment, with its default fill for pixels beyond the edge."""
    from timm.data import auto_augment  # timm takes seconds to import

    fill = tuple(round(255 * value) for value in preprocessing.mean)
    hyperparameters = {"translate_const": int(0.45 * min(preprocessing.sides)), "img_mean": fill}
    policy = auto_augment.rand_augment_transform(augmentation.randaugment, hyperparameters)
    for operation in policy.ops:
        if operation.aug_fn is auto_augment.posterize:
            operation.aug_fn = _posterize
    return policy


def _posterize(image: Image.Image, bits: int, **_: Any) -> Image.Image:
    """Keep 0 to 8 bits of each pixel; 0 bits, which timm uses and Pillow 13 rejects, make the image black."""
    return ImageOps.posterize(image, bits) if bits else Image.new(image.mode, image.size)


def _autoaugment(augmentation: Augmentation, preprocessing: Preprocessing) -> Callable:
    """Return the AutoAugment policy learned on ImageNet, CIFAR-10 or SVHN."""
    found_for = v2.AutoAugmentPolicy(augmentation.policy.removeprefix("autoaugment_"))
    return v2.AutoAugment(found_for, interpolation=InterpolationMode(preprocessing.interpolation))


def _three_augment(augmentation: Augmentation, preprocessing: Preprocessing) -> Callable:
    """Return the policy that applies one of gray, solarize and blur (Touvron et al., "DeiT III", arXiv:2204.07118)."""
    return v2.RandomChoice([v2.Grayscale(3), v2.RandomSolarize(SOLARIZED_FROM, p=1.0), v2.Lambda(_blur)])


def _blur(image: Image.Image) -> Image.Image:
    return image.filter(ImageFilter.GaussianBlur(float(torch.empty(1).uniform_(*BLUR_RADIUS))))


POLICIES: dict[str, Callable[[Augmentation, Preprocessing], Callable]] = {
    "randaugment": _randaugment,
    "trivialaugment": lambda _, made: v2.TrivialAugmentWide(interpolation=InterpolationMode(made.interpolation)),
    "autoaugment_imagenet": _autoaugment,
    "autoaugment_cifar10": _autoaugment,
    "autoaugment_svhn": _autoaugment,
    "3augment": _three_augment,
}


def build_policy(augmentation: Augmentation, preprocessing: Preprocessing) -> Transform | None:
    """Return an augmentation's policy and color jitter as a transform of uint8 [3, S, S]; None if it has neither."""
    steps = [POLICIES[augmentation.policy](augmentation, preprocessing)] if augmentation.policy else []
    if augmentation.color_jitter:
        steps.append(v2.ColorJitter(*[augmentation.color_jitter] * 3))  # as in timm, the hue is unchanged
    return v2.Compose([v2.ToPILImage(), *steps, v2.PILToTensor()]) if steps else None
