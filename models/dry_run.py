"""Runs a network without data: to count operations, to fit it to an image size, and to check the size.

The network runs on tensors that have shapes but no data. This takes a fraction of a second at any size, and does not
change weights, BatchNorm statistics or random generators.
"""

from __future__ import annotations

import copy
import itertools
import logging
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.batchnorm import _BatchNorm

from zerovision.models import ImageSize, sides, size_of
from zerovision.models.ensemble import Ensemble
from zerovision.models.weights_metadata import Description
from zerovision.training.base.errors import UserError
from zerovision.training.base.settings import RunSettings

BATCH_NORM = torch.batch_norm
ONE_AT_A_TIME = threading.Lock()  # threads that replace `torch.batch_norm`, which all threads share
SMALL_IMAGE_PIXELS = 64
STEPS_TO_TRY = (8, 14, 16, 32, 64)  # pixels; sides may have to be multiples of one of them
SIZES_TO_TRY = (9, 12, 16, 20, 24, 28, 32, 48, 64, 96, 112, 128, 160, 192, 224, 256, 288, 320, 384, 448, 512)


def without_data(module: nn.Module) -> nn.Module:
    """Return a copy of a module, in training mode and with its parameters and buffers on the meta device.

    Args:
        module: the module, neither sharded nor converted for several ranks; it is not changed.
    """

    def on_meta(tensor: torch.Tensor) -> torch.Tensor:
        empty = torch.empty_like(tensor, device="meta")
        return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty

    # The deep copy considers these tensors already copied, so no weight is copied.
    copied = {id(tensor): on_meta(tensor) for tensor in (*module.parameters(), *module.buffers())}
    return copy.deepcopy(module, copied).train()


def forward_failure(module: nn.Module, image_size: ImageSize, batch_size: int, image_channels: int = 3) -> str | None:
    """Return why a forward pass in training mode fails at this size, or None; the module is put into training mode."""
    module.train()
    shape = (batch_size, image_channels, *sides(image_size))
    try:
        # The meta device is four times as fast as fake tensors.
        with torch.no_grad(), ONE_AT_A_TIME, mock.patch.object(torch, "batch_norm", _shape_after_batch_norm):
            output = without_data(module)(torch.empty(shape, device="meta"))
    except Exception:  # the network may still work, but mix in tensors of its own
        try:
            output = _forward_on_fake_tensors(module, shape)
        except Exception as error:  # layers that do not fit may raise any exception
            return f"{type(error).__name__}: {error}".partition("\n")[0]
    if not isinstance(output, torch.Tensor) or output.ndim != (3 if isinstance(module, Ensemble) else 2):
        return "its output is not one row of logits per image"
    return None


def training_flops(module: nn.Module, image_size: ImageSize, image_channels: int = 3) -> int | None:
    """Return the operations of a forward and a backward pass for one image; None if the module cannot run without data.

    Multiplications and additions in convolutions and matrix products are counted, as in `torch.utils.flop_counter`;
    normalization, activations, the optimizer and recomputed activations are not.

    Args:
        module: the result of `without_data`, which maps float32 images [B, C, H, W] to logits; its BatchNorms are
            removed.
        image_size: height and width of the images, in pixels.
        image_channels: number of channels of the images.
    """
    from torch.utils.flop_counter import FlopCounterMode

    _remove_batchnorm(module)
    images = torch.empty(1, image_channels, *sides(image_size), device="meta")
    formulas = {torch.ops.aten.convolution_backward: convolution_backward_flops}
    counter = FlopCounterMode(display=False, custom_mapping=formulas)
    try:
        with torch.enable_grad(), counter:
            module(images).sum().backward()
    except Exception:  # a user's timm model may raise anything; only this number is lost
        return None
    return counter.get_total_flops() or None


def forward_flops(module: nn.Module, places: Sequence[str], image_size: ImageSize, image_channels: int) -> list[int]:
    """Return the operations of a forward pass for one image before, between and after places.

    The operations are counted as in `training_flops`. The places are names of distinct modules, in the order in which
    the modules run.
    """
    from torch.utils.flop_counter import FlopCounterMode

    _remove_batchnorm(module)
    counter, counts = FlopCounterMode(display=False), [0]
    for name in places:
        entered = module.get_submodule(name)
        entered.register_forward_pre_hook(lambda *_: counts.append(counter.get_total_flops()), prepend=True)
    with torch.no_grad(), counter:
        module(torch.empty(1, image_channels, *sides(image_size), device="meta"))
    return [after - before for before, after in itertools.pairwise([*counts, counter.get_total_flops()])]


def _forward_on_fake_tensors(module: nn.Module, shape: tuple[int, ...]) -> object:
    """Run the network on fake tensors; operations on real ones alone, such as BatchNorm's counting, run on copies."""
    # The check expects shapes that do not fit, for which torch would log a traceback.
    silent = mock.patch.object(logging.getLogger("torch._subclasses.fake_tensor"), "disabled", True)
    with silent, copied_buffers(module.modules()), FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        return module(torch.empty(shape))


@contextmanager
def copied_buffers(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Replace the buffers of modules, without those of their children, with copies until the block ends."""
    originals = [(module, dict(module._buffers)) for module in modules]
    for module, buffers in originals:
        module._buffers.update({name: b.clone() for name, b in buffers.items() if b is not None})
    try:
        yield
    finally:
        for module, buffers in originals:
            module._buffers.update(buffers)


def convolution_backward_flops(
    gradient_shape: Sequence[int],  # [B, C_out, ...]
    input_shape: Sequence[int],  # [B, C_in, ...]
    weight_shape: Sequence[int],  # [C_out, C_in / groups, ...], or [C_in, C_out / groups, ...] if transposed
    *settings: Any,  # bias, stride, padding, dilation, whether the convolution is transposed, and more
    out_shape: Sequence[Any],  # of the gradients of input, weight and bias; None for one that is not computed
    **_named: Any,
) -> int:
    """Count the operations of a convolution's backward pass.

    The gradients of input and weight each take as many operations as the forward pass. PyTorch's own formula ignores
    groups, and counts a depthwise convolution's weight gradient several hundred times, so that the training of
    MobileNetV3-Small would seem to take 14 times as many operations.
    """
    is_transposed = settings[4]
    batch, _, *pixels = input_shape if is_transposed else gradient_shape
    forward = 2 * batch * math.prod(pixels) * math.prod(weight_shape)
    return forward * sum(shape is not None for shape in out_shape[:2])


def _shape_after_batch_norm(images: torch.Tensor, *rest: Any) -> torch.Tensor:
    """Replace `torch.batch_norm`, which takes three quarters of the time of a forward pass without data."""
    if not images.is_meta:  # another thread may be using BatchNorm, too
        return BATCH_NORM(images, *rest)
    if any(tensor is not None and len(tensor) != images.shape[1] for tensor in rest[:4]):
        raise RuntimeError("BatchNorm is made for another number of channels than its input has")
    return torch.empty_like(images)


def _remove_batchnorm(module: nn.Module) -> None:
    """Remove BatchNorm, whose operations are not counted but take most of the time of a run without data."""
    for name in [name for name, child in module.named_modules() if isinstance(child, _BatchNorm)]:
        module.set_submodule(name, nn.Identity())


StrideChanges = dict[str, list[int]]
"""Name of the convolution -> [old stride, new stride]."""


def create_for_image_size(
    create: Callable[[Description], nn.Module], part: Description, config: RunSettings
) -> tuple[nn.Module, StrideChanges]:
    """Create a network, lower its stem's stride for small images, and check the shapes of one training step.

    A stride of 2 in the first layer of a network made for 224 pixels loses too much detail at 32. If the network does
    not work with the lower stride (because of parallel branches in the stem), the usual stride is kept. For a size
    that does not work, a UserError names one that does.
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
    names = () if config.get("fixed_input_size") else as_names(config.get("first_conv"))
    convolutions = {name: layer for name in names if isinstance(layer := module.get_submodule(name), nn.Conv2d)}
    return {name: [2, 1] for name, c in convolutions.items() if c.stride == (2, 2) and min(c.kernel_size) > 2}


def as_names(names: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Return timm's "one name, several names or none" as a tuple."""
    return (names,) if isinstance(names, str) else tuple(names or ())
