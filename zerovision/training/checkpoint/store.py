"""The checkpoints folder of a run, and the training state that is restored from it."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError

from zerovision.training.base.errors import UserError, one_line
from zerovision.training.base.files import remove_leftovers, replacing, sync_to_disk
from zerovision.training.base.progress import Progress
from zerovision.training.base.run_folder import LAST
from zerovision.training.checkpoint.manifest import (
    FROZEN,
    MANIFEST_FILE,
    Manifest,
    ShardFacts,
    UnusableCheckpoint,
    file_names,
    file_size,
    read_manifest,
    write_manifest,
)
from zerovision.training.checkpoint.shards import CheckpointReader, verify_shard, write_frozen
from zerovision.training.engines.engine import Engine
from zerovision.training.engines.model_buffers import AVERAGE
from zerovision.training.engines.parameter_shards import EngineState, of_first_group
from zerovision.training.world.collectives import broadcast_object, error_on_any_rank
from zerovision.training.world.world import World

if TYPE_CHECKING:
    from zerovision.training.tasks.scores import ScoreSums

BEST = "best"
NAME_PATTERN = re.compile(r"step-(\d{5,9})-(\d{7,12})")


@dataclass(frozen=True)
class FoundCheckpoint:
    """A checkpoint whose files have been verified."""

    path: Path
    manifest: Manifest


def checkpoint_name(progress: Progress) -> str:
    """Return the name of a checkpoint's folder; names sort by position in the run."""
    return f"step-{progress.epoch:05d}-{progress.step:07d}"


def temporary_folder(folder: Path, name: str) -> Path:
    """Return the folder in which a checkpoint is written before it gets its name."""
    return folder / f".{name}.tmp"


def commit(folder: Path, name: str, manifest: Manifest, *, is_best: bool, keep_last: int, kept: str = "") -> None:
    """Name a checkpoint whose shards are on disk, update `last` and `best`, and remove old checkpoints; rank 0 only.

    No matter when the process is killed, the previous checkpoint or this one remains.

    Args:
        folder: the run's checkpoints folder.
        name: name of the checkpoint.
        manifest: manifest of the checkpoint.
        is_best: whether the checkpoint is the best epoch's.
        keep_last: number of newest checkpoints to keep besides the best epoch's.
        kept: name of another checkpoint to keep.

    Raises:
        OSError: if a file cannot be written.
    """
    temporary, path = temporary_folder(folder, name), folder / name
    write_manifest(temporary, manifest)
    sync_to_disk(temporary)
    if path.exists():  # of the same step, from before a resume; until the rename, `last` refers to this old one
        _set_aside(path)
    temporary.rename(path)
    sync_to_disk(folder)
    _point(folder / LAST, name)
    if is_best:
        _point(folder / BEST, name)
    _remove_old(folder, name, keep_last, kept)


def discard(folder: Path, name: str) -> None:
    """Remove the files of a checkpoint that failed."""
    shutil.rmtree(temporary_folder(folder, name), ignore_errors=True)


def find_candidates(resume: str, folder: Path, *, is_restart: bool) -> tuple[list[Path], list[str]]:
    """Return the checkpoints that `--resume` means, in the order to try them, and notes for the log.

    Args:
        resume: 'never', 'auto', 'must' or a folder: a checkpoint, a run's folder or its checkpoints folder.
        folder: this run's checkpoints folder.
        is_restart: whether the launcher restarted this run, whose own checkpoints then take precedence over `resume`.

    Raises:
        UserError: if there is no checkpoint for 'must' or in the given folder, or if a folder cannot be read.
    """
    try:
        own, notes = _newest_first(folder)
        if own and (is_restart or resume in ("auto", "must")):
            return own, notes
        if resume in ("never", "auto"):
            return [], notes
        if resume == "must":
            raise UserError(f"--resume must: {folder} has no checkpoint. Use the --run-name of a run that has one.")
        path = Path(resume).expanduser()
        if (path / MANIFEST_FILE).is_file() or (NAME_PATTERN.fullmatch(path.name) and path.is_dir()):
            return [path], []
        for parent in (path / "checkpoints", path):
            candidates, notes = _newest_first(parent)
            if candidates:
                return candidates, notes
    except (OSError, RuntimeError) as error:  # RuntimeError: ~ of a user without a home folder
        raise UserError(f"--resume {one_line(resume)}: cannot be read: {one_line(error)}.") from None
    raise UserError(
        f"--resume {one_line(resume)}: no checkpoint there (no {MANIFEST_FILE}). "
        "Use never, auto, must or a checkpoint folder."
    )


def choose(candidates: list[Path], world: World) -> tuple[FoundCheckpoint | None, dict[Path, str]]:
    """Return the first undamaged checkpoint, and what is wrong with those before it; a collective.

    The ranks share the work of hashing; all ranks must see the same folder.
    """
    refused: dict[Path, str] = {}
    for path in map(Path, broadcast_object([str(path) for path in candidates], world)):
        error, manifest = None, None
        try:
            manifest = read_manifest(path)
            for name, facts in [*file_names(manifest).items()][world.rank :: world.size]:
                verify_shard(path / name, facts)
        except UnusableCheckpoint as damage:
            error = str(damage)
        error = error_on_any_rank(error, world)
        if error is None and manifest is not None:
            return FoundCheckpoint(path, manifest), refused
        refused[path] = str(error)
    return None, refused


def set_aside(folder: Path, damaged: Iterable[Path]) -> None:
    """Rename a run's own damaged checkpoints, so that they do not count toward `--keep-last`; only on rank 0.

    The renamed checkpoints stay hidden in the folder until the next checkpoint is complete.
    """
    for path in damaged:
        if path.parent == folder:
            with contextlib.suppress(OSError):  # a checkpoint that cannot be renamed is skipped again
                path.rename(path.with_name(f".{path.name}.damaged"))


def _newest_first(folder: Path) -> tuple[list[Path], list[str]]:
    """Return the checkpoints, newest first, and notes for the log.

    Checkpoints newer than the one that `last` names are left out, unless no other checkpoint exists.
    """
    if not folder.is_dir():
        return [], []
    names = _names(folder)
    pointed, problem = _read_pointer(folder / LAST)
    # Later checkpoints were saved before a resume that went back, or `last` does not name them yet.
    kept = [name for name in names if not pointed or _position(name) <= _position(pointed)] or names
    candidates = [folder / name for name in reversed(kept)]
    if pointed and pointed not in names:
        problem = f"names {pointed}, which does not exist"
        if _aside(folder / pointed).is_dir():
            candidates.insert(0, _aside(folder / pointed))
    if problem and candidates:
        return candidates, [f"{folder / LAST} {problem}: {candidates[0].name} is tried first"]
    return candidates, []


def _read_pointer(pointer: Path) -> tuple[str, str]:
    """Return the name in a pointer file and '', or '' and what is wrong with the file."""
    try:
        file_size(pointer)
        with pointer.open("rb") as file:
            name = file.read(100).decode("ascii").strip()
    except FileNotFoundError:
        return "", "is missing"
    except (OSError, UnicodeDecodeError, UnusableCheckpoint) as error:
        return "", f"cannot be read ({one_line(error)})"
    if not NAME_PATTERN.fullmatch(name):
        return "", f"names no checkpoint ({json.dumps(name)})"
    return name, ""


def _position(name: str) -> tuple[int, int]:
    match = NAME_PATTERN.fullmatch(name)
    return (int(match[1]), int(match[2])) if match else (-1, -1)


def _names(folder: Path) -> list[str]:
    """Return the names of a folder's checkpoints, sorted by position."""
    return sorted((path.name for path in folder.iterdir() if NAME_PATTERN.fullmatch(path.name)), key=_position)


def _point(pointer: Path, name: str) -> None:
    with replacing(pointer, durable=True) as temporary:
        temporary.write_text(name + "\n", encoding="utf-8")


def _remove_old(folder: Path, current: str, keep_last: int, kept: str) -> None:
    """Remove all checkpoints but the best, `kept`, and the newest up to `current`; later ones are outdated."""
    names = _names(folder)
    up_to_now = [name for name in names if _position(name) <= _position(current)]
    stay = {*up_to_now[-keep_last:], _read_pointer(folder / BEST)[0], *({kept} & {*up_to_now})}
    for name in names:
        if name not in stay:
            # Renamed first, so that a kill during the removal leaves nothing that looks like a checkpoint.
            shutil.rmtree(_set_aside(folder / name), ignore_errors=True)
    for leftover in folder.glob(".step-*"):
        shutil.rmtree(leftover, ignore_errors=True)
    remove_leftovers(folder, ours=(LAST, BEST))


def _aside(path: Path) -> Path:
    return path.with_name(f".{path.name}.old")


def _set_aside(path: Path) -> Path:
    aside = _aside(path)
    shutil.rmtree(aside, ignore_errors=True)
    return path.rename(aside)


@dataclass
class TrainState:
    """Everything that changes from step to step.

    Dropout, sample order and augmentation are functions of the seed and the position, so no generator state is stored.

    Attributes:
        engine: parameters, buffers, optimizer state, number of applied updates and fp16's loss scale.
        sums: score sums of the current epoch.
        progress: position of the run, best epoch and counts.
    """

    engine: Engine
    sums: ScoreSums
    progress: Progress


def restore(found: FoundCheckpoint, state: TrainState, world: World) -> None:
    """Fill a fresh state from a verified checkpoint; a collective.

    Raises:
        UserError: if the checkpoint's contents do not fit this model.
    """
    manifest, engine, sums = found.manifest, state.engine, state.sums
    try:
        reader, own = CheckpointReader(found.path, manifest), engine.state()
        buffers = reader.buffers(own.leaves, len(own.leaves) * world.data.size)
        for name, buffer in engine.module.named_buffers():
            if buffer.is_meta:  # in another rank's part of the model
                buffers.pop(name, None)
                buffers.pop(AVERAGE + name, None)
        epoch_sums = reader.epoch_sums(world.data.rank, world.data.size)
        _check_content(own, manifest, reader, buffers)
        own_shards = [shard for shard in own.shards if shard.name in reader.shapes]  # new groups of ranks have others
        unlike = [one.name for one in own_shards if (len(one.tensors) > 1) != (one.name in reader.with_moments)]
        if unlike:
            raise UnusableCheckpoint(f"it has moments of other parameters than the optimizer, first {unlike[0]}")
        empty = sums.state()
        if (epoch_sums.shape, epoch_sums.dtype) != (empty.shape, empty.dtype):
            raise UnusableCheckpoint("its epoch sums have another shape or dtype")
        loss, top1, top5, samples = epoch_sums.tolist()
        # Impossible sums would make every later average wrong. NaN is outside every range.
        if not (0 <= loss < math.inf and 0 <= top1 <= top5 <= samples < math.inf):
            raise UnusableCheckpoint("its epoch sums cannot be those of losses and images")
        engine.load_state(reader.tensors, buffers, manifest.applied_steps)
        sums.restore(epoch_sums)
    except (UnusableCheckpoint, SafetensorError, RuntimeError, LookupError) as error:
        raise UserError(f"checkpoint {found.path} cannot be used: {one_line(error)}") from None
    if engine.loss_scale is not None and manifest.loss_scale:
        engine.loss_scale.restore(manifest.loss_scale)
    state.progress = manifest.progress


def _check_content(
    own: EngineState, manifest: Manifest, reader: CheckpointReader, buffers: dict[str, torch.Tensor]
) -> None:
    """Raise an error if the checkpoint's parameters, buffers or moments differ from the engine's."""
    ours, theirs = of_first_group(own.shapes), of_first_group(manifest.parameters)
    if ours != theirs:
        other = sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
        raise UnusableCheckpoint(f"{len(other)} parameters differ from this model's, first {other[0]}")
    kinds = {name: (buffer.shape, buffer.dtype) for name, buffer in own.buffers.items()}
    if kinds != {name: (buffer.shape, buffer.dtype) for name, buffer in buffers.items()}:
        raise UnusableCheckpoint("its buffers differ from this model's")
    moments, stored = sorted(own.moment_kinds), sorted(reader.moment_kinds)
    if stored != moments:
        names = one_line(", ".join(stored) or "none")
        raise UnusableCheckpoint(f"its moments are {names}, but the optimizer has {', '.join(moments) or 'none'}")


@dataclass(frozen=True)
class FrozenWeights:
    """A file of frozen weights.

    Attributes:
        names: names of the parameters in the file.
        path: path to the file.
        facts: size and hash of the file; None on ranks other than 0, which do not write the manifest.
    """

    names: frozenset[str]
    path: Path
    facts: ShardFacts | None

    def link_into(self, folder: Path) -> None:
        """Put the file into a folder, as a hard link if possible."""
        try:
            os.link(self.path, folder / FROZEN)
        except OSError:
            shutil.copyfile(self.path, folder / FROZEN)
            sync_to_disk(folder / FROZEN)


def keep_frozen(
    folder: Path, parameters: Mapping[str, torch.Tensor], found: FoundCheckpoint | None, *, is_main: bool
) -> FrozenWeights:
    """Return the file of frozen weights, which rank 0 writes to a run's checkpoints folder.

    Args:
        folder: the checkpoints folder.
        parameters: the full frozen weights, by name.
        found: the checkpoint to resume from, whose frozen weights replace `parameters`; None for a fresh start.
        is_main: whether this is rank 0.

    Raises:
        UserError: if the file cannot be written, or the checkpoint has no frozen weights.
    """
    names, path, facts = frozenset(parameters), folder / FROZEN, None
    if is_main:
        try:
            if found is None:
                facts = write_frozen(path, parameters)
            else:
                facts = found.manifest.frozen
                if facts is None:
                    raise UserError(f"checkpoint {found.path} cannot be used: it has no file of frozen weights.")
                if not path.exists() or not path.samefile(found.path / FROZEN):
                    with replacing(path, durable=True) as temporary:
                        shutil.copyfile(found.path / FROZEN, temporary)
        except (OSError, SafetensorError) as error:
            raise UserError(f"the frozen weights cannot be written to {folder}: {one_line(error)}.") from None
    return FrozenWeights(names, path, facts)
