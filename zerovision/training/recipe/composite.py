"""Our own update rules: several rules as one optimizer, each with its parameters, and Muon with fp32 products."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from timm.optim import muon


class Composite(torch.optim.Optimizer):
    """Several optimizers as one, which owns their groups and state.

    Attributes:
        rules: the optimizers; an engine that replaces a group's parameters also replaces them there.
    """

    def __init__(self, rules: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__([group for rule in rules for group in rule.param_groups], {})
        self.rules = rules
        for rule in rules:
            rule.state = self.state

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update all parameters."""
        for rule in self.rules:
            rule.step()


def rules_of(optimizer: torch.optim.Optimizer) -> Sequence[torch.optim.Optimizer]:
    """Return the rules of a composite optimizer, or any other optimizer itself."""
    return optimizer.rules if isinstance(optimizer, Composite) else [optimizer]


class Fp32Muon(muon.Muon):
    """timm's Muon, whose Newton-Schulz iterations are in fp32 instead of bf16.

    On a CPU without bf16 instructions (AMD EPYC, family 25, model 1), they take 27 times as long in bf16 (`airbench`).
    """

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        """Update all parameters; timm has no option for the iterations' dtype."""
        in_bf16 = muon.zeropower_via_newtonschulz
        muon.zeropower_via_newtonschulz = functools.partial(in_bf16, dtype=torch.float32)
        try:
            return super().step(closure)
        finally:
            muon.zeropower_via_newtonschulz = in_bf16
