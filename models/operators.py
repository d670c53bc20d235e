"""What a network's forward does, operator by operator: operations, and values that it reads and writes.

The network runs once on tensors without data; operations and activations of a batch are as many times those of one
image, and weights are read once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

IMAGES_OF_A_RUN = 2  # BatchNorm in training mode refuses a single value per channel
CONVOLUTION, POINTWISE, DEPTHWISE, PRODUCT, NORM, POOL, OTHER = KINDS = (
    *("convolution", "pointwise", "depthwise", "product"),
    *("norm", "pool", "other"),
)


@dataclass(frozen=True)
class Operator:
    """One operator of a forward.

    Attributes:
        kind: one of `KINDS`. Convolutions are 'pointwise' with kernels of one pixel, 'depthwise' with groups; a
            'product' is one of matrices.
        flops: operations for one image, a multiplication and an addition counted as two; 0 unless it is one of these.
        activations: values read and written for one image.
        weights: values of parameters that no operator before it has read.
    """

    kind: str
    flops: float
    activations: float
    weights: int


def count_operators(module: nn.Module, image_size: int, image_channels: int = 3) -> tuple[Operator, ...] | None:
    """Return what a forward in training mode computes, views left out; None if it cannot run without data.

    Args:
        module: of `models.dry_run.without_data`, float32 images [B, C, S, S] -> logits; it is left as it is.
        image_size: S, in pixels.
        image_channels: C.
    """
    counter = _OperatorCounter([*module.parameters(), *module.buffers()])
    images = torch.empty(IMAGES_OF_A_RUN, image_channels, image_size, image_size, device="meta")
    recurrent = [part for part in module.modules() if isinstance(part, nn.RNNBase)]
    hooks = [part.register_forward_pre_hook(counter.begin_recurrent) for part in recurrent]
    hooks += [part.register_forward_hook(counter.end_recurrent) for part in recurrent]
    try:
        with torch.no_grad(), counter:
            module(images)
    except Exception:  # whatever a user's timm model does with its data
        return None
    finally:
        for hook in hooks:
            hook.remove()
    return tuple(counter.operators)


class _OperatorCounter(TorchDispatchMode):
    """Notes every operator that computes something."""

    def __init__(self, weights: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._unread = {id(weight): weight.numel() for weight in weights}
        self._weight_of = {id(weight): id(weight) for weight in weights}  # also of a view of one
        self._views: list[torch.Tensor] = []  # kept, so that no other tensor gets the identity of one
        self.operators: list[Operator] = []
        self._recurrent_since = 0

    def begin_recurrent(self, *_: object) -> None:
        """Note where a recurrent layer begins, which every device computes as one operator."""
        self._recurrent_since = len(self.operators)

    def end_recurrent(self, _layer: nn.Module, inputs: Any, outputs: Any) -> None:
        """Put one matrix product in the place of its steps."""
        steps = self.operators[self._recurrent_since :]
        tensors = [leaf for leaf in tree_leaves((inputs, outputs)) if isinstance(leaf, torch.Tensor)]
        values = sum(leaf.numel() for leaf in tensors) / IMAGES_OF_A_RUN
        flops, weights = sum(step.flops for step in steps), sum(step.weights for step in steps)
        self.operators[self._recurrent_since :] = [Operator(PRODUCT, flops, values, weights)]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if func.is_view:  # a transposed weight is a weight
            if id(args[0]) in self._weight_of:
                views = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
                self._weight_of |= {id(view): self._weight_of[id(args[0])] for view in views}
                self._views += views
            return result
        tensors = {id(leaf): leaf for leaf in tree_leaves((args, kwargs, result)) if isinstance(leaf, torch.Tensor)}
        count = flop_registry.get(func._overloadpacket)
        flops = int(count(*args, **kwargs, out_val=result)) if count else 0
        activations = sum(leaf.numel() for key, leaf in tensors.items() if key not in self._weight_of)
        if activations > 1 or flops:  # not BatchNorm's counting of batches
            kind = _kind_of(func._overloadpacket, args, flops)
            weights = sum(self._unread.pop(self._weight_of[key], 0) for key in tensors if key in self._weight_of)
            self.operators.append(Operator(kind, flops / IMAGES_OF_A_RUN, activations / IMAGES_OF_A_RUN, weights))
        return result


def _kind_of(operator: Any, args: Any, flops: int) -> str:
    if operator is torch.ops.aten.convolution:
        weight, groups = args[1], args[8]
        if groups > 1:
            return DEPTHWISE
        return POINTWISE if weight.shape[2:].numel() == 1 else CONVOLUTION
    if flops:
        return PRODUCT
    return next((kind for kind in (NORM, POOL) if kind in str(operator)), OTHER)
