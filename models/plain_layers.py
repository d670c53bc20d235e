"""Layers whose output is linear in their weight as it is; others standardize it first."""

from __future__ import annotations

from timm.layers import Conv2dSame
from torch import nn

from models.whole_input import WholeInputConv2d

PLAIN_CONVOLUTIONS = (nn.Conv2d, Conv2dSame, WholeInputConv2d)
