"""The training state, its restoration from a checkpoint, and the file of frozen weights."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError

from zerovision.training.base.errors import UserError, one_line
from zerovision.training.base.files import replacing, sync_to_disk
from zerovision.training.base.progress import Progress
from zerovision.training.checkpoint.manifest import FROZEN, Manifest, ShardFacts, UnusableCheckpoint
from zerovision.training.checkpoint.shards import CheckpointReader, write_frozen
from zerovision.training.checkpoint.store import FoundCheckpoint
from zerovision.training.engines.engine import Engine
from zerovision.training.engines.model_buffers import AVERAGE
from zerovision.training.engines.parameter_shards import EngineState, frozen_parameters, of_first_group
from zerovision.training.world.world import World

if TYPE_CHECKING:
    from zerovision.training.tasks.scores import ScoreSums


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
        if reader.moment_kinds and reader.frozen != frozen_parameters(engine.module).keys():
            raise UnusableCheckpoint("its frozen parameters are not those of this model")
        _check_sums(epoch_sums, sums)
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


def _check_sums(found: torch.Tensor, sums: ScoreSums) -> None:
    """Raise an error for impossible sums, which would make every later average wrong or NaN."""
    own = sums.state()
    if (found.shape, found.dtype) != (own.shape, own.dtype):
        raise UnusableCheckpoint("its epoch sums have another shape or dtype")
    loss, top1, top5, samples = found.tolist()
    if not (0 <= loss < math.inf and 0 <= top1 <= top5 <= samples < math.inf):  # NaN is outside every range
        raise UnusableCheckpoint("its epoch sums cannot be those of losses and images")


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
