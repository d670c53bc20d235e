"""One rank's file of a checkpoint: copying the state, writing it, and assembling parameters from all files.

A rank stores its shards of the parameters, without any communication: shard number i as `weights.<i>` and
`<moment>.<i>`, fp32 tensors in the usual order of dimensions. The metadata has the name and the offsets of each, so any
engine, strategy and number of ranks can read them; a shard of a frozen parameter has no moments, and where several
rules update the model, the metadata names those of each shard. The module's buffers are `buffer/<name>` [n, ...] in the
n versions that the rank has, because BatchNorm's statistics differ between evaluations.

A fine-tuning run writes the weights that it does not train once, into a file of the same kind beside its checkpoints.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from zerovision.models.weights_metadata import METADATA_KEY
from zerovision.training.base.atomic_write import replacing_by_library
from zerovision.training.base.errors import one_line
from zerovision.training.base.small_files import sha256_of
from zerovision.training.checkpoint.manifest import (
    DamagedCheckpoint,
    Manifest,
    ShardFacts,
    file_size,
    frozen_name,
    shard_name,
)
from zerovision.training.engines.parameter_shards import WEIGHTS, EngineState, ParameterShard, TakeBox, index_of

BUFFER_PREFIX = "buffer/"
EPOCH_SUMS = "epoch_sums"
ALIGNMENT = 64  # bytes, of each tensor in a block
BLOCK = 2**27  # bytes; a larger tensor has its own


class Snapshot:
    """A copy of this rank's part of the training state in CPU memory, in tensors that are reused."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.layout: dict[str, Any] = {}
        self._kinds: dict[str, tuple[str, torch.dtype, torch.Size]] = {}
        self._copied: torch.cuda.Event | None = None

    def take(self, state: EngineState, epoch_sums: torch.Tensor | None, left_out: Collection[str] = ()) -> None:
        """Copy the current state; on a GPU the copies are queued, before the next step changes the state.

        Args:
            state: of the engine.
            epoch_sums: what `ScoreSums.state` returned, float64 [4]; None on a rank whose images are also those of
                another rank, which saves them.
            left_out: names of the parameters that are in the file of frozen weights.
        """
        shards = [shard for shard in state.shards if shard.name not in left_out]
        sources = {
            f"{kind}.{number}": tensor for number, shard in enumerate(shards) for kind, tensor in shard.tensors.items()
        }
        sources |= {BUFFER_PREFIX + name: buffer for name, buffer in state.buffers.items()}
        if epoch_sums is not None:
            sources[EPOCH_SUMS] = epoch_sums
        kinds = {name: (source.device.type, source.dtype, source.shape) for name, source in sources.items()}
        if kinds != self._kinds:
            self.tensors = {}  # frees them first
            self._kinds, self.tensors = kinds, _memory_for(sources)
        for name, source in sources.items():
            self.tensors[name].copy_(source.detach(), non_blocking=True)
        gpus = {source.device for source in sources.values() if source.device.type == "cuda"}
        self._copied = torch.cuda.current_stream(gpus.pop()).record_event() if gpus else None
        self.layout = {
            "moments": sorted(state.moment_kinds),
            "shards": [[shard.name, list(shard.offsets), *_own_moments(shard, state)] for shard in shards],
            "leaves": list(state.leaves),
        }

    def wait(self) -> None:
        """Wait until the copies are complete; called by the thread that writes them, not by the one that trains."""
        if self._copied is not None:
            self._copied.synchronize()


def _memory_for(sources: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return empty tensors for copies: parts of a few blocks, those for tensors on a GPU pinned.

    Pinning takes so long that a call for each tensor would stop the steps, and PyTorch rounds each up to a power of 2.
    """
    copies: dict[str, torch.Tensor] = {}
    for on_gpu in (True, False):
        blocks: list[list[tuple[str, int]]] = []  # names of tensors, and where each starts
        end = BLOCK
        for name, source in sources.items():
            if (source.device.type == "cuda") is on_gpu:
                if end + source.nbytes > BLOCK:
                    blocks.append([])
                    end = 0
                blocks[-1].append((name, end))
                end += -(-source.nbytes // ALIGNMENT) * ALIGNMENT
        for parts in blocks:
            last, start = parts[-1]
            block = _empty(start + sources[last].nbytes, is_pinned=on_gpu)
            for name, start in parts:
                source = sources[name]
                copies[name] = block[start : start + source.nbytes].view(source.dtype).view(source.shape)
    return copies


def _empty(size: int, *, is_pinned: bool) -> torch.Tensor:
    """Return uint8 [size], in pages of its own.

    malloc would put the copy, which stays, where a step's activations were and will be, and the heap grows in pieces.
    """
    if is_pinned or not size:
        return torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned)
    return torch.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)


def _own_moments(shard: ParameterShard, state: EngineState) -> list[list[str]]:
    """Return nothing for a shard with all moments or none, else a list of those that it has."""
    own = sorted(shard.tensors.keys() & {*state.moment_kinds})
    return [own] if 0 < len(own) < len(state.moment_kinds) else []


def write_shard(path: Path, snapshot: Snapshot) -> ShardFacts:
    """Write a rank's file, and wait until it is on the disk.

    Raises:
        OSError, SafetensorError: if that fails, as on a full disk.
    """
    snapshot.wait()
    return _write(path, snapshot.tensors, snapshot.layout)


def write_frozen(path: Path, parameters: Mapping[str, torch.Tensor]) -> ShardFacts:
    """Write frozen weights, on any device, as shards without moments, and wait until they are on the disk.

    Raises:
        OSError, SafetensorError: if that fails.
    """
    tensors = {
        f"{WEIGHTS}.{number}": parameter.detach().cpu().contiguous()
        for number, parameter in enumerate(parameters.values())
    }
    layout = {"moments": [], "shards": [[name, [0] * tensor.ndim] for name, tensor in parameters.items()]}
    return _write(path, tensors, layout)


def _write(path: Path, tensors: dict[str, torch.Tensor], layout: dict[str, Any]) -> ShardFacts:
    with replacing_by_library(path) as temporary:
        save_file(tensors, temporary, metadata={METADATA_KEY: json.dumps(layout)})
    return ShardFacts(path.stat().st_size, sha256_of(path))


def verify_shard(path: Path, facts: ShardFacts) -> None:
    """Compare a file with its entry in the manifest.

    Raises:
        DamagedCheckpoint: if it is missing, or has another size or sha256.
    """
    try:
        size = file_size(path)
        if size != facts.bytes:
            raise DamagedCheckpoint(f"{path.name} has {size} bytes instead of {facts.bytes}")
        if sha256_of(path) != facts.sha256:
            raise DamagedCheckpoint(f"{path.name} is damaged: its sha256 does not match")
    except FileNotFoundError:
        raise DamagedCheckpoint(f"{path.name} is missing") from None
    except OSError as error:
        raise DamagedCheckpoint(f"{path.name} cannot be read: {one_line(error)}") from None


class _StoredShard(NamedTuple):
    """A part of a parameter, and the rank and the number in its file."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    rank: int
    number: int

    @property
    def box(self) -> tuple[slice, ...]:
        return index_of(self.offsets, self.sizes)


class CheckpointReader:
    """The training state in a verified checkpoint, of which a rank reads what it asks for.

    Args:
        folder: the checkpoint.
        manifest: its manifest.

    Attributes:
        shapes: of every parameter, by name.
        moment_kinds: names of the optimizer's moments.
        frozen: names of the parameters without moments.

    Raises:
        DamagedCheckpoint: if the files do not contain every element of every parameter exactly once.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.shapes = manifest.parameters
        self.frozen: set[str] = set()
        self._shards: dict[str, list[_StoredShard]] = {name: [] for name in self.shapes}
        try:
            paths = [folder / shard_name(rank) for rank in range(len(manifest.shards))]
            if manifest.frozen is not None:  # as the file of one rank more
                paths.append(folder.parent / frozen_name(manifest.frozen))
            self._files = [safe_open(path, "pt") for path in paths]
            self._ranks = len(manifest.shards)
            layouts = [json.loads(file.metadata()[METADATA_KEY]) for file in self._files]
            self.moment_kinds: list[str] = layouts[0]["moments"]
            self._leaves: list[list[int] | None] = [layout.get("leaves") for layout in layouts]
            if any(type(leaf) is not int for leaves in self._leaves for leaf in leaves or []):
                raise ValueError("leaves are no numbers")
            for rank, layout in enumerate(layouts):
                kinds = self.moment_kinds if rank < self._ranks else []
                if layout["moments"] != kinds or any(type(kind) is not str for kind in kinds):
                    raise ValueError(f"rank {rank} has other moments than rank 0")
                self._note_shards(rank, layout)
        except (OSError, SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise DamagedCheckpoint(f"a shard cannot be read: {one_line(error)}") from None
        for name, shards in self._shards.items():
            if not _is_covered(self.shapes[name], shards):
                raise DamagedCheckpoint(f"parameter {one_line(name)} is not complete")

    def _note_shards(self, rank: int, layout: dict[str, Any]) -> None:
        """Note the shards in a rank's file; raise ValueError if one is not what its parameter and its moments say."""
        stored = {*self._files[rank].keys()}
        for number, (name, offsets, *own_moments) in enumerate(layout["shards"]):
            shape, has_moments = self.shapes[name], any(f"{kind}.{number}" in stored for kind in self.moment_kinds)
            (kinds,) = own_moments or [self.moment_kinds]
            if not {*kinds} <= {*self.moment_kinds}:
                raise ValueError(f"shard {number} of rank {rank} has moments that are not the optimizer's")
            sizes = self._sizes(rank, number, kinds if has_moments else [])
            is_inside = len(offsets) == len(sizes) == len(shape) and all(
                type(offset) is int and 0 <= offset <= whole - size
                for offset, size, whole in zip(offsets, sizes, shape, strict=True)
            )
            if not is_inside:
                raise ValueError(f"shard {number} of rank {rank} is outside of {one_line(name)}")
            if not has_moments:
                self.frozen.add(name)
            self._shards[name].append(_StoredShard(tuple(offsets), sizes, rank, number))

    def _sizes(self, rank: int, number: int, moment_kinds: Sequence[str]) -> tuple[int, ...]:
        """Return the sizes of a tensor in a rank's file, the same for the weights and all moments."""
        slices = [self._files[rank].get_slice(f"{kind}.{number}") for kind in (WEIGHTS, *moment_kinds)]
        if {stored.get_dtype() for stored in slices} != {"F32"} or len({tuple(s.get_shape()) for s in slices}) > 1:
            raise ValueError(f"weights and moments of shard {number} of rank {rank} are not all fp32 and of one shape")
        return tuple(slices[0].get_shape())

    @property
    def tensors(self) -> dict[str, TakeBox]:
        """Weights and moments: kind -> what returns a box of a whole parameter, fp32 on the CPU, given its name."""
        return {kind: partial(self._read, kind) for kind in (WEIGHTS, *self.moment_kinds)}

    def _read(self, kind: str, name: str, box: tuple[slice, ...]) -> torch.Tensor:
        part = torch.empty([along.stop - along.start for along in box])
        for shard in self._shards[name]:
            common = [(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(box, shard.box, strict=True)]
            if all(low < high for low, high in common):
                stored = self._files[shard.rank].get_slice(f"{kind}.{shard.number}")
                part[_within(box, common)] = stored[_within(shard.box, common)]
        return part

    def buffers(self, leaves: Sequence[int], total: int) -> dict[str, torch.Tensor]:
        """Return buffers, name -> [versions, ...]: the saved ones, or their mean if their number is another.

        Args:
            leaves: whose versions they are.
            total: leaves that have versions.
        """
        result = {}
        for name, rows in self.buffer_rows().items():
            is_alike = len(rows) == total
            saved = torch.stack([part[row] for part, row in ([rows[leaf] for leaf in leaves] if is_alike else rows)])
            if not is_alike:
                # Counters and the statistics of frozen layers are the same on all ranks: no mean may round them.
                mean = saved.mean(0) if saved.is_floating_point() else saved[0]
                mean = torch.where((saved == saved[0]).all(0), saved[0], mean)
                saved = mean.expand(len(leaves), *mean.shape)
            result[name] = saved
        return result

    def buffer_rows(self) -> dict[str, list[tuple[Any, int]]]:
        """Return the versions of each buffer in the order of their leaves, not read yet: name -> (slice, row in it).

        Raises:
            DamagedCheckpoint: if there are not as many of each as all ranks with other images have.
        """
        rows: dict[str, dict[int, tuple[Any, int]]] = {}
        for file, leaves in zip(self._files[: self._ranks], self._leaves, strict=False):
            for key in file.keys():  # noqa: SIM118 - no mapping
                if key.startswith(BUFFER_PREFIX):
                    part, found = file.get_slice(key), rows.setdefault(key.removeprefix(BUFFER_PREFIX), {})
                    versions, ranks = part.get_shape()[0], len(self._with_sums)
                    # A checkpoint without them was written when leaves were numbered one rank after another.
                    numbers = range(len(found), len(found) + versions) if leaves is None else leaves
                    found |= zip(numbers, ((part, row) for row in range(versions)), strict=False)
        if any(sorted(found) != [*range(ranks * versions)] for found in rows.values()):
            raise DamagedCheckpoint("buffers or sums of a rank are missing")
        return {name: [found[leaf] for leaf in sorted(found)] for name, found in rows.items()}

    def epoch_sums(self, rank: int, world_size: int) -> torch.Tensor:
        """Return a rank's share of the epoch's sums so far: its own, or all on rank 0; arguments as of `buffers`."""
        sums = [file.get_tensor(EPOCH_SUMS) for file in self._with_sums]
        if world_size == len(sums):
            return sums[rank]
        total = torch.stack(sums).sum(0)
        return total if rank == 0 else torch.zeros_like(total)

    @cached_property
    def _with_sums(self) -> list[Any]:
        """The files of the ranks that save sums: one of those that read the same images."""
        return [file for file in self._files[: self._ranks] if EPOCH_SUMS in file.keys()]  # noqa: SIM118


def _is_covered(shape: Sequence[int], shards: Sequence[_StoredShard]) -> bool:
    """Return whether shards within a shape contain every element once: as many as there are, and no two overlap."""
    if sum(math.prod(shard.sizes) for shard in shards) != math.prod(shape):
        return False
    seen = torch.zeros(tuple(shape), dtype=torch.bool)
    for shard in shards:
        if seen[shard.box].any():
            return False
        seen[shard.box] = True
    return True


def _within(box: Sequence[slice], common: Sequence[tuple[int, int]]) -> tuple[slice, ...]:
    """Return where a part of a box, given by its low and high indices, is in the box."""
    return tuple(slice(low - a.start, high - a.start) for a, (low, high) in zip(box, common, strict=True))
