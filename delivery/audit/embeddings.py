"""What a trained model, or without one the picture itself, says of every image, as vectors that can be compared."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn

from delivery.audit.catalogue import Catalogue
from models.image_size import as_names

PICTURE_SIDE = 16


def embeddings(network: nn.Module, metadata: dict[str, Any], catalogue: Catalogue) -> np.ndarray:
    """Return what the classifier of a network reads of each image, float32 [N, F]; zeros of unreadable ones.

    Of a network without one classifier, as an ensemble, what it returns.

    Args:
        network: of `training.checkpoint.weights.load_model`.
        metadata: its metadata.
        catalogue: the images.
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
    """Return grey levels and mean colour of each image, float32 [N, PICTURE_SIDE^2 + 3].

    Args:
        pictures: uint8 [N, SIDE, SIDE].
        colours: float32 [N, 3], mean of each channel, 0 to 1.
    """
    small = [
        nn.functional.adaptive_avg_pool2d(torch.from_numpy(part).float(), PICTURE_SIDE).flatten(1).numpy()
        for part in np.array_split(pictures, len(pictures) // 4096 + 1)
    ]
    return np.concatenate([np.concatenate(small), 255 * colours], 1)
