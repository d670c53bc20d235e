"""Muon with fp32 products, for runs in fp32."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from timm.optim import muon


class Fp32Muon(muon.Muon):
    """timm's Muon, whose Newton-Schulz iterations are in fp32 instead of bf16.

    A CPU without instructions for bf16 needs 27 times as long for `airbench`'s in bf16 (AMD EPYC, family 25, model 1).
    """

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update all parameters; timm has no option for the iterations' dtype."""
        in_bf16 = muon.zeropower_via_newtonschulz
        muon.zeropower_via_newtonschulz = functools.partial(in_bf16, dtype=torch.float32)
        try:
            return super().step(closure)
        finally:
            muon.zeropower_via_newtonschulz = in_bf16
