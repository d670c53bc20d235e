"""What only a run on the device tells before a network is cut: how long its pieces take, and how tensors lie in memory.

Rank 0 has all layers at that time, runs one micro-batch through them together with its tensor group, and tells the
others.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from zerovision.training.engines.model_buffers import undone
from zerovision.training.engines.pipeline.boundary import Boundary, TensorLayout, layout_of
from zerovision.training.engines.precision import DTYPES
from zerovision.training.world.collectives import broadcast_object
from zerovision.training.world.world import World

TIMED_RUNS = 3
_DTYPES = {str(dtype): dtype for dtype in DTYPES.values()}


class _Passage:
    """Notes when a forward passes each place, and the tensors that do."""

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
            features.register_hook(partial(self._note_gradient, name))

    def _note_gradient(self, name: str, gradient: torch.Tensor) -> None:
        self.gradients[name] = layout_of(gradient)

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def _runs(world: World) -> bool:
    """Return whether this rank is rank 0, or computes layers together with it."""
    return world.data.is_main and world.pipeline.is_main


def measure_pieces(
    network: nn.Module, module: nn.Module, places: Sequence[str], images: torch.Tensor, world: World
) -> list[float]:
    """Return the seconds of a forward between the places, on every rank as rank 0 has measured them; a collective.

    The least of a few runs counts. Of backward nothing is known but that it takes about twice as long.

    Args:
        network: runs the module.
        module: with the places.
        places: names of modules, in the order in which they are entered.
        images: [B, C, H, W] on the ranks' device.
        world: the ranks.
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
    """Return what goes over each cut, on every rank as rank 0 has seen it; a collective. Arguments as above."""
    rows: list[Any] = []
    if _runs(world):
        with undone(module, images.device):
            trained = _Passage(module, cuts)
            # The gradient of the images: that of no weight is computed, or kept.
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
            rows.append(
                [str(trained.dtypes[name]), *([list(layout.order), list(layout.repeated)] for layout in layouts)]
            )
    received = broadcast_object(rows, world)
    return [
        Boundary(_DTYPES[dtype], *(TensorLayout(tuple(order), tuple(repeated)) for order, repeated in layouts))
        for dtype, *layouts in received
    ]
