"""Images for an export: those that the file is checked on, and those that int8 is calibrated with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import nn

from delivery.evaluation_data import EvaluationData
from delivery.export.job import CheckImages, run_in_batches
from training.data.augment import STEPS
from training.data.datasets import ImageDataset
from training.data.reading.images import ImageError
from training.errors import UserError

MAX_BYTES = 2 * 10**9  # of the images that are kept in memory, float32


def load_check_images(data: EvaluationData, module: nn.Module, *, most: int, batch_size: int) -> CheckImages:
    """Read validation images, evenly spaced over the set where not all are taken, and run the network on them.

    Args:
        data: of `load_evaluation_data`.
        module: the network, float32 on the CPU.
        most: images that are wanted, 0 for as many as fit into `MAX_BYTES`.
        batch_size: images of one forward pass.

    Raises:
        UserError: where an image cannot be read, or none is left.
    """
    dataset = data.datasets.val
    bytes_per_image = 4 * 3 * dataset.batch_transforms.size**2
    images, indices = _read(dataset, most or max(MAX_BYTES // bytes_per_image, 1), bool(data.datasets.bad_image_share))
    labels = data.label_map[dataset.source.labels[indices]]
    logits = run_in_batches(module, images, batch_size)
    return CheckImages(images, labels, logits, f"{data.data}, {data.split}")


def load_calibration_images(data: EvaluationData, count: int) -> torch.Tensor:
    """Read images of the training split, evenly spaced and not augmented: float32 [count or fewer, 3, S, S].

    Raises:
        UserError: as `load_check_images`.
    """
    source, preprocessing = data.datasets.train.source, data.datasets.val.preprocessing
    dataset = ImageDataset(source, preprocessing, STEPS["none"], data.datasets.train.seed)
    return _read(dataset, count, bool(data.datasets.bad_image_share))[0]


def _read(dataset: ImageDataset, most: int, skip_bad_images: bool) -> tuple[torch.Tensor, Sequence[int]]:
    chosen = np.linspace(0, len(dataset) - 1, min(most, len(dataset))).round().astype(int).tolist()
    images, indices = [], []
    for index in chosen:
        try:
            images.append(dataset[0, index][0])
            indices.append(index)
        except ImageError:
            if not skip_bad_images:
                raise
    if not images:
        raise UserError(f"none of {len(chosen)} images could be read: an export needs some to be checked on.")
    return torch.stack(images), indices
