"""The memory that a network's forward and backward need beside its weights, counted without data."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Activations(NamedTuple):
    """Bytes of one micro-batch.

    Attributes:
        saved: what forward keeps for backward: distinct tensors, with the images.
        workspace: what backward needs beside that at its worst moment: gradients of activations, and of the weights
            that are computed just then.
    """

    saved: int
    workspace: int


def activations(
    network: nn.Module,
    batch_size: int,
    image_size: int,
    precision: str = "fp32",
    device: str = "cpu",
    image_channels: int = 3,
) -> Activations:
    """Count by a forward and a backward on tensors without data, in which gradients are added to existing ones.

    Args:
        network: of `without_data`, float32 images [B, C, S, S] -> logits; activation checkpointing may be enabled. It
            is not to be used afterwards.
        batch_size: images per micro-batch, B.
        image_size: S, in pixels.
        precision: 'fp32', or 'bf16' or 'fp16' by autocast, whose copies of the weights count too.
        device: 'cpu' or 'cuda', whose autocast normalizes in fp32.
        image_channels: C.
    """
    lower = precision != "fp32"  # fake tensors, which know their device, for autocast; else meta ones, twice as fast
    with FakeTensorMode() if lower else nullcontext():
        if lower:
            _fill_with_fakes(network)
        if lower and device == "cuda":
            _normalize_in_float32(network)
        shape = (batch_size, image_channels, image_size, image_size)
        images = torch.empty(shape, device="cpu" if lower else "meta")
        gradients = []
        for parameter in network.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.empty_like(parameter)
                gradients.append(parameter.grad)
        live = LiveBytes()
        live.ignore([images, *network.parameters(), *network.buffers(), *gradients])
        with live, warnings.catch_warnings(action="ignore"):
            with torch.autocast("cpu", dtype=DTYPES.get(precision), enabled=lower):
                logits = network(images)
            saved = live.now
            logits.float().sum().backward()
    return Activations(saved + images.nbytes, max(live.peak - saved, 0))


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operations inside the mode create, until they are freed.

    Attributes:
        now: bytes at this moment.
        peak: most bytes so far.
    """

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._sizes: dict[int, int] = {}

    def ignore(self, tensors: Iterable[torch.Tensor]) -> None:
        """Leave out what exists already; it must outlive the mode."""
        self._sizes.update({tensor.untyped_storage()._cdata: 0 for tensor in tensors})

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = operation(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._note(tensor.untyped_storage())
        return result

    def _note(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._sizes:
            return
        self._sizes[key] = storage.nbytes()
        self.now += storage.nbytes()
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, key)

    def _free(self, key: int) -> None:
        self.now -= self._sizes.pop(key)


def _normalize_in_float32(network: nn.Module) -> None:
    """Cast as CUDA's autocast does and the CPU's does not (https://docs.pytorch.org/docs/stable/amp.html)."""
    for part in network.modules():
        if isinstance(part, nn.LayerNorm | nn.GroupNorm):
            part.register_forward_pre_hook(lambda _, inputs: (inputs[0].float(), *inputs[1:]))


def _fill_with_fakes(network: nn.Module) -> None:
    """Replace weights and buffers on the meta device by fake tensors; inside a `FakeTensorMode`."""
    for part in network.modules():
        tables: tuple[dict[str, Any], ...] = (part._parameters, part._buffers)
        for table in tables:
            table.update({name: _fake(tensor) for name, tensor in table.items() if tensor is not None})


def _fake(tensor: torch.Tensor) -> torch.Tensor:
    empty = torch.empty(tensor.shape, dtype=tensor.dtype)
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
