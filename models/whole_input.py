"""Computes convolutions over their whole input, such as VGG's first classifier layer, as matrix products."""

from __future__ import annotations

import torch
from timm.layers import Conv2dSame
from torch import nn


class WholeInputConv2d(nn.Conv2d):
    """A convolution that is computed as a matrix product if its kernel is as large as its input.

    On a CPU, the convolution's own kernels would then take four times as long; VGG16's layer has 103 million weights.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Map images `[B, C, H, W]` to `[B, out_channels, H', W']`, as the convolution does except for rounding."""
        if input.shape[2:] != self.kernel_size or self.padding != (0, 0) or self.groups != 1:
            return super().forward(input)
        order = (0, 1, 2, 3) if self.weight.is_contiguous() else (0, 2, 3, 1)  # the order of the weights, being large
        rows, weight = (tensor.permute(order).flatten(1) for tensor in (input, self.weight))
        return nn.functional.linear(rows, weight, self.bias)[:, :, None, None]


# Convolutions whose output is linear in their stored weight; other convolutions standardize the weight first.
PLAIN_CONVOLUTIONS = (nn.Conv2d, Conv2dSame, WholeInputConv2d)
