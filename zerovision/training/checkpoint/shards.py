"""The shards of a checkpoint: copies a rank's state, writes its shard, and reads boxes of tensors from all shards.

A shard contains a tensor for each box, which is a part of a whole tensor. The key of a box is
`<kind>/<name>@<offsets>`. The kinds are `weights` and the optimizer's moments, contiguous and in fp32; `buffer`
[leaves, ...], with one row per leaf of a step, because BatchNorm's statistics differ between leaves; and `epoch_sums`
[ranks that read different images, 4]. A rank writes its shard without any communication, and any engine, strategy and
number of ranks can read the shard. A frozen parameter has no moments; a fine-tuning run writes frozen parameters once,
to a file of the same format that is linked into its checkpoints.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from zerovision.training.base.errors import one_line
from zerovision.training.base.files import replacing_by_library, sha256_of
from zerovision.training.checkpoint.manifest import Manifest, ShardFacts, UnusableCheckpoint, file_names, file_size
from zerovision.training.engines.parameter_shards import WEIGHTS, EngineState, TakeBox, index_of

BUFFER, EPOCH_SUMS = "buffer", "epoch_sums"  # kinds besides the weights and the moments
ALIGNMENT = 64  # of each tensor in a block, in bytes
BLOCK = 2**27  # bytes; a larger tensor has its own block


class Snapshot:
    """A copy of this rank's part of the training state, in CPU tensors that are reused.

    Attributes:
        tensors: the copied tensors, by key.
        copied: event at the end of the copies queued on a GPU; anything that changes the sources of these
            copies must wait for the event.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.copied: torch.cuda.Event | None = None
        self._kinds: dict[str, tuple[str, torch.dtype, torch.Size]] = {}
        self._stream: torch.cuda.Stream | None = None

    def take(
        self, state: EngineState, epoch_sums: torch.Tensor | None, left_out: Collection[str] = (), rank: int = 0
    ) -> None:
        """Copy the current state; on a GPU, the copies are queued on a separate stream, and run during the next step.

        Buffers and sums, which the next forward pass changes, are copied before that pass; for weights and moments, see
        `copied`.

        Args:
            state: state of the engine.
            epoch_sums: the result of `ScoreSums.state`, float64 [4]; None if another rank with the same images saves
                them.
            left_out: names of the parameters in the file of frozen weights.
            rank: index of this rank among the ranks with their own images.
        """
        first, then = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
        for name, versions in state.buffers.items():
            for leaf, buffer in zip(state.leaves, versions, strict=True):
                first[box_key(BUFFER, name, (leaf, *[0] * buffer.ndim))] = buffer[None]
        if epoch_sums is not None:
            first[box_key(EPOCH_SUMS, "", (rank, 0))] = epoch_sums[None]
        for shard in state.shards:
            if shard.name not in left_out:
                then |= {box_key(kind, shard.name, shard.offsets): one for kind, one in shard.tensors.items()}
        sources = first | then
        kinds = {name: (source.device.type, source.dtype, source.shape) for name, source in sources.items()}
        if kinds != self._kinds:
            self.tensors = {}  # frees the old tensors first
            self._kinds, self.tensors = kinds, _memory_for(sources)
        self._copy(first)
        gpu = next((source.device for source in sources.values() if source.device.type == "cuda"), None)
        if gpu is None:
            self._copy(then)
            return
        self._stream = self._stream or torch.cuda.Stream(gpu)
        self._stream.wait_stream(torch.cuda.current_stream(gpu))
        with torch.cuda.stream(self._stream):
            self._copy(then)
        for source in then.values():
            if source.is_cuda:
                source.record_stream(self._stream)  # keeps the source's memory until the copy is done
        self.copied = self._stream.record_event()

    def _copy(self, sources: Mapping[str, torch.Tensor]) -> None:
        for name, source in sources.items():
            self.tensors[name].copy_(source.detach(), non_blocking=True)


def _memory_for(sources: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return empty tensors for copies: views into a few blocks, which are pinned if the sources are on a GPU.

    Pinning each tensor separately would interrupt training, and PyTorch would round each size up to a power of 2.
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
    """Return an uninitialized uint8 tensor [size] in its own memory pages.

    malloc would place this permanent copy where a step's activations were, and fragment the heap.
    """
    if is_pinned or not size:
        return torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned)
    return torch.frombuffer(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), dtype=torch.uint8)


def box_key(kind: str, name: str, offsets: Sequence[int]) -> str:
    """Return the key of a box in a file."""
    return f"{kind}/{name}@{','.join(map(str, offsets))}"


def write_shard(path: Path, snapshot: Snapshot) -> ShardFacts:
    """Wait until a snapshot's copies are complete, write them as a rank's shard, and wait until it is on disk.

    The writing thread calls this function, not the training thread.

    Raises:
        OSError, SafetensorError: if writing fails, for example on a full disk.
    """
    if snapshot.copied is not None:
        snapshot.copied.synchronize()
    return _write(path, snapshot.tensors)


def write_frozen(path: Path, parameters: Mapping[str, torch.Tensor]) -> ShardFacts:
    """Write frozen weights, from any device, as a shard without moments, and wait until the file is on disk.

    If writing fails, raise OSError or SafetensorError.
    """
    tensors = {
        box_key(WEIGHTS, name, [0] * parameter.ndim): parameter.detach().cpu().contiguous()
        for name, parameter in parameters.items()
    }
    return _write(path, tensors)


def _write(path: Path, tensors: dict[str, torch.Tensor]) -> ShardFacts:
    with replacing_by_library(path) as temporary:
        save_file(tensors, temporary)
    return ShardFacts(path.stat().st_size, sha256_of(path))


def verify_shard(path: Path, facts: ShardFacts) -> None:
    """Compare a file with its entry in the manifest, and raise UnusableCheckpoint if it is missing or damaged."""
    try:
        size = file_size(path)
        if size != facts.bytes:
            raise UnusableCheckpoint(f"{path.name} has {size} bytes instead of {facts.bytes}")
        if sha256_of(path) != facts.sha256:
            raise UnusableCheckpoint(f"{path.name} is damaged: its sha256 does not match")
    except FileNotFoundError:
        raise UnusableCheckpoint(f"{path.name} is missing") from None
    except OSError as error:
        raise UnusableCheckpoint(f"{path.name} cannot be read: {one_line(error)}") from None


class _Box(NamedTuple):
    """A part of a tensor that is stored in a file and has not been read yet."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    stored: Any

    @property
    def place(self) -> tuple[slice, ...]:
        return index_of(self.offsets, self.sizes)


class CheckpointReader:
    """The training state in a verified checkpoint; a rank reads only what it needs.

    If the files do not contain every element of every parameter exactly once, `UnusableCheckpoint` is raised.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.shapes = manifest.parameters  # by name
        self._boxes: dict[str, dict[str, list[_Box]]] = {WEIGHTS: {}, BUFFER: {}, EPOCH_SUMS: {}}
        try:
            for file_name in file_names(manifest):
                file = safe_open(folder / file_name, "pt")
                for key in file.keys():  # noqa: SIM118 - no mapping
                    place, _, numbers = key.rpartition("@")  # see `box_key`
                    kind, _, name = place.partition("/")
                    offsets, stored = tuple(map(int, numbers.split(","))) if numbers else (), file.get_slice(key)
                    box = _Box(offsets, tuple(stored.get_shape()), stored)
                    self._boxes.setdefault(kind, {}).setdefault(name, []).append(box)
            self.moment_kinds = sorted(self._boxes.keys() - {WEIGHTS, BUFFER, EPOCH_SUMS})
            for kind in (WEIGHTS, *self.moment_kinds):
                self._check_boxes(kind)
            self._ranks = len(_in_order(self._boxes[EPOCH_SUMS][""]))
            versions = {len(_in_order(boxes)) for boxes in self._boxes[BUFFER].values()}
            if self._ranks != manifest.data_ranks or len(versions) > 1 or any(n % self._ranks for n in versions):
                raise ValueError("buffers or sums of a rank are missing")
        except (OSError, SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise UnusableCheckpoint(f"a shard cannot be read: {one_line(error)}") from None
        self.with_moments = {name for kind in self.moment_kinds for name in self._boxes[kind]}

    def _check_boxes(self, kind: str) -> None:
        """Raise ValueError unless the boxes of this kind contain each element of the parameters once, in fp32."""
        found = self._boxes[kind]
        if unknown := found.keys() - self.shapes.keys():
            raise ValueError(f"there is no parameter {one_line(unknown.pop())}")
        for name in self.shapes if kind == WEIGHTS else found:
            boxes, weights = found.get(name, []), self._boxes[WEIGHTS].get(name, [])
            if any(box.stored.get_dtype() != "F32" for box in boxes):
                raise ValueError(f"{kind} of {one_line(name)} are not fp32")
            # Moments must have the same boxes as their weights, which have already been compared with the shape.
            if not (_are_whole(self.shapes[name], boxes) if kind == WEIGHTS else _places(boxes) == _places(weights)):
                raise ValueError(f"parameter {one_line(name)} is not complete: {kind}")

    @property
    def tensors(self) -> dict[str, TakeBox]:
        """For weights and each kind of moment, a function that returns a box of a named parameter, fp32 on the CPU."""
        return {kind: partial(self._read, kind) for kind in (WEIGHTS, *self.moment_kinds)}

    def _read(self, kind: str, name: str, index: tuple[slice, ...]) -> torch.Tensor:
        part = torch.empty([along.stop - along.start for along in index])
        for box in self._boxes[kind][name]:
            common = [(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(index, box.place, strict=True)]
            if all(low < high for low, high in common):
                part[_within(index, common)] = box.stored[_within(box.place, common)]
        return part

    def buffers(self, leaves: Sequence[int], total: int) -> dict[str, torch.Tensor]:
        """Return the buffers by name, each [leaves, ...]: as saved, or averaged if the total number of leaves changed.

        Args:
            leaves: leaves of this rank.
            total: number of leaves of all ranks.
        """
        result = {}
        for name, boxes in self._boxes[BUFFER].items():
            is_alike, rows = len(boxes) == total, _in_order(boxes)
            saved = torch.stack([row.stored[0] for row in ([rows[leaf] for leaf in leaves] if is_alike else rows)])
            if not is_alike:
                # Counters and the statistics of frozen layers are the same on all ranks: a mean must not round them.
                mean = saved.mean(0) if saved.is_floating_point() else saved[0]
                mean = torch.where((saved == saved[0]).all(0), saved[0], mean)
                saved = mean.expand(len(leaves), *mean.shape)
            result[name] = saved
        return result

    def epoch_sums(self, rank: int, world_size: int) -> torch.Tensor:
        """Return a rank's share of the epoch's sums so far; if the number of ranks changed, rank 0 has the total.

        Both arguments count only the ranks with their own images.
        """
        sums = [box.stored[0] for box in _in_order(self._boxes[EPOCH_SUMS][""])]
        if world_size == self._ranks:
            return sums[rank]
        total = torch.stack(sums).sum(0)
        return total if rank == 0 else torch.zeros_like(total)


def _in_order(boxes: Sequence[_Box]) -> list[_Box]:
    """Return the rows of a tensor in order; raise ValueError if one is missing or repeated."""
    rows = sorted(boxes, key=lambda box: box.offsets)
    if any(box.offsets[:1] != (row,) or box.sizes[:1] != (1,) for row, box in enumerate(rows)):
        raise ValueError("a row is missing")
    return rows


def _places(boxes: Sequence[_Box]) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    return sorted((box.offsets, box.sizes) for box in boxes)


def _are_whole(shape: Sequence[int], boxes: Sequence[_Box]) -> bool:
    """Return whether boxes contain every element of a shape exactly once: right count, all inside, no overlap."""
    if sum(math.prod(box.sizes) for box in boxes) != math.prod(shape):
        return False
    seen = torch.zeros(tuple(shape), dtype=torch.bool)
    for box in boxes:
        is_inside = len(box.offsets) == len(box.sizes) == len(shape) and all(
            0 <= offset <= whole - size for offset, size, whole in zip(box.offsets, box.sizes, shape, strict=True)
        )
        if not is_inside or seen[box.place].any():
            return False
        seen[box.place] = True
    return True


def _within(box: Sequence[slice], common: Sequence[tuple[int, int]]) -> tuple[slice, ...]:
    """Return the slices, relative to `box`, of the part with the low and high indices in `common`."""
    return tuple(slice(low - a.start, high - a.start) for a, (low, high) in zip(box, common, strict=True))
