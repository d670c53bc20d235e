"""What goes from one stage to the next: tensors as rows of numbers, which lie in memory again as they did before.

Kernels choose their order of summation by how tensors lie in memory. So a stage gets its input, and the gradient of its
output, laid out as they would be without the cut, and computes the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class TensorLayout:
    """How a tensor lies in memory.

    Attributes:
        order: its dimensions, from the outermost to the innermost.
        repeated: dimensions along which one value stands for all, as in the gradient of a mean.
    """

    order: tuple[int, ...]
    repeated: tuple[int, ...] = ()

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor as [n], contiguous."""
        return tensor.permute(self.order).reshape(-1)

    def unpack(self, row: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Return the tensor of this shape again, given what `pack` returned: a view of it."""
        inverse = [self.order.index(dimension) for dimension in range(len(self.order))]
        tensor = row.view([shape[dimension] for dimension in self.order]).permute(inverse)
        for dimension in self.repeated:
            tensor = tensor.narrow(dimension, 0, 1)
        return tensor.expand(*shape)


def layout_of(tensor: torch.Tensor) -> TensorLayout:
    """Return how a tensor lies in memory."""
    strides = tensor.stride()
    order = sorted(range(tensor.ndim), key=lambda dimension: -strides[dimension])  # stable
    repeated = [dimension for dimension in order if strides[dimension] == 0 and tensor.shape[dimension] > 1]
    return TensorLayout(tuple(order), tuple(repeated))


@dataclass(frozen=True)
class Boundary:
    """What goes over a cut.

    Attributes:
        dtype: of features and their gradients.
        features: their layout in training.
        gradients: that of their gradients.
        evaluated: that of the features in evaluation.
    """

    dtype: torch.dtype
    features: TensorLayout
    gradients: TensorLayout
    evaluated: TensorLayout

    def send(self, features: torch.Tensor) -> torch.Tensor:
        """Return features as [n], contiguous; the gradient that comes back is laid out again."""
        return _Send.apply(features, self)

    def receive(self, row: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Return the features that `send` was given; the gradient becomes [n], contiguous."""
        return _Receive.apply(row, self, tuple(shape))


class _Send(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, features: torch.Tensor, boundary: Boundary) -> torch.Tensor:
        context.boundary, context.shape = boundary, features.shape
        return boundary.features.pack(features)

    @staticmethod
    def backward(context: Any, row: torch.Tensor) -> Any:
        return context.boundary.gradients.unpack(row, context.shape), None


class _Receive(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, row: torch.Tensor, boundary: Boundary, shape: tuple[int, ...]) -> torch.Tensor:
        context.boundary = boundary
        features = boundary.features.unpack(row, shape)
        return features if boundary.features.repeated else features.clone()  # the next layer may write into it

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        return context.boundary.gradients.pack(gradient), None, None
