"""A network of your own, registered as timm's are: `--plugin examples/own_network.py --model-type patches`."""

from __future__ import annotations

from typing import Any

import torch
from timm.models import build_model_with_cfg, register_model
from torch import nn

from zerovision import MODELS, ModelSpec


class Patches(nn.Module):
    """Images `[B, C, H, W]` to logits `[B, num_classes]`: patches of 4 x 4 pixels, each by itself, then their mean."""

    def __init__(self, num_classes: int, in_chans: int, drop_rate: float = 0.0) -> None:
        """Make the layers."""
        super().__init__()
        self.stem = nn.Conv2d(in_chans, 64, 4, stride=4)
        self.layers = nn.Sequential(nn.GELU(), nn.Conv2d(64, 64, 1), nn.GELU())
        self.dropout = nn.Dropout(drop_rate)
        self.head = nn.Linear(64, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        return self.head(self.dropout(self.layers(self.stem(images)).mean(dim=(2, 3))))


default_cfgs = {"patches": {"first_conv": "stem", "classifier": "head", "input_size": (3, 224, 224)}}


@register_model
def patches(pretrained: bool = False, **options: Any) -> nn.Module:
    """Build the network."""
    return build_model_with_cfg(Patches, "patches", pretrained, **options)


MODELS["patches"] = ModelSpec("patches without neighbours", module=__name__)
