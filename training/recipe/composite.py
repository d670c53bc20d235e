"""One optimizer of several rules, each for parameters of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch


class Composite(torch.optim.Optimizer):
    """Several optimizers as one: their groups and their state are its own.

    Attributes:
        rules: the optimizers; an engine that replaces a group's parameters replaces them there too.
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
    """Return the rules of a composite optimizer, any other optimizer alone."""
    return optimizer.rules if isinstance(optimizer, Composite) else [optimizer]
