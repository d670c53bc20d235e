"""Activation checkpointing: the repeated blocks of a network recompute their activations in the backward pass."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from zerovision.models.dry_run import copied_buffers
from zerovision.models.ensemble import Ensemble


def enable_activation_checkpointing(module: nn.Module) -> int:
    """Keep only the inputs of the network's repeated blocks, and recompute their activations in backward.

    Blocks are the children of the network's top-level containers (timm's blocks, stages, layers). In a flat stack of
    layers (VGG), a block ends at each pooling layer; each member of an ensemble has its own blocks. The loss, gradients
    and BatchNorm statistics do not change, nor do names and shapes in the state dict.

    Args:
        module: the network; changed in place.

    Returns:
        The number of recomputed blocks.
    """
    if isinstance(module, Ensemble):
        return sum(enable_activation_checkpointing(member) for member in module.members)
    count = 0
    for child in module.children():
        layers = list(child.children())
        is_flat = isinstance(child, nn.Sequential) and not any(list(layer.children()) for layer in layers)
        if is_flat and layers:
            count += _checkpoint_pooling_stages(child)
            continue
        repeated = layers if isinstance(child, nn.Sequential | nn.ModuleList) else [child]
        for block in repeated:
            if any(True for _ in block.children()):  # a single layer (an LSTM, a linear head) has nothing to recompute
                # Replace the forward, not the block: a wrapper would change the names in the state dict. Use a partial
                # and a bound method, not a closure, so that copy.deepcopy binds them to the copied block.
                block.forward = functools.partial(_recomputed, block.forward, block)
                count += 1
    return count


def repeated_blocks(module: nn.Module) -> list[nn.Module]:
    """Return the blocks that can be recomputed: the children of each top-level container that contain layers.

    An ensemble has the blocks of all its members. A flat stack of layers has no blocks.
    """
    if isinstance(module, Ensemble):
        return [block for member in module.members for block in repeated_blocks(member)]
    containers = [child for child in module.children() if isinstance(child, nn.Sequential | nn.ModuleList)]
    return [block for container in containers for block in container.children() if any(True for _ in block.children())]


def is_recomputed(module: nn.Module) -> bool:
    """Return whether a module, or every layer in it, is recomputed in backward."""
    forward = module.forward
    return isinstance(forward, functools.partial) and forward.func in (_recomputed, _run_stages)


def _checkpoint_pooling_stages(stack: nn.Module) -> int:
    """Recompute a flat stack of layers in stages that end with a pooling layer; return the number of stages."""
    stages: list[list[nn.Module]] = [[]]
    for layer in stack.children():
        stages[-1].append(layer)
        if isinstance(layer, nn.MaxPool2d | nn.AvgPool2d):
            stages.append([])
    modules = [nn.Sequential(*stage) for stage in stages if stage]
    stack.forward = functools.partial(_run_stages, modules)
    return len(modules)


def _run_stages(stages: Sequence[nn.Module], features: torch.Tensor) -> torch.Tensor:
    for stage in stages:
        features = _recomputed(stage, stage, features)
    return features


def _recomputed(forward: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Run a module's `forward`, and keep the module's inputs instead of its activations for backward."""
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)

    def contexts() -> tuple[contextlib.AbstractContextManager[None], contextlib.AbstractContextManager[None]]:
        # Recomputation must not update the running statistics of BatchNorm layers again. It gets copies instead of
        # None, because it must save as many tensors as the first pass did.
        norms = [part for part in module.modules() if getattr(part, "running_mean", None) is not None]
        return contextlib.nullcontext(), copied_buffers(norms)

    return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)
