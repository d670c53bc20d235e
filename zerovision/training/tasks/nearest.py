"""Classifies images without a classifier, by the votes of the labeled images with the most similar features (k-NN)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

# Wu et al. 2018 (https://arxiv.org/abs/1805.01978, section 3.4), with the number of neighbors that DINO found best
# (Caron et al. 2021, https://arxiv.org/abs/2104.14294, appendix E).
NEIGHBOURS, TEMPERATURE = 20, 0.07
MOST_COMPARED = 2**16  # training images; in a larger set, only every second, third, ... image is used


def log_votes(features: torch.Tensor, bank: torch.Tensor, labels: torch.Tensor, classes: int) -> torch.Tensor:
    """Return the logarithm of `votes`, float32 [B, classes], for features of any norm and dtype.

    One additional vote is shared equally among all classes, so that no probability is 0.
    """
    shares = votes(F.normalize(features.float()), bank, labels, classes)
    return ((NEIGHBOURS * shares + 1 / classes) / (NEIGHBOURS + 1)).log()


def votes(features: torch.Tensor, bank: torch.Tensor, labels: torch.Tensor, num_classes: int) -> torch.Tensor:
    """Return the votes of the nearest images for each class, weighted by their cosines: float32 [B, classes].

    Each row sums to 1.

    Args:
        features: [B, F], with norm 1.
        bank: [N, F], features of the labeled images, with norm 1.
        labels: int64 [N], labels of the images in `bank`.
        num_classes: number of classes.
    """
    nearest = (features @ bank.T).topk(min(NEIGHBOURS, len(bank)), dim=1)
    weights = (nearest.values / TEMPERATURE).softmax(1)[:, None]
    return (weights @ F.one_hot(labels[nearest.indices], num_classes).float())[:, 0]
