"""What learns in which epoch: layers that never do, and those that wait until a new head has learned."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

BATCHNORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class BackboneFreezer:
    """Puts a model into training mode, all but the layers that are frozen.

    BatchNorms of frozen layers normalize with their running statistics, and do not update them. In head-first
    fine-tuning only the new head is trained for the first epochs: the graph is cut in front of it, so that no gradient
    reaches the backbone and none is computed for it. Its parameters stay in the optimizer, at learning rate 0 (see
    `Schedule.group_learning_rate`): sharding is laid out once for the whole run. The optimizer begins anew with the
    backbone, whose moments of nothing would otherwise count as those of many steps (see `Engine.restart_optimizer`).
    """

    def __init__(self, module: nn.Module, head_parameter_names: Collection[str]) -> None:
        """Take the model with its frozen parameters; an engine may shard them afterwards."""
        self._module = module
        head_names = {name.rpartition(".")[0] for name in head_parameter_names}
        self._heads = [module.get_submodule(name) for name in sorted(head_names)]
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        self._frozen_norms = [
            norm for name, norm in module.named_modules() if isinstance(norm, BATCHNORMS) and _is_frozen(module, name)
        ]

    def start_epoch(self, *, only_head: bool) -> None:
        """Set the mode of every layer; needed again after each `module.train()`."""
        self._module.train()
        for norm in self._frozen_norms:
            norm.eval()
        if only_head:
            freeze_statistics(self._module)
            if not self._hooks:
                self._hooks = [head.register_forward_pre_hook(_detach_inputs) for head in self._heads]
            return
        for hook in self._hooks:
            hook.remove()
        self._hooks = []


def freeze_statistics(module: nn.Module) -> None:
    """Set every BatchNorm to evaluation mode: it normalizes with its running statistics and does not update them."""
    for child in module.modules():
        if isinstance(child, BATCHNORMS):
            child.eval()


def is_adapters(name: str) -> bool:
    """Return whether a parameter is that of an adapter, by its name."""
    return ".lora_A." in name or ".lora_B." in name


def _is_frozen(module: nn.Module, name: str) -> bool:
    """Return whether no parameter of a layer is trained; of the smallest part around it if it has none itself."""
    while not (parameters := [*module.get_submodule(name).named_parameters()]) and name:
        name = name.rpartition(".")[0]
    return not any(parameter.requires_grad and not is_adapters(own) for own, parameter in parameters)


def _detach_inputs(_module: nn.Module, inputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    return tuple(value.detach() for value in inputs)
