"""What a checkpoint contains, whole, and how much of its files was read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from safetensors import safe_open

from zerovision.training.checkpoint.shards import CheckpointReader
from zerovision.training.engines.parameter_shards import TakeBox, index_of


def whole_tensors(reader: CheckpointReader) -> dict[str, dict[str, torch.Tensor]]:
    """Return weights and moments by kind and name."""
    return {
        kind: {
            name: take(name, index_of([0] * len(shape), shape))
            for name, shape in reader.shapes.items()
            if kind == "weights" or name in reader.with_moments
        }
        for kind, take in reader.tensors.items()
    }


def in_memory(whole: Mapping[str, Mapping[str, torch.Tensor]]) -> dict[str, TakeBox]:
    """Return what `Engine.load_state` takes boxes with, given weights and moments by kind and name."""
    return {kind: lambda name, box, named=named: named[name][box] for kind, named in whole.items()}


class CountingFile:
    """In place of `safe_open`: adds up the bytes of all tensors, and of the slices of them, that are read."""

    bytes_read = 0

    def __init__(self, *arguments: Any) -> None:
        self._file = safe_open(*arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def get_tensor(self, key: str) -> torch.Tensor:
        return _counted(self._file.get_tensor(key))

    def get_slice(self, key: str) -> CountingSlice:
        return CountingSlice(self._file.get_slice(key))


class CountingSlice:
    """A slice object of `CountingFile`."""

    def __init__(self, stored: Any) -> None:
        self._stored = stored

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stored, name)

    def __getitem__(self, index: Any) -> torch.Tensor:
        return _counted(self._stored[index])


def _counted(tensor: torch.Tensor) -> torch.Tensor:
    CountingFile.bytes_read += tensor.nbytes
    return tensor
