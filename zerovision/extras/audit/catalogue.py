"""Reads all images of a data set, numbered across its parts, as pictures and as vectors."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from rich.progress import track
from torch import nn

from zerovision.extras.audit.copies import SIDE
from zerovision.models.dry_run import as_names
from zerovision.models.weights_metadata import Preprocessing
from zerovision.training.data.augment import viewable
from zerovision.training.data.datasets import DatasetPair, ImageDataset
from zerovision.training.data.loader import Loader, most_workers
from zerovision.training.data.reader import Batch
from zerovision.training.data.reading.image_numbers import stretched
from zerovision.training.data.reading.sources import UNKNOWN, FileSource, grey
from zerovision.training.data.sampler import EvaluationPlan
from zerovision.training.observe.loggers.text import open_console

PICTURE_SIDE = 16
IMAGES_AT_ONCE = 64
IMAGES_WORTH_WORKERS = 1000  # fewer images are read faster than a process starts


class Catalogue:
    """The images of all parts, numbered in the order of the parts.

    `class_names` has a name for each label, or for each set of labels.
    """

    def __init__(self, datasets: DatasetPair) -> None:
        self._sets = datasets.parts
        self._starts = np.cumsum([0, *map(len, self._sets.values())])
        self.class_names, self.num_classes = datasets.label_names, len(datasets.class_names)
        self.has_several = datasets.sets is not None  # whether an image may have several labels
        self.parts = np.repeat(list(self._sets), [len(set_) for set_ in self._sets.values()])  # [N], of each image
        self.labels = np.concatenate([set_.source.labels.numpy() for set_ in self._sets.values()])  # int64 [N]
        self.unreadable: dict[int, str] = {}  # why `read` could not read an image, by image number
        self.groups = [group for set_ in self._sets.values() for group in _groups(set_)]  # of each image, or ''

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def are_files(self) -> bool:
        """Whether the images are separate files, not arrays or parts of archives."""
        return all(isinstance(set_.source, FileSource) for set_ in self._sets.values()) and any(
            os.path.isfile(self.name(number)) for number in range(len(self))
        )

    def other_columns(self) -> dict[str, list[float | str]]:
        """Return the table's other columns by name: the images' weights, or no columns if images have no weights."""
        sources = [set_.source for set_ in self._sets.values() if isinstance(set_.source, FileSource)]
        if all(source.loss_weights is None for source in sources):
            return {}
        weights = [torch.ones(len(one.labels)) if one.loss_weights is None else one.loss_weights for one in sources]
        return {"weight": torch.cat(weights).tolist()}

    def name(self, number: int) -> str:
        """Return the full path of an image, or its part and position if it is in memory."""
        part, position = self._place(number)
        name = self._sets[part].source.name(position)
        return name if isinstance(self._sets[part].source, FileSource) else f"{part} {name}"

    def image(self, number: int) -> torch.Tensor:
        """Return an image, uint8 or float32 [C, H, W]; raise ImageError if it cannot be read."""
        part, position = self._place(number)
        return self._sets[part].source.read(position)

    def read(self, preprocessing: Preprocessing | None = None) -> Iterator[tuple[np.ndarray, Batch, np.ndarray]]:
        """Yield, for each batch, the numbers of its images, the batch, and whether each image could be read, bool [B].

        By default, images are whole, at `SIDE` x `SIDE` pixels. A terminal shows one progress bar per part.
        """
        console = open_console(stderr=True)
        is_silent = not console.is_terminal
        for start, (part, set_) in zip(self._starts, self._sets.items(), strict=False):
            source, values = set_.source, set_.preprocessing.values
            zeros, ones = ((value,) * source.channels for value in (0.0, 1.0))
            whole = Preprocessing(SIDE, None, mean=zeros, std=ones, values=values)  # does not normalize
            dataset = ImageDataset(source, preprocessing or whole, most_bad=len(set_))
            is_worth_it = len(set_) >= IMAGES_WORTH_WORKERS and not source.in_memory
            plan = EvaluationPlan(len(set_), IMAGES_AT_ONCE, 1)
            loader = Loader(dataset, plan, 0, workers=most_workers() if is_worth_it else 0)
            loader.watch()
            bar = track(loader, f"reading {part}", len(loader), console=console, transient=True, disable=is_silent)
            with contextlib.closing(loader):
                for batch in bar:
                    numbers = int(start) + batch.indices.numpy()
                    is_read = batch.weights.numpy() > 0
                    for number in numbers[~is_read].tolist():
                        reason = loader.bad_images.get(self.name(number))
                        self.unreadable |= {number: reason} if reason else {}
                    yield numbers, batch, is_read

    def pictures(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Read all images once; return their gray pictures, mean colors and digests.

        The pictures are uint8 [N, SIDE, SIDE], and the colors float32 [N, 3], 0 to 1; both are 0 for unreadable images.
        The digests of the files, int64 [N], are `UNKNOWN` for these and for images in memory.
        """
        pictures = np.zeros((len(self), SIDE, SIDE), dtype=np.uint8)
        colours, digests = np.zeros((len(self), 3), dtype=np.float32), np.full(len(self), UNKNOWN)
        for numbers, batch, is_read in self.read():
            shown = viewable(batch.images)
            if any(set_.source.values != "uint8" for set_ in self._sets.values()):
                shown = torch.stack([stretched(image) for image in shown])
            levels = (255 * shown).round().clamp(0, 255).to(torch.uint8)
            levels = levels if levels.shape[1] == 1 else grey(levels)
            pictures[numbers[is_read]] = levels[:, 0].numpy()[is_read]
            colours[numbers[is_read]] = shown.mean((2, 3)).expand(-1, 3).numpy()[is_read]
            if len(batch.digests):
                digests[numbers[is_read]] = batch.digests[is_read]
        return pictures, colours, digests

    def _place(self, number: int) -> tuple[str, int]:
        part = int(np.searchsorted(self._starts, number, side="right")) - 1
        return list(self._sets)[part], number - int(self._starts[part])


def _groups(set_: ImageDataset) -> list[str]:
    """Return the group of each image; '' for an image without a group."""
    if not isinstance(set_.source, FileSource):
        return [""] * len(set_)
    images = set_.source.images
    return [images.words["group"][code] for code in images["group"].tolist()]


def embeddings(network: nn.Module, metadata: dict[str, Any], catalogue: Catalogue) -> np.ndarray:
    """Return the classifier's input for each image, float32 [N, F]; zeros for unreadable images.

    For a network that does not have exactly one classifier, such as an ensemble, return the network's output.
    """
    heads = as_names(getattr(network, "default_cfg", {}).get("classifier"))
    kept: list[torch.Tensor] = []
    if len(heads) == 1:
        network.get_submodule(heads[0]).register_forward_pre_hook(lambda _, given: kept.append(given[0]))
    found: list[tuple[np.ndarray, np.ndarray]] = []
    with torch.inference_mode():
        for numbers, batch, is_read in catalogue.read(metadata["preprocessing"]):
            kept.clear()
            returned = network(batch.images)
            vectors = (kept[0] if kept else returned).flatten(1).float().numpy()
            found.append((numbers[is_read], vectors[is_read]))
    features = np.zeros((len(catalogue), found[0][1].shape[1]), dtype=np.float32)
    for numbers, vectors in found:
        features[numbers] = vectors
    return features


def picture_features(pictures: np.ndarray, colours: np.ndarray) -> np.ndarray:
    """Return the gray levels and mean color of each image in `Catalogue.pictures`, float32 [N, PICTURE_SIDE^2 + 3]."""
    small = [
        nn.functional.adaptive_avg_pool2d(torch.from_numpy(part).float(), PICTURE_SIDE).flatten(1).numpy()
        for part in np.array_split(pictures, len(pictures) // 4096 + 1)
    ]
    return np.concatenate([np.concatenate(small), 255 * colours], 1)
