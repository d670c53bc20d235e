"""The whitened first convolution: against the recipe of the paper's code, and by what whitening means."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from zerovision.models.build import build_model
from zerovision.training.data import DataOptions, load_data
from zerovision.training.recipe.whitening import EPSILON, whiten_stem, whitening_filters

SIZE = (3, 3)


def smooth_images(count: int = 40) -> torch.Tensor:
    """Images whose neighbouring pixels are alike, as photographs' are: float32 [count, 3, 12, 12]."""
    noise = torch.randn(count, 3, 14, 14, generator=torch.Generator().manual_seed(0))
    return functional.avg_pool2d(noise, 3, stride=1) * 2


def filters_of_the_paper(images: torch.Tensor) -> torch.Tensor:
    """As `get_patches` and `get_whitening_parameters` of cifar10-airbench, whose patches are [n, 3, h, w]."""
    patches = images.unfold(2, 3, 1).unfold(3, 3, 1).permute(0, 2, 3, 1, 4, 5).reshape(-1, 27)
    values, vectors = torch.linalg.eigh((patches.T @ patches / len(patches)).double())
    return (vectors.T.flip(0) / torch.sqrt(values.flip(0) + EPSILON).view(-1, 1)).float()


def test_filters_are_the_papers_and_whiten():
    images = smooth_images()
    filters = whitening_filters(images, SIZE)
    expected = filters_of_the_paper(images)
    signs = (filters * expected).sum(1).sign()  # of an eigenvector, either
    torch.testing.assert_close(filters * signs[:, None], expected, rtol=1e-2, atol=1e-3)
    outputs = functional.conv2d(images, filters.view(27, 3, 3, 3)).transpose(0, 1).flatten(1)
    covariance = outputs @ outputs.T / outputs.shape[1]
    torch.testing.assert_close(covariance[:9, :9], torch.eye(9), atol=0.02, rtol=0)
    raw = functional.unfold(images, SIZE).transpose(0, 1).flatten(1)
    assert (raw @ raw.T / raw.shape[1]).diag().max() > 0.1


@pytest.fixture(scope="module")
def digits():
    return load_data(DataOptions())


def test_the_stem_is_frozen_with_filters_of_a_fixed_sample_on_the_rank_that_computes_them(digits):
    stems = []
    for computes in (True, True, False):
        torch.manual_seed(0)
        built = build_model("basic_cnn", num_classes=10, image_size=32)
        before = [parameter.clone() for parameter in built.module.parameters()]
        whiten_stem(built, digits, computes=computes)
        stem, *others = built.module.parameters()
        assert not stem.requires_grad
        assert all(parameter.requires_grad for parameter in others)
        assert all(torch.equal(now, then) for now, then in zip(others, before[1:], strict=True))
        assert torch.equal(stem, before[0]) != computes
        stems.append(stem)
    assert torch.equal(stems[0], stems[1])
    images = torch.stack([digits.val[0, index][0] for index in range(100)])
    outputs = functional.conv2d(images, stems[0])
    assert torch.equal(stems[0][:16], -stems[0][16:])
    deviations = outputs[:, :8].transpose(0, 1).flatten(1).square().mean(1).sqrt()
    torch.testing.assert_close(deviations, torch.ones(8), atol=0.25, rtol=0)
