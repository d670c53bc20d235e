"""Watches the files that the first epoch reads: lists them in the run's folder, and reports images that occur twice."""

from __future__ import annotations

import dataclasses

import numpy as np
import torch

from training.base.run_folder import IMAGES, RunFolder
from training.base.run_logger import Loggers
from training.data.datasets import DatasetPair
from training.data.duplicates import find_duplicates
from training.data.image_list import list_images, write_image_list
from training.data.loader import Loader
from training.world.collectives import broadcast_object, largest_over_ranks
from training.world.exchange import flag
from training.world.world import World


class ImageContents:
    """Collects the digests of a run's images until it has read all of them once; a collective.

    Args:
        folder: Of the run; if it has the list of images, nothing is collected.
        data: The data.
        loaders: This rank's, by the name of their part.
        world: The ranks.
        loggers: For what is found.
    """

    def __init__(
        self,
        folder: RunFolder,
        data: DatasetPair,
        loaders: dict[str, Loader],
        world: World,
        loggers: Loggers,
    ) -> None:
        self._file, self._data, self._loaders, self._world, self._loggers = (
            *(folder.path / IMAGES, data, loaders),
            *(world, loggers),
        )
        is_needed = broadcast_object(not self._file.is_file(), flag, world) and not data.train.source.in_memory
        for loader in loaders.values():
            loader.watch(is_on=is_needed)

    def after_epoch(self, step: int, *, is_last_chance: bool) -> None:
        """Report and list what was read; a collective.

        Args:
            step: Optimizer steps of the run so far.
            is_last_chance: Whether the epoch was read as a whole, or no other comes.
        """
        if not is_last_chance or any(loader.digests is None for loader in self._loaders.values()):
            return
        digests = {name: digests_over_ranks(loader, self._world) for name, loader in self._loaders.items()}
        for loader in self._loaders.values():
            loader.watch(is_on=False)
        if not self._world.is_main:
            return
        found = find_duplicates(self._data, digests)
        for line in found.lines():
            self._loggers.message(f"note: {line}")
        if found.lines():
            self._loggers.event("duplicates", {"step": step} | dataclasses.asdict(found))
        try:
            write_image_list(self._file, list_images(self._data, digests))
        except OSError as error:
            self._loggers.message(f"note: the list of images cannot be written: {error}")


def digests_over_ranks(loader: Loader, world: World) -> np.ndarray:
    """Return the digests that all ranks' loaders of a part have collected, int64 [N]; a collective."""
    assert loader.digests is not None
    return largest_over_ranks(torch.from_numpy(loader.digests).to(world.device), world).cpu().numpy()
