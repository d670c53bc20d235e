"""A CNN whose feature map is read from left to right by an LSTM.

The layout is CRNN's (Shi, Bai and Yao 2015, arXiv:1507.05717): the last two blocks pool only the height, so that the
width remains as a sequence of columns (7 for 28 pixels, 28 for 224).
"""

from __future__ import annotations

from typing import Any

import torch
from timm.models import build_model_with_cfg, register_model
from torch import nn

from zerovision.models.basic_cnn import conv_block

HIDDEN_SIZE = 128
HAS_BF16 = torch.backends.cpu.get_cpu_capability() not in ("DEFAULT", "AVX2")  # whether oneDNN's LSTM has bf16 kernels


class CNNLSTM(nn.Module):
    """Maps images `[B, C, H, W]` to logits `[B, num_classes]`."""

    def __init__(self, num_classes: int, in_chans: int, drop_rate: float = 0.2) -> None:
        """Create the layers; the stem's stride is 2, which `zerovision.models.dry_run` lowers for small images."""
        super().__init__()
        self.blocks = nn.Sequential(
            conv_block(in_chans, 32, stride=2),
            conv_block(32, 64),
            conv_block(64, 128, pool=(2, 1)),
            conv_block(128, 128, pool=(2, 1)),
        )
        self.lstm = nn.LSTM(128, HIDDEN_SIZE, num_layers=2, batch_first=True, bidirectional=True, dropout=drop_rate)
        self.dropout = nn.Dropout(drop_rate)
        self.head = nn.Linear(2 * HIDDEN_SIZE, num_classes)

    def group_matcher(self, coarse: bool = False) -> dict[str, str]:
        """Return the patterns that group the parameters by layer, in timm's format."""
        return {"blocks": r"^blocks\.(\d+)"}

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Map images `[B, C, H, W]` to logits `[B, num_classes]`."""
        columns = self.blocks(images).mean(dim=2).transpose(1, 2)  # [B, columns, 128]
        if columns.is_cpu and torch.is_autocast_enabled("cpu") and not HAS_BF16:
            with torch.autocast("cpu", enabled=False):
                outputs, _ = self.lstm(columns.float())
        else:
            outputs, _ = self.lstm(columns)
        return self.head(self.dropout(outputs.mean(dim=1)))


default_cfgs = {"cnn_lstm": {"first_conv": "blocks.0.0", "classifier": "head", "input_size": (3, 224, 224)}}


@register_model
def cnn_lstm(pretrained: bool = False, **options: Any) -> nn.Module:
    """Build the network; it takes any image size and has no pretrained weights."""
    return build_model_with_cfg(CNNLSTM, "cnn_lstm", pretrained, **options)
