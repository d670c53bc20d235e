"""One rank's file of a checkpoint: copying the state, writing it, and assembling parameters from all files.

A rank stores its flat pieces of the parameter groups as they are in memory, without any communication: `weights.<i>`
and `<moment>.<i>`, one-dimensional fp32. The layout in the file's metadata maps them to parts of parameters, so that
any strategy and number of ranks can read them. BatchNorm's buffers differ from rank to
rank between evaluations: each rank stores its own. Frozen parameters are groups without moments. Elements of a
parameter are counted as the usual shape has them, or in the memory order of channels_last if the layout has it there.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from models.weights_metadata import METADATA_KEY
from training.checkpoint.atomic_write import sync_to_disk
from training.checkpoint.manifest import DamagedCheckpoint, Manifest, ShardFacts, file_size, shard_name
from training.errors import one_line
from training.parallel.engine import CONVOLUTION_DIMENSIONS, Engine, Piece

BUFFER_PREFIX = "buffer/"
EPOCH_SUMS = "epoch_sums"


class Snapshot:
    """A copy of this rank's part of the training state in CPU memory, in tensors that are reused."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.layout: dict[str, Any] = {}
        self._copied: torch.cuda.Event | None = None

    def take(self, engine: Engine, epoch_sums: torch.Tensor) -> None:
        """Copy the current state; on a GPU the copies are queued, before the next step changes the state.

        Args:
            engine: the engine; no collective is needed.
            epoch_sums: what `ScoreSums.state` returned, float64 [4].
        """
        shards = engine.flat_shards()
        sources = {f"weights.{number}": shard.weights for number, shard in enumerate(shards)}
        for number, shard in enumerate(shards):
            sources |= {f"{kind}.{number}": moment for kind, moment in shard.moments.items()}
        sources |= {BUFFER_PREFIX + name: buffer for name, buffer in engine.module.named_buffers()}
        sources[EPOCH_SUMS] = epoch_sums
        self.tensors = {name: self._copy(name, tensor) for name, tensor in sources.items()}
        if epoch_sums.device.type == "cuda":
            self._copied = torch.cuda.current_stream(epoch_sums.device).record_event()
        groups = [[tuple(piece) for piece in shard.pieces] for shard in shards]
        self.layout = {
            "groups": groups,
            "moments": sorted(shards[0].moments),
            "without_moments": [number for number, shard in enumerate(shards) if not shard.moments],
            "channels_last": sorted(frozenset().union(*(shard.channels_last for shard in shards))),
        }

    def wait(self) -> None:
        """Wait until the copies are complete; called by the thread that writes them, not by the one that trains."""
        if self._copied is not None:
            self._copied.synchronize()

    def _copy(self, name: str, source: torch.Tensor) -> torch.Tensor:
        source = source.detach()
        kept = self.tensors.get(name)
        if kept is None or kept.shape != source.shape:
            kept = torch.empty(source.shape, dtype=source.dtype, pin_memory=source.device.type == "cuda")
        return kept.copy_(source, non_blocking=True)


def write_shard(path: Path, snapshot: Snapshot) -> ShardFacts:
    """Write a rank's file, and wait until it is on the disk.

    Raises:
        OSError, SafetensorError: if that fails, as on a full disk.
    """
    snapshot.wait()
    save_file(snapshot.tensors, path, metadata={METADATA_KEY: json.dumps(snapshot.layout)})
    sync_to_disk(path)
    return ShardFacts(path.stat().st_size, _sha256(path))


def verify_shard(folder: Path, rank: int, facts: ShardFacts) -> None:
    """Compare a file with its entry in the manifest.

    Raises:
        DamagedCheckpoint: if it is missing, or has another size or sha256.
    """
    path = folder / shard_name(rank)
    try:
        size = file_size(path)
        if size != facts.bytes:
            raise DamagedCheckpoint(f"{path.name} has {size} bytes instead of {facts.bytes}")
        if _sha256(path) != facts.sha256:
            raise DamagedCheckpoint(f"{path.name} is damaged: its sha256 does not match")
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{path.name} is missing") from None
    except OSError as error:
        raise DamagedCheckpoint(f"{path.name} cannot be read: {one_line(error)}") from None


class _StoredPiece(NamedTuple):
    """Where `length` elements of a parameter, from element `offset` on, are: group and start in a rank's file."""

    offset: int
    length: int
    rank: int
    group: int
    start: int


class CheckpointReader:
    """The training state in a verified checkpoint; tensors are read on access, one at a time.

    Args:
        folder: the checkpoint.
        manifest: its manifest.

    Attributes:
        shapes: of every parameter, by name.
        frozen: names of the parameters without moments.

    Raises:
        DamagedCheckpoint: if the files do not contain every element of every parameter exactly once.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.shapes = manifest.parameters
        self._pieces: dict[str, list[_StoredPiece]] = {name: [] for name in self.shapes}
        self.frozen: set[str] = set()
        self._channels_last: frozenset[str] = frozenset()
        try:
            self._files = [safe_open(folder / shard_name(rank), "pt") for rank in range(len(manifest.shards))]
            layouts = [json.loads(file.metadata()[METADATA_KEY]) for file in self._files]
            self._moment_kinds: list[str] = layouts[0]["moments"]
            self._channels_last = frozenset(layouts[0].get("channels_last", ()))  # younger than the format
            for rank, layout in enumerate(layouts):
                self._note_layout(rank, layout)
        except (OSError, SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise DamagedCheckpoint(f"a shard cannot be read: {one_line(error)}") from None
        for name, pieces in self._pieces.items():
            end = 0
            for piece in sorted(pieces):
                end = piece.offset + piece.length if piece.offset == end else -1
            if end != math.prod(self.shapes[name]):
                raise DamagedCheckpoint(f"parameter {one_line(name)} is not complete")

    def _note_layout(self, rank: int, layout: dict[str, Any]) -> None:
        """Note the pieces in a rank's file; raise ValueError if one is outside of it or overlaps another."""
        if layout["moments"] != self._moment_kinds or any(type(kind) is not str for kind in self._moment_kinds):
            raise ValueError(f"rank {rank} has other moments than rank 0")
        if {*layout.get("channels_last", ())} != self._channels_last:
            raise ValueError(f"rank {rank} has its elements in another order than rank 0")
        if any(len(self.shapes[name]) != CONVOLUTION_DIMENSIONS for name in self._channels_last):
            raise ValueError("a parameter in channels_last is no convolution's")
        without_moments = layout.get("without_moments", [])  # younger than the format
        for group, pieces in enumerate(layout["groups"]):
            has_moments = group not in without_moments
            size = self._group_size(rank, group, self._moment_kinds if has_moments else [])
            if not has_moments:
                self.frozen.update(piece[0] for piece in pieces)
            end = 0
            for name, offset, start, length in sorted((Piece(*piece) for piece in pieces), key=lambda p: p.start):
                if any(type(number) is not int for number in (offset, start, length)):
                    raise TypeError(f"a piece of {name} has no whole numbers")
                # Slices beyond the end of a tensor are cut silently, and one element would then fill many.
                if min(offset, length) < 0 or not end <= start <= size - length:
                    raise ValueError(f"a piece of {name} is outside of group {group} of rank {rank}, or on another")
                end = start + length
                self._pieces[name].append(_StoredPiece(offset, length, rank, group, start))

    def _group_size(self, rank: int, group: int, moment_kinds: list[str]) -> int:
        """Return the elements of a rank's part of a group, the same for the weights and all moments."""
        slices = [self._files[rank].get_slice(f"{kind}.{group}") for kind in ("weights", *moment_kinds)]
        if {stored.get_dtype() for stored in slices} != {"F32"} or len({tuple(s.get_shape()) for s in slices}) > 1:
            raise ValueError(f"weights and moments of group {group} of rank {rank} are not all fp32 and of one shape")
        (size,) = slices[0].get_shape()
        return size

    @property
    def weights(self) -> Mapping[str, torch.Tensor]:
        """The fp32 weights, whole, by parameter name."""
        return _Assembled(self, "weights")

    @property
    def moments(self) -> dict[str, Mapping[str, torch.Tensor]]:
        """The optimizer's moments, whole: kind -> parameter name -> tensor."""
        return {kind: _Assembled(self, kind) for kind in self._moment_kinds}

    def buffers(self, rank: int, world_size: int) -> dict[str, torch.Tensor]:
        """Return a rank's buffers: its own, or the ranks' mean if another number of ranks had saved them."""
        if world_size == len(self._files):
            return self._buffers_of(rank)
        every = [self._buffers_of(saved) for saved in range(len(self._files))]
        # Counters, such as BatchNorm's number of batches, are the same on all ranks.
        return {
            name: torch.stack([buffers[name] for buffers in every]).mean(0) if first.is_floating_point() else first
            for name, first in every[0].items()
        }

    def epoch_sums(self, rank: int, world_size: int) -> torch.Tensor:
        """Return a rank's share of the epoch's sums so far: its own, or all of them on rank 0."""
        if world_size == len(self._files):
            return self._files[rank].get_tensor(EPOCH_SUMS)
        total = torch.stack([file.get_tensor(EPOCH_SUMS) for file in self._files]).sum(0)
        return total if rank == 0 else torch.zeros_like(total)

    def assemble(self, kind: str, name: str) -> torch.Tensor:
        """Return the weights or a moment of one parameter, whole, fp32 on the CPU."""
        whole = torch.empty(math.prod(self.shapes[name]))
        for offset, length, rank, group, start in self._pieces[name]:
            stored = self._files[rank].get_slice(f"{kind}.{group}")
            whole[offset : offset + length] = stored[start : start + length]
        shape = self.shapes[name]
        if name not in self._channels_last:
            return whole.view(shape)
        outputs, inputs, height, width = shape
        return whole.view(outputs, height, width, inputs).permute(0, 3, 1, 2).contiguous()

    def _buffers_of(self, rank: int) -> dict[str, torch.Tensor]:
        file = self._files[rank]
        names = [name for name in file.keys() if name.startswith(BUFFER_PREFIX)]  # noqa: SIM118 - no mapping
        return {name.removeprefix(BUFFER_PREFIX): file.get_tensor(name) for name in names}


class _Assembled(Mapping[str, torch.Tensor]):
    """One kind of tensor of all parameters, assembled on access."""

    def __init__(self, reader: CheckpointReader, kind: str) -> None:
        self._reader, self._kind = reader, kind

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._reader.assemble(self._kind, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._reader.shapes)

    def __len__(self) -> int:
        return len(self._reader.shapes)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
