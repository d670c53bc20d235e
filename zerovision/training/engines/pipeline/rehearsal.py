"""Tensors between stages, and measurements on the device before a network is cut.

Kernels choose their order of summation by the memory layout of tensors. A stage therefore receives its input, and the
gradient of its output, in the layout that these tensors would have without the cut, so that results are bit-identical.
Tensors are sent as flat rows.

The run time of a network's pieces and the layout of tensors can only be measured on the device. While rank 0 still has
all layers, it runs one micro-batch, together with the ranks that share its layers, and sends the results to all ranks.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from zerovision.training.engines.engine import EngineSetup
from zerovision.training.engines.model_buffers import undone
from zerovision.training.engines.precision import DTYPES
from zerovision.training.world.collectives import broadcast_object
from zerovision.training.world.world import World


class TensorLayout(NamedTuple):
    """The memory layout of a tensor."""

    order: tuple[int, ...]  # the tensor's dimensions, from the outermost to the innermost
    repeated: tuple[int, ...] = ()  # dimensions along which one value is repeated, as in the gradient of a mean

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the tensor's elements as a contiguous vector [n]."""
        return tensor.permute(self.order).reshape(-1)

    def unpack(self, row: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Return a tensor of this shape, as a view of a row that `pack` returned."""
        inverse = [self.order.index(dimension) for dimension in range(len(self.order))]
        tensor = row.view([shape[dimension] for dimension in self.order]).permute(inverse)
        for dimension in self.repeated:
            tensor = tensor.narrow(dimension, 0, 1)
        return tensor.expand(*shape)


def layout_of(tensor: torch.Tensor) -> TensorLayout:
    """Return the memory layout of a tensor."""
    strides = tensor.stride()
    order = sorted(range(tensor.ndim), key=lambda dimension: -strides[dimension])  # stable
    repeated = [dimension for dimension in order if strides[dimension] == 0 and tensor.shape[dimension] > 1]
    return TensorLayout(tuple(order), tuple(repeated))


@dataclass(frozen=True)
class Boundary:
    """The tensors that cross a cut."""

    dtype: torch.dtype  # of features and their gradients
    features: TensorLayout  # of features in training
    gradients: TensorLayout  # of the gradients of features
    evaluated: TensorLayout  # of features in evaluation

    def send(self, features: torch.Tensor) -> torch.Tensor:
        """Return features as a contiguous vector [n]; backward restores the layout of their gradient."""
        return _Send.apply(features, self)

    def receive(self, row: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
        """Return the features that were passed to `send`; backward packs their gradient into a vector [n]."""
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
        return features if boundary.features.repeated else features.clone()  # the next layer may overwrite them

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        return context.boundary.gradients.pack(gradient), None, None


TIMED_RUNS = 3
FEWEST_IMAGES = 2  # in a rehearsal, because BatchNorm needs more than one


class _Passage:
    """Records when a forward pass reaches each place, and the layout of the tensors there."""

    def __init__(self, module: nn.Module, places: Sequence[str]) -> None:
        self.times: list[float] = []
        self.features: dict[str, TensorLayout] = {}
        self.gradients: dict[str, TensorLayout] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        self._hooks = [
            module.get_submodule(name).register_forward_pre_hook(partial(self._note, name), prepend=True)
            for name in places
        ]

    def _note(self, name: str, _module: nn.Module, inputs: Any) -> None:
        features = inputs[0]
        if features.is_cuda:
            torch.cuda.synchronize(features.device)
        self.times.append(time.perf_counter())
        self.features[name], self.dtypes[name] = layout_of(features), features.dtype
        if features.requires_grad:
            features.register_hook(lambda gradient: self.gradients.update({name: layout_of(gradient)}))

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def images_to_try(setup: EngineSetup) -> torch.Tensor:
    """Return a micro-batch of random images on this rank's device, in the layout of real images."""
    shape = (max(setup.batch_size, FEWEST_IMAGES), *(setup.image_shape or ()))
    return torch.empty(shape, device=setup.world.device, memory_format=torch.channels_last).uniform_()


def _runs(world: World) -> bool:
    """Return whether this rank is rank 0, or computes layers together with rank 0; only these ranks measure."""
    return world.data.is_main and world.dimension("pipeline_parallel").is_main


def measure_pieces(
    network: nn.Module, module: nn.Module, places: Sequence[str], images: torch.Tensor, world: World
) -> list[float]:
    """Return how many seconds each piece of a forward pass of images [B, C, H, W] takes; a collective.

    The pieces are before, between and after `places`, which are in the order in which they are entered. Rank 0 measures
    each time as the minimum over a few runs. Backward is not measured; it takes about twice as long.
    """
    seconds: list[float] = []
    if _runs(world):
        runs = []
        with undone(module, images.device), torch.no_grad():
            for _ in range(TIMED_RUNS):
                passage = _Passage(module, places)
                start = time.perf_counter()
                network(images).sum().item()  # waits for a GPU
                runs.append([start, *passage.times, time.perf_counter()])
                passage.close()
        seconds = [min(run[piece + 1] - run[piece] for run in runs) for piece in range(len(places) + 1)]
    return broadcast_object(seconds, world)


def boundaries_at(
    network: nn.Module, module: nn.Module, cuts: Sequence[str], images: torch.Tensor, world: World
) -> list[Boundary]:
    """Return the boundary at each cut, as measured on rank 0 with images [B, C, H, W]; a collective."""
    rows: list[Any] = []
    if _runs(world):
        with undone(module, images.device):
            trained = _Passage(module, cuts)
            # Only the gradient of the images is requested, so that no weight's gradient is computed or kept.
            leaf = images.detach().requires_grad_()
            torch.autograd.grad(network(leaf).float().square().mean(), leaf)
            trained.close()
            module.eval()
            evaluated = _Passage(module, cuts)
            with torch.no_grad():
                network(images)
            evaluated.close()
        for name in cuts:
            features = trained.features[name]
            layouts = (features, trained.gradients.get(name, features), evaluated.features[name])
            rows.append((str(trained.dtypes[name]), *layouts))
    dtypes = {str(dtype): dtype for dtype in DTYPES.values()}
    return [
        Boundary(dtypes[dtype], *(TensorLayout(*map(tuple, layout)) for layout in layouts))
        for dtype, *layouts in broadcast_object(rows, world)
    ]
