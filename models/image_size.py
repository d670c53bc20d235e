"""Fits a network to its image size: adapts the stem's stride, and checks that the size works."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from torch import nn

from zerovision.models.dry_run import forward_failure
from zerovision.models.sides import ImageSize, sides, size_of
from zerovision.models.weights_metadata import Description
from zerovision.training.base.errors import UserError
from zerovision.training.base.settings import RunSettings

SMALL_IMAGE_PIXELS = 64
STEPS_TO_TRY = (8, 14, 16, 32, 64)  # pixels; sides may have to be multiples of one of them
SIZES_TO_TRY = (9, 12, 16, 20, 24, 28, 32, 48, 64, 96, 112, 128, 160, 192, 224, 256, 288, 320, 384, 448, 512)

StrideChanges = dict[str, list[int]]
"""Name of the convolution -> [old stride, new stride]."""


def create_for_image_size(
    create: Callable[[Description], nn.Module], part: Description, config: RunSettings
) -> tuple[nn.Module, StrideChanges]:
    """Create a network, lower its stem's stride for small images, and check the shapes of one training step.

    A stride of 2 in the first layer of a network made for 224 pixels loses too much detail at 32. If the network does
    not work with the lower stride (because of parallel branches in the stem), the usual stride is kept.

    Args:
        create: function that creates a described network, which maps `[B, C, H, W]` to `[B, num_classes]`.
        part: description of the network, with the model's name as the user typed it.
        config: settings with the batch size and the choice of whether to keep the stride for small images.

    Returns:
        The network and the strides that were changed.

    Raises:
        UserError: if the size does not work; the message names a size that does.
    """
    image_size, batch_size = part.image_size, config.micro_batch
    fit = partial(_create_and_fit, create, part, 0 if config.stem == "keep" else SMALL_IMAGE_PIXELS)
    module, changes, failure = fit(image_size, batch_size)
    if failure is None:
        return module, changes
    name, longer = part.model_type, max(sides(image_size))
    given = f"model '{name}' does not work with {image_size}-pixel images"
    if batch_size == 1 and fit(image_size, 2)[2] is None:
        raise UserError(f"{given} in batches of 1, but BatchNorm needs more: use --batch-size 2 or more")
    made_for = getattr(module, "default_cfg", {}).get("input_size", (3, longer))[-1]
    sizes = sorted({*SIZES_TO_TRY, made_for})
    # Larger sizes come first, because the user's images have at least as many pixels as requested.
    candidates: list[ImageSize] = [size for size in sizes if size > longer]
    candidates += [size for size in reversed(sizes) if size < longer]
    if isinstance(image_size, str):  # similar shapes come before squares
        candidates[:0] = [size_of(*(-(-side // step) * step for side in sides(image_size))) for step in STEPS_TO_TRY]
    working = next((size for size in candidates if fit(size, max(batch_size, 2))[2] is None), None)
    if working is None:
        raise UserError(f"model '{name}' works with no image size from {sizes[0]} to {sizes[-1]} pixels ({failure})")
    raise UserError(f"{given}, but it works with {working} pixels: use --image-size {working}")


def _create_and_fit(
    create: Callable[[Description], nn.Module], part: Description, own_stem_from: int, image_size: ImageSize, batch: int
) -> tuple[nn.Module, StrideChanges, str | None]:
    """Return the network, the strides changed for sizes below `own_stem_from`, and why the size fails, or None."""
    try:
        module = create(replace(part, image_size=image_size))
    except (RuntimeError, ValueError, TypeError, AssertionError) as error:  # a vision transformer checks its size
        return nn.Identity(), {}, str(error).partition("\n")[0] or type(error).__name__
    changes = _stem_strides_to_lower(module) if min(sides(image_size)) < own_stem_from else {}
    set_strides(module, {name: new for name, (_, new) in changes.items()})
    failure = forward_failure(module, image_size, batch, part.image_channels)
    if failure is not None and changes:
        set_strides(module, {name: old for name, (old, _) in changes.items()})
        changes, failure = {}, forward_failure(module, image_size, batch, part.image_channels)
    return module, changes, failure


def set_strides(module: nn.Module, strides: dict[str, int]) -> None:
    """Set the stride of the named convolutions; their weights keep their shapes."""
    for name, stride in strides.items():
        convolution = module.get_submodule(name)
        if not isinstance(convolution, nn.Conv2d):
            raise UserError(f"'{name}' is not a convolution, so its stride cannot be {stride}")
        convolution.stride = (stride, stride)


def _stem_strides_to_lower(module: nn.Module) -> StrideChanges:
    """Find first convolutions with stride 2 and overlapping windows: no patch embeddings (kernel = stride)."""
    config = getattr(module, "default_cfg", {})
    # A network with a fixed input size has position tables laid out for the usual stride.
    if config.get("fixed_input_size"):
        return {}
    changes: StrideChanges = {}
    for name in as_names(config.get("first_conv")):
        convolution = module.get_submodule(name)
        if isinstance(convolution, nn.Conv2d) and convolution.stride == (2, 2) and min(convolution.kernel_size) > 2:
            changes[name] = [2, 1]
    return changes


def as_names(names: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Return timm's "one name, several names or none" as a tuple."""
    return (names,) if isinstance(names, str) else tuple(names or ())
