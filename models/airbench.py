"""The small network of airbench, for fast training on small images (Jordan 2024, https://arxiv.org/abs/2404.00498).

Each block halves the image right after its first convolution, so that most of the work is done at low resolution.
Unlike in the paper, BatchNorm's scales are trained, and its running statistics use PyTorch's default momentum.
"""

from __future__ import annotations

from typing import Any

import torch
from timm.models import build_model_with_cfg, register_model
from torch import nn

STEM_SIZE = 2  # pixels
STEM_FILTERS = 24  # twice the number of values in a patch of 3 channels: whitening fills filters in pairs
LOGIT_SCALE = 1 / 9


class Airbench(nn.Module):
    """Maps images `[B, C, H, W]` to logits `[B, num_classes]`; H and W are at least 9 pixels."""

    def __init__(self, num_classes: int, in_chans: int, widths: tuple[int, int, int]) -> None:
        """Create the layers; `widths` are the numbers of channels of the three blocks."""
        super().__init__()
        channels = min(STEM_FILTERS, 2 * in_chans * STEM_SIZE**2)
        self.stem = nn.Conv2d(in_chans, channels, STEM_SIZE)
        self.blocks = nn.Sequential()
        for width in widths:
            first = (_convolution(channels, width), nn.MaxPool2d(2), nn.BatchNorm2d(width), nn.GELU())
            second = (_convolution(width, width), nn.BatchNorm2d(width), nn.GELU())
            self.blocks.append(nn.Sequential(*first, *second))
            channels = width
        self.head = nn.Linear(channels, num_classes, bias=False)

    def group_matcher(self, coarse: bool = False) -> dict[str, str]:
        """Return the patterns that group the parameters by layer, in timm's format."""
        return {"stem": r"^stem", "blocks": r"^blocks\.(\d+)"}

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map images `[B, C, H, W]` to logits `[B, num_classes]`."""
        features = self.blocks(nn.functional.gelu(self.stem(images))).amax(dim=(2, 3))
        return self.head(features) * LOGIT_SCALE


def _convolution(in_channels: int, width: int) -> nn.Conv2d:
    """Create a 3x3 convolution that initially passes through as many channels as possible."""
    convolution = nn.Conv2d(in_channels, width, 3, padding=1, bias=False)
    nn.init.dirac_(convolution.weight[:in_channels])
    return convolution


_CFG = {"first_conv": "stem", "classifier": "head", "input_size": (3, 32, 32)}
default_cfgs = {"airbench": _CFG, "airbench_small": _CFG}


@register_model
def airbench(pretrained: bool = False, **options: Any) -> nn.Module:
    """Build the network; it has no pretrained weights."""
    return build_model_with_cfg(Airbench, "airbench", pretrained, widths=(64, 256, 256), **options)


@register_model
def airbench_small(pretrained: bool = False, **options: Any) -> nn.Module:
    """Build `airbench` at half the width."""
    return build_model_with_cfg(Airbench, "airbench_small", pretrained, widths=(32, 128, 128), **options)
