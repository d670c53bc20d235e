"""Parameter groups, the optimizer, and the learning rate as a function of the step."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from training.config import TrainConfig


@dataclass(frozen=True)
class Schedule:
    """Linear warm-up, then half a cosine (Loshchilov and Hutter 2017, https://arxiv.org/abs/1608.03983, eq. 5).

    With `base_batch_size` the peak follows the linear scaling rule of Goyal et al. 2017
    (https://arxiv.org/abs/1706.02677, section 2.1): peak = learning_rate * global_batch / base_batch_size.
    """

    peak: float
    total_steps: int
    warmup_steps: int
    final_scale: float
    head_steps: int = 0

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of optimizer step `step`, counted from 0 over the whole run."""
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        progress = (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
        return self.peak * (self.final_scale + (1 - self.final_scale) * cosine)

    def group_learning_rate(self, step: int, group_scale: float) -> float:
        """Return a parameter group's learning rate: the backbone's is 0 while only the head learns."""
        is_backbone_at_rest = step < self.head_steps and group_scale != 1.0
        return 0.0 if is_backbone_at_rest else self.learning_rate(step) * group_scale


def build_schedule(config: TrainConfig, steps_per_epoch: int, global_batch: int, head_epochs: int) -> Schedule:
    """Build the schedule of a run.

    Args:
        config: the run's configuration.
        steps_per_epoch: optimizer steps per epoch.
        global_batch: images per optimizer step over all ranks and micro-steps.
        head_epochs: epochs in which only the new head learns; 0 where all layers do from the start.
    """
    scale = global_batch / config.base_batch_size if config.base_batch_size else 1.0
    return Schedule(
        peak=config.learning_rate * scale,
        total_steps=config.epochs * steps_per_epoch,
        warmup_steps=_warmup_steps(config, steps_per_epoch),
        final_scale=config.final_learning_rate_scale,
        head_steps=head_epochs * steps_per_epoch,
    )


def _warmup_steps(config: TrainConfig, steps_per_epoch: int) -> int:
    if config.warmup_epochs == "auto":
        return min(steps_per_epoch, config.epochs * steps_per_epoch // 10)
    return round(config.warmup_epochs * steps_per_epoch)


def schedule_notes(schedule: Schedule) -> list[str]:
    """Return what the user may not expect of a schedule."""
    if 2 * schedule.warmup_steps <= schedule.total_steps:
        return []
    return [
        f"the learning rate is still warming up in {schedule.warmup_steps} of {schedule.total_steps} steps: "
        "a lower --warmup-epochs, or more --epochs, trains at the rate that was asked for"
    ]


def build_optimizer(
    module: nn.Module, config: TrainConfig, head_parameter_names: Collection[str], *, discriminative: bool
) -> torch.optim.Optimizer:
    """Build the optimizer, through timm, over groups that tell decayed from undecayed and head from backbone.

    Each group carries 'rate_scale', the factor on the schedule's learning rate.

    Args:
        module: the model.
        config: the run's configuration.
        head_parameter_names: names of the classifier's parameters.
        discriminative: whether the backbone learns at `backbone_learning_rate_scale` times the head's rate.
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
        from training.lamb import ShardedLamb

        return ShardedLamb(param_groups, lr=config.learning_rate, weight_decay=config.weight_decay)
    # "momentum" is timm's name of SGD without Nesterov's rule, which refuses a momentum of 0.
    is_plain_sgd = config.optimizer == "sgd" and config.momentum == 0
    # timm hands the momentum to the rules that have one, and only to them.
    return create_optimizer_v2(
        param_groups,
        opt="momentum" if is_plain_sgd else config.optimizer,
        lr=config.learning_rate,
        weight_decay=config.weight_decay,
        momentum=config.momentum,
        fused=True,  # one pass over each flat tensor: 0.87 of the time of a step that PyTorch's default takes
    )


def moment_kinds(optimizer: torch.optim.Optimizer) -> tuple[str, ...]:
    """Return what the rule keeps of each weight, in the names of its own state; SGD without momentum keeps nothing."""
    group = optimizer.param_groups[0]
    if "betas" in group:
        return ("exp_avg", "exp_avg_sq")
    return ("momentum_buffer",) if group["momentum"] else ()


def create_state(optimizer: torch.optim.Optimizer, weights: Iterable[torch.Tensor]) -> None:
    """Create the rule's state of these weights, all zeros, as its first step would.

    So there is no engine without moments, and a first step that a fused rule is told to skip does no harm: SGD's would
    take the uninitialized memory for its momentum.
    """
    group, kinds = optimizer.param_groups[0], moment_kinds(optimizer)
    for weight in weights:
        optimizer.state[weight] = {kind: torch.zeros_like(weight) for kind in kinds}
        if "betas" in group:
            # The fused kernels read the count beside the weights, the other rules keep it on the CPU.
            place = weight.device if group.get("fused") else "cpu"
            optimizer.state[weight]["step"] = torch.zeros((), device=place)


def set_applied_steps(optimizer: torch.optim.Optimizer, applied_steps: int) -> None:
    """Set the count of updates that Adam's bias correction needs; the other rules have none."""
    for state in optimizer.state.values():
        if "step" in state:
            state["step"].fill_(applied_steps)
