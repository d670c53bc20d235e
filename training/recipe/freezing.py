"""Head-first fine-tuning: for the first epochs only the new head is trained, and the pretrained backbone is frozen."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from training.parallel.batchnorm import freeze_statistics


class BackboneFreezer:
    """Cuts the graph in front of the head, so that no gradient reaches the backbone and none is computed for it.

    The parameters stay in the optimizer, at learning rate 0 (see `Schedule.group_learning_rate`): sharding is laid
    out once for the whole run.
    """

    def __init__(self, module: nn.Module, head_parameter_names: Collection[str]) -> None:
        self._module = module
        head_names = {name.rpartition(".")[0] for name in head_parameter_names}
        self._heads = [module.get_submodule(name) for name in sorted(head_names)]
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []

    def freeze(self) -> None:
        """Freeze the backbone; call it again after `module.train()`, which unfreezes its BatchNorms."""
        if not self._hooks:
            self._hooks = [head.register_forward_pre_hook(_detach_inputs) for head in self._heads]
        freeze_statistics(self._module)

    def unfreeze(self) -> None:
        """Train all layers."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._module.train()


def _detach_inputs(_module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(value.detach() for value in inputs)
