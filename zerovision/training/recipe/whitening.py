"""A frozen first convolution that whitens small patches of the images.

Half of its filters are the eigenvectors with the largest eigenvalues of the covariance of training image patches, each
divided by the square root of its eigenvalue. The other half are the negatives of the first half, because a ReLU often
follows (Jordan 2024, https://arxiv.org/abs/2404.00498, and the paper's code, `init_whitening_conv`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.nn import functional

from zerovision.models.build import BuiltModel
from zerovision.training.data.datasets import DatasetPair, ImageDataset
from zerovision.training.data.reading.files import ImageError

MOST_IMAGES = 1000
EPSILON = 5e-4  # added to the eigenvalues


@torch.no_grad()
def whiten_stem(built: BuiltModel, data: DatasetPair, *, computes: bool) -> None:
    """Set the weights of a model's first convolution to whitening filters, and freeze them.

    Args:
        built: a model with `ModelSpec.whitens_stem`, on the CPU.
        data: data whose training images determine the filters: at most 1000, evenly spaced over the set, and
            preprocessed as in evaluation.
        computes: whether to compute the filters; only one rank needs to, because all ranks receive its frozen weights.
    """
    stem: nn.Conv2d = built.module.get_submodule(built.module.default_cfg["first_conv"])  # type: ignore
    if computes:
        half = whitening_filters(_sample(data), stem.weight.shape[2:])[: stem.out_channels // 2]
        stem.weight.copy_(torch.cat([half, -half]).view_as(stem.weight))
    stem.weight.requires_grad_(False)


def whitening_filters(images: Iterable[torch.Tensor], size: tuple[int, ...]) -> torch.Tensor:
    """Return the whitening filters of all patches by descending eigenvalue, float32 [n, n] with n = C x height x width.

    Args:
        images: images, each float32 [C, H, W].
        size: height and width of a patch.
    """
    products, patches = torch.zeros(()), 0
    for image in images:
        columns = functional.unfold(image[None].double(), size)[0]
        products, patches = products + columns @ columns.T, patches + columns.shape[1]
    values, vectors = torch.linalg.eigh(products / patches)
    return (vectors / (values + EPSILON).sqrt()).T.flip(0).float()


def _sample(data: DatasetPair) -> Iterator[torch.Tensor]:
    images = ImageDataset(data.train.source, data.preprocessing)
    count = min(len(images), MOST_IMAGES)
    for number in range(count):
        try:
            yield images[0, number * len(images) // count][0]
        except ImageError:  # reported when the image is used in training
            continue
