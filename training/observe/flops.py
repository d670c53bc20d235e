"""Floating-point operations of a model, counted once."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm


class TrainingFlops:
    """Counts the operations of training on one image on first access: some 0.1 s, on shapes alone.

    Multiplications and additions of convolutions and matrix products count, forward and backward, as in
    `torch.utils.flop_counter`; normalization, activations, the optimizer and recomputed activations do not.
    """

    def __init__(self, module: nn.Module, image_size: int) -> None:
        """Copy the shapes of a module that is neither sharded nor converted for several ranks.

        Args:
            module: float32 images [B, 3, S, S] -> logits; it is not changed.
            image_size: S, in pixels.
        """
        tensors = [*module.parameters(), *module.buffers()]
        # The deep copy takes these for copied already: no weight is copied.
        self._skeleton = copy.deepcopy(module, {id(tensor): _without_data(tensor) for tensor in tensors}).train()
        _remove_batchnorm(self._skeleton)
        self._image_size = image_size

    @cached_property
    def per_image(self) -> int | None:
        """Operations of forward and backward for one image, None if the model cannot be run without data."""
        from torch.utils.flop_counter import FlopCounterMode

        images = torch.empty(1, 3, self._image_size, self._image_size, device="meta")
        counter = FlopCounterMode(
            display=False, custom_mapping={torch.ops.aten.convolution_backward: convolution_backward_flops}
        )
        try:
            with torch.enable_grad(), counter:
                self._skeleton(images).sum().backward()
        except Exception:  # whatever a user's timm model does with its data: one number less
            return None
        return counter.get_total_flops() or None


def convolution_backward_flops(
    gradient_shape: Sequence[int],
    input_shape: Sequence[int],
    weight_shape: Sequence[int],
    _bias: Any,
    _stride: Any,
    _padding: Any,
    _dilation: Any,
    transposed: bool,
    *_rest: Any,
    out_shape: Sequence[Any],
    **_named: Any,
) -> int:
    """Count a convolution's backward: as many operations as forward for each gradient, of the input and of the weight.

    PyTorch's own formula ignores groups, and counts a depthwise convolution's weight gradient several hundred times:
    14 times MobileNetV3-Small's whole training.

    Args:
        gradient_shape: of the gradient of the output [B, C_out, ...].
        input_shape: [B, C_in, ...].
        weight_shape: [C_out, C_in / groups, ...], or [C_in, C_out / groups, ...] transposed.
        transposed: whether it is a transposed convolution.
        out_shape: shapes of the gradients of input, weight and bias, None for those that are not computed.
    """
    batch, _, *pixels = input_shape if transposed else gradient_shape
    forward = 2 * batch * math.prod(pixels) * math.prod(weight_shape)
    return forward * sum(shape is not None for shape in out_shape[:2])


def _without_data(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty_like(tensor, device="meta")
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _remove_batchnorm(module: nn.Module) -> None:
    """Remove BatchNorm, which does not count and takes two thirds of the time without data."""
    for name, child in module.named_children():
        if isinstance(child, _BatchNorm):
            setattr(module, name, nn.Identity())
        else:
            _remove_batchnorm(child)
