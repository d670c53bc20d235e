"""A small plain CNN: three blocks of two 3x3 convolutions, global average pooling, dropout, and one linear layer."""

from __future__ import annotations

from typing import Any

import torch
from timm.models import build_model_with_cfg, register_model
from torch import nn


def conv_block(
    in_channels: int, out_channels: int, *, stride: int = 1, pool: tuple[int, int] = (2, 2)
) -> nn.Sequential:
    """Return two 3x3 convolutions, the first strided, with BatchNorm and ReLU, then max pooling by (height, width)."""
    layers: list[nn.Module] = []
    for channels, step in ((in_channels, stride), (out_channels, 1)):
        convolution = nn.Conv2d(channels, out_channels, 3, stride=step, padding=1, bias=False)
        layers += [convolution, nn.BatchNorm2d(out_channels), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.MaxPool2d(pool))


class BasicCNN(nn.Module):
    """Maps images `[B, C, H, W]` to logits `[B, num_classes]`."""

    def __init__(self, num_classes: int, in_chans: int, drop_rate: float = 0.2) -> None:
        """Create the layers; the stem's stride is 2, which `zerovision.models.dry_run` lowers for small images."""
        super().__init__()
        self.blocks = nn.Sequential(conv_block(in_chans, 32, stride=2), conv_block(32, 64), conv_block(64, 128))
        self.dropout = nn.Dropout(drop_rate)
        self.head = nn.Linear(128, num_classes)

    def group_matcher(self, coarse: bool = False) -> dict[str, str]:
        """Return the patterns that group the parameters by layer, in timm's format."""
        return {"blocks": r"^blocks\.(\d+)"}

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map images `[B, C, H, W]` to logits `[B, num_classes]`."""
        return self.head(self.dropout(self.blocks(images).mean(dim=(2, 3))))


# The same keys as in timm's own models; other modules find the stem and the head only by these keys.
default_cfgs = {"basic_cnn": {"first_conv": "blocks.0.0", "classifier": "head", "input_size": (3, 224, 224)}}


@register_model
def basic_cnn(pretrained: bool = False, **options: Any) -> nn.Module:
    """Build the network; it takes any image size and has no pretrained weights."""
    return build_model_with_cfg(BasicCNN, "basic_cnn", pretrained, **options)
