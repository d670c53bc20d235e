"""The weights that a fine-tuning run does not train: one file, written once and linked into its checkpoints."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError

from zerovision.training.base.atomic_write import replacing, sync_to_disk
from zerovision.training.base.errors import UserError, one_line
from zerovision.training.checkpoint.manifest import FROZEN, ShardFacts
from zerovision.training.checkpoint.shards import write_frozen
from zerovision.training.checkpoint.store import FoundCheckpoint


@dataclass(frozen=True)
class FrozenWeights:
    """A file of frozen weights.

    Attributes:
        names: names of the parameters in it.
        path: path to the file.
        facts: its size and hash; None on ranks other than 0, which write no manifest.
    """

    names: frozenset[str]
    path: Path
    facts: ShardFacts | None

    def link_into(self, folder: Path) -> None:
        """Put the file into a folder, by a hard link if possible."""
        try:
            os.link(self.path, folder / FROZEN)
        except OSError:
            shutil.copyfile(self.path, folder / FROZEN)
            sync_to_disk(folder / FROZEN)


def keep_frozen(
    folder: Path, parameters: Mapping[str, torch.Tensor], found: FoundCheckpoint | None, *, is_main: bool
) -> FrozenWeights:
    """Write the frozen weights into a run's checkpoints folder; only on rank 0.

    Args:
        folder: the checkpoints folder.
        parameters: the whole frozen weights by name.
        found: the checkpoint to resume from, whose frozen weights are used instead; None for a fresh start.
        is_main: whether this is rank 0.

    Raises:
        UserError: if they cannot be written, or the checkpoint has none.
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
