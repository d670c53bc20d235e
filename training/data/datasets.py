"""A loaded data set: the samples, and everything that a run has to record about them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset
from torchvision.transforms import InterpolationMode
from torchvision.transforms.v2 import functional

from training.data import DataOptions, bad_image_share
from training.data.augment import STEPS, Steps, evaluation_geometry, randaugment, resize
from training.data.batch_transforms import BATCH_DRAWS, BatchTransforms
from training.data.crops import CROP_DRAWS, random_box
from training.data.randomness import preserved_generators, seed_generators, uniform_draws
from training.data.reading.sources import Source
from training.errors import UserError

CROP_RATIO = 256 / 224  # photographs are resized to this multiple of the image size, then cut to their centre
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class ImageDataset(Dataset):
    """Samples by (epoch, index): `(image float32 [3, S, S] normalised, label)`.

    Attributes:
        source: The raw images.
        preprocessing: As `DatasetPair.preprocessing`.
        steps: The augmentation.
        seed: Seed of the augmentation.
        finish: What follows after `read`, on the device and for a whole batch.
        whole: From a whole image, uint8 [C, H, W] of any size, to uint8 [C, S, S].
    """

    def __init__(self, source: Source, preprocessing: dict[str, Any], steps: Steps, seed: int) -> None:
        self.source, self.preprocessing, self.steps, self.seed = source, preprocessing, steps, seed
        self.batch_transforms = BatchTransforms(preprocessing, steps, seed)
        self.whole = evaluation_geometry(preprocessing)
        self._policy = randaugment(preprocessing) if steps.randaugment else None

    def __len__(self) -> int:
        return len(self.source.labels)

    def __getitem__(self, key: tuple[int, int]) -> tuple[torch.Tensor, int]:
        """Return one sample as it is in one epoch; leaves the global random generators as they were.

        Raises:
            ImageError: The image cannot be read.
        """
        epoch, index = key
        indices = np.array([index])
        with preserved_generators():
            image = self.read(epoch, index, self.draws(epoch, indices)[0])
        return self.batch_transforms(image[None], epoch, indices)[0], int(self.source.labels[index])

    def draws(self, epoch: int, indices: np.ndarray) -> list[list[float]]:
        """Return what `read` needs for each sample of `indices` (int64 [B]): all at once, because that is faster."""
        return uniform_draws(self.seed, epoch, indices, BATCH_DRAWS + CROP_DRAWS)[:, BATCH_DRAWS:].tolist()

    def read(self, epoch: int, index: int, draws: list[float]) -> torch.Tensor:
        """Return the image as uint8 [3, S, S], before `finish`; may leave the global generators seeded.

        Raises:
            ImageError: The image cannot be read.
        """
        if self.steps.crop:
            part = self.source.read_part(index, lambda height, width: random_box(height, width, draws))
            image = resize(part, self.preprocessing)
        else:
            image = self.whole(self.source.read(index))
        if self._policy is None:
            return image
        seed_generators(self.seed, epoch, index)
        return self._policy(image)

    def from_pixels(self, pixels: torch.Tensor, draws: list[float]) -> torch.Tensor:
        """As `read` without RandAugment, from the whole image, uint8 [3, H, W] on any device."""
        if not self.steps.crop:
            return self.whole(pixels)
        _, height, width = pixels.shape
        box = random_box(height, width, draws)
        filter_mode = InterpolationMode(self.preprocessing["interpolation"])
        return functional.resized_crop(pixels, *box, [self.batch_transforms.size] * 2, filter_mode, antialias=True)


@dataclass(frozen=True)
class DatasetPair:
    """What `load_data` returns; the same on every rank.

    Attributes:
        train: Training samples, augmented by (seed, epoch, index).
        val: Validation samples, never augmented; the epoch of their key is ignored.
        class_names: Name of each label.
        preprocessing: The evaluation transform as JSON can hold it, see `transforms.evaluation_transform`.
        augmentation: The augmentation in use, never "auto".
        train_counts: Training images of each class.
        val_counts: Validation images of each class.
        fingerprint: sha256 that changes with the classes, the files (path, size, label) or the pixels in memory.
        bad_image_share: Share of each set's images that may be unreadable and weigh 0; with 0 the first ends the run.
        notes: One-line messages for the user.
    """

    train: ImageDataset
    val: ImageDataset
    class_names: list[str]
    preprocessing: dict[str, Any]
    augmentation: str
    train_counts: list[int]
    val_counts: list[int]
    fingerprint: str
    bad_image_share: Fraction = Fraction(0)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class DatasetDefaults:
    """What a data set suggests where the user did not choose.

    Attributes:
        image_size: Side in pixels.
        augmentation: What "auto" means.
        centre_crop: Whether evaluation cuts out the centre (photographs) or resizes the whole image.
        mean: Per channel, of values in 0..1.
        std: As `mean`.
    """

    image_size: int
    augmentation: str
    centre_crop: bool
    mean: Sequence[float]
    std: Sequence[float]


PHOTOGRAPHS = DatasetDefaults(224, "crop_flip", centre_crop=True, mean=IMAGENET_MEAN, std=IMAGENET_STD)


def make_dataset_pair(
    train: Source,
    val: Source,
    class_names: list[str],
    defaults: DatasetDefaults,
    options: DataOptions,
    fingerprint: str,
    notes: Iterable[str] = (),
) -> DatasetPair:
    """Put the transforms around two sources and check their labels.

    Raises:
        UserError: A set is empty, there is only one class, or a label is out of range.
    """
    size = options.image_size or defaults.image_size
    preprocessing = {
        "image_size": size,
        "resize_size": round(size * CROP_RATIO) if defaults.centre_crop else None,
        "mean": list(options.mean or defaults.mean),
        "std": list(options.std or defaults.std),
        "interpolation": options.interpolation,
    }
    augmentation = defaults.augmentation if options.augmentation == "auto" else options.augmentation
    return DatasetPair(
        train=ImageDataset(train, preprocessing, STEPS[augmentation], options.seed),
        val=ImageDataset(val, preprocessing, STEPS["none"], options.seed),
        class_names=class_names,
        preprocessing=preprocessing,
        augmentation=augmentation,
        train_counts=_count_labels(train.labels, class_names, "training"),
        val_counts=_count_labels(val.labels, class_names, "validation"),
        fingerprint=fingerprint,
        bad_image_share=bad_image_share(options.bad_images),
        notes=list(notes),
    )


def _count_labels(labels: torch.Tensor, class_names: list[str], what: str) -> list[int]:
    if len(labels) == 0:
        raise UserError(f"the {what} set is empty: at least one image is needed.")
    if len(class_names) < 2:
        raise UserError(f"the {what} set has one class only ({class_names[0]!r}): at least two are needed.")
    # a label out of range would end in an assertion on the GPU, long after the start
    low, high, last = int(labels.min()), int(labels.max()), len(class_names) - 1
    if low < 0 or high > last:
        raise UserError(f"the {what} labels reach from {low} to {high}: {last + 1} classes need 0 to {last}.")
    return torch.bincount(labels, minlength=len(class_names)).tolist()
