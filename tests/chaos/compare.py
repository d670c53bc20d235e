"""Whether two finished runs are the same: every byte of the weights, every tensor of the last checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import safetensors
import torch
from safetensors.torch import load_file

from tests.chaos.damage import newest_checkpoint
from tests.stored_tensors import whole_tensors
from zerovision.training.checkpoint.manifest import UnusableCheckpoint, read_manifest
from zerovision.training.checkpoint.shards import BUFFER, CheckpointReader

WEIGHTS = "model.safetensors"
NAMED = 5  # of many tensors that differ


def differences(run: Path, oracle: Path) -> list[str]:
    """Return one line for each thing in which a finished run differs from the uninterrupted one; none if none.

    Compared are `model.safetensors` (all bytes: weights, names, metadata), the position of the last checkpoint, and
    dtype, shape and bytes of every tensor in it, whatever the number of ranks: weights, moments and buffers.

    Args:
        run: the run's folder.
        oracle: the uninterrupted run's folder.
    """
    return [*_weights_differences(run / WEIGHTS, oracle / WEIGHTS), *_checkpoint_differences(run, oracle)]


def _weights_differences(ours: Path, theirs: Path) -> list[str]:
    if not ours.is_file():
        return [f"no {WEIGHTS}"]
    if ours.read_bytes() == theirs.read_bytes():
        return []
    return [f"{WEIGHTS}: {line}" for line in _tensor_differences(ours, theirs)] or [f"{WEIGHTS}: other metadata"]


def _checkpoint_differences(run: Path, oracle: Path) -> list[str]:
    ours, theirs = (newest_checkpoint(folder / "checkpoints") for folder in (run, oracle))
    if theirs is None:
        raise FileNotFoundError(f"the uninterrupted run {oracle} has no checkpoint")
    if ours is None or ours.name != theirs.name:
        return [f"last checkpoint: {ours.name if ours else 'none'}, expected {theirs.name}"]
    try:
        content = _content(ours)
    except UnusableCheckpoint as error:
        return [f"last checkpoint: {error}"]
    return [f"{ours.name}: {line}" for line in _differences(content, _content(theirs))]


def _content(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Return weights, moments and all versions of the buffers, put together from the shards of all ranks."""
    reader = CheckpointReader(checkpoint, read_manifest(checkpoint))
    whole = {f"{kind}/{name}": one for kind, tensors in whole_tensors(reader).items() for name, one in tensors.items()}
    versions = max(map(len, reader._boxes[BUFFER].values()), default=0)
    buffers = reader.buffers(range(versions), versions)
    return whole | {f"buffer/{name}": buffer for name, buffer in buffers.items()}


def _tensor_differences(ours: Path, theirs: Path) -> list[str]:
    try:
        return _differences(*(load_file(path) for path in (ours, theirs)))
    except safetensors.SafetensorError as error:
        return [f"cannot be read: {error}"]


def _differences(ours: Mapping[str, torch.Tensor], theirs: Mapping[str, torch.Tensor]) -> list[str]:
    lines = [f"{name} is {'missing' if name in theirs else 'too many'}" for name in sorted({*ours} ^ {*theirs})]
    differing = [name for name in sorted({*ours} & {*theirs}) if not _have_equal_bits(ours[name], theirs[name])]
    if differing:
        named = ", ".join(differing[:NAMED]) + (", ..." if len(differing) > NAMED else "")
        lines.append(f"{len(differing)} of {len(theirs)} tensors differ: {named}")
    return lines


def _have_equal_bits(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    if (ours.dtype, ours.shape) != (theirs.dtype, theirs.shape):
        return False
    return ours.contiguous().numpy().tobytes() == theirs.contiguous().numpy().tobytes()
