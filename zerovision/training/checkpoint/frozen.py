"""The weights that a fine-tuning run does not train: one file beside its checkpoints, which name it by its hash."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError

from zerovision.training.base.atomic_write import replacing, sync_to_disk, unfinished
from zerovision.training.base.errors import UserError, one_line
from zerovision.training.checkpoint.manifest import ShardFacts, frozen_name
from zerovision.training.checkpoint.shards import write_frozen
from zerovision.training.checkpoint.store import FoundCheckpoint


@dataclass(frozen=True)
class FrozenWeights:
    """A file of frozen weights.

    Attributes:
        names: of the parameters in it.
        facts: its size and hash; None on ranks other than 0, which write no manifest.
    """

    names: frozenset[str]
    facts: ShardFacts | None


def keep_frozen(
    folder: Path, parameters: Mapping[str, torch.Tensor], found: FoundCheckpoint | None, *, is_main: bool
) -> FrozenWeights:
    """Write the frozen weights into a run's checkpoints folder; on rank 0 alone.

    Args:
        folder: the checkpoints folder.
        parameters: the frozen weights by name, whole.
        found: the checkpoint that the run goes on from: its frozen weights are taken instead; None for a fresh start.
        is_main: whether this is rank 0.

    Raises:
        UserError: if they cannot be written, or the checkpoint has none.
    """
    names = frozenset(parameters)
    if not is_main:
        return FrozenWeights(names, None)
    try:
        if found is None:
            return FrozenWeights(names, _write(folder, parameters))
        facts = found.manifest.frozen
        if facts is None:
            raise UserError(f"checkpoint {found.path} cannot be used: it names no file of frozen weights.")
        source, path = found.path.parent / frozen_name(facts), folder / frozen_name(facts)
        if not path.exists() or not path.samefile(source):
            with replacing(path, durable=True) as temporary:
                shutil.copyfile(source, temporary)
        return FrozenWeights(names, facts)
    except (OSError, SafetensorError) as error:
        raise UserError(f"the frozen weights cannot be written to {folder}: {one_line(error)}.") from None


def _write(folder: Path, parameters: Mapping[str, torch.Tensor]) -> ShardFacts:
    temporary = unfinished(folder / "frozen", "tmp")
    try:
        facts = write_frozen(temporary, parameters)
        os.replace(temporary, folder / frozen_name(facts))
        sync_to_disk(folder)
    finally:
        temporary.unlink(missing_ok=True)
    return facts
