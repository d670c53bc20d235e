"""Whether two finished runs are the same: every byte of the weights, every tensor of the last checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import safetensors

from tests.chaos.damage import newest_checkpoint

WEIGHTS = "model.safetensors"
NAMED = 5  # of many tensors that differ


def differences(run: Path, oracle: Path) -> list[str]:
    """Return one line for each thing in which a finished run differs from the uninterrupted one; none if none.

    Compared are `model.safetensors` (all bytes: weights, names, metadata), the position of the last checkpoint, and
    dtype, shape and bytes of every tensor in its shards: weights, buffers and moments.

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
    our_shards, their_shards = (sorted(path.name for path in folder.glob("*.safetensors")) for folder in (ours, theirs))
    if our_shards != their_shards:
        return [f"last checkpoint: shards {our_shards}, expected {their_shards}"]
    lines = (
        f"{ours.name}/{name}: {line}"
        for name in their_shards
        for line in _tensor_differences(ours / name, theirs / name)
    )
    return list(lines)


def _tensor_differences(ours: Path, theirs: Path) -> list[str]:
    try:
        first = _tensors(ours)
    except safetensors.SafetensorError as error:
        return [f"cannot be read: {error}"]
    second = _tensors(theirs)
    lines = [
        f"{name} is {'missing' if name in second else 'too many'}" for name in sorted(first.keys() ^ second.keys())
    ]
    differing = [name for name in sorted(first.keys() & second.keys()) if first[name] != second[name]]
    if differing:
        named = ", ".join(differing[:NAMED]) + (", ..." if len(differing) > NAMED else "")
        lines.append(f"{len(differing)} of {len(second)} tensors differ: {named}")
    return lines


def _tensors(path: Path) -> dict[str, Any]:
    """Return {name: {"dtype", "shape", "data": bytes}} of a safetensors file."""
    return dict(safetensors.deserialize(path.read_bytes()))
