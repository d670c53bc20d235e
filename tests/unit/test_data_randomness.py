"""Augmentation: our own draws have torchvision's distributions, and batches are what single samples are."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from made_data import train_loader
from scipy import stats
from torchvision.transforms import v2

from zerovision.training.data import DataOptions, load_data
from zerovision.training.data.augment import CROP_DRAWS, random_box
from zerovision.training.data.randomness import _mix, uniform_draws

GOLDEN_GAMMA = 0x9E3779B97F4A7C15
SAMPLES = 4000
# The draws are fixed, so these are no chances: a test that passes, passes always.
LEAST_P = 0.001


def test_the_hash_is_splitmix64():
    # the first three outputs for seed 0, as published with the reference implementation
    states = np.array([0, GOLDEN_GAMMA, 2 * GOLDEN_GAMMA % 2**64], dtype=np.uint64)
    assert [hex(value) for value in _mix(states)] == ["0xe220a8397b1dcdaf", "0x6e789e6aa1b965f4", "0x6c45d188009454f"]


def test_draws_are_uniform_and_independent():
    draws = uniform_draws(3, 5, np.arange(SAMPLES), 4)
    assert draws.shape == (SAMPLES, 4)
    assert draws.min() >= 0
    assert draws.max() < 1
    neighbours = [draws[:-1, 0], draws[1:, 0], uniform_draws(3, 6, np.arange(SAMPLES - 1), 1)[:, 0]]
    neighbours.append(uniform_draws(4, 5, np.arange(SAMPLES - 1), 1)[:, 0])
    for column in draws.T:
        assert stats.kstest(column, "uniform").pvalue > LEAST_P
    for group in (draws.T, np.array(neighbours)):
        correlations = np.corrcoef(group)[~np.eye(4, dtype=bool)]
        assert np.abs(correlations).max() < 4 / SAMPLES**0.5


def test_draws_depend_on_seed_epoch_and_index_alone():
    together = uniform_draws(1, 2, np.array([7, 900, 7]), 3)
    np.testing.assert_array_equal(together[1:2], uniform_draws(1, 2, np.array([900]), 3))
    np.testing.assert_array_equal(together[0], together[2])
    np.testing.assert_array_equal(together[:, :2], uniform_draws(1, 2, np.array([7, 900, 7]), 2))
    others = [(seed, epoch, index) for seed in range(3) for epoch in range(3) for index in range(3)]
    assert len({float(uniform_draws(s, e, np.array([i]), 1)[0, 0]) for s, e, i in others}) == 27


@pytest.mark.parametrize(
    ("size", "ranges"),
    [
        *((size, {}) for size in [(375, 500), (500, 375), (40, 400), (7, 9)]),
        ((375, 500), {"scale": (0.35, 0.8), "ratio": (0.5, 3)}),
        ((40, 400), {"scale": (0.9, 1), "ratio": (0.5, 0.9)}),
    ],
    ids=str,
)
def test_crops_have_the_distribution_of_torchvision(size, ranges):
    height, width = size
    draws = uniform_draws(0, 0, np.arange(SAMPLES), CROP_DRAWS)
    ours = np.array([random_box(height, width, row, **ranges) for row in draws.tolist()])
    torch.manual_seed(0)
    crop, image = v2.RandomResizedCrop(8, **ranges), torch.empty(3, height, width)
    made = [crop.make_params([image]) for _ in range(SAMPLES)]
    theirs = np.array([[params[key] for key in ("top", "left", "height", "width")] for params in made])
    for boxes in (ours, theirs):
        assert (boxes >= [0, 0, 1, 1]).all()
        assert (boxes[:, :2] + boxes[:, 2:] <= [height, width]).all()
    for measure in (
        lambda box: box[:, 2] * box[:, 3],
        lambda box: np.log(box[:, 3] / box[:, 2]),
        lambda box: box[:, 0],
        lambda box: box[:, 1],
        lambda box: box[:, 0] + box[:, 2] / 2,
        lambda box: box[:, 0] * box[:, 3],
    ):
        assert stats.ks_2samp(measure(ours), measure(theirs)).pvalue > LEAST_P


def test_shifts_and_mirrors_have_the_distribution_of_torchvision():
    """`RandomCrop` with padding takes each of the 7 x 7 places as often, `RandomHorizontalFlip` mirrors half."""
    pair = load_data(DataOptions(augmentation="shift_flip", mean=(0, 0, 0), std=(1, 1, 1)))
    raw = pair.train.source.images[0].expand(3, -1, -1)
    padded = torch.nn.functional.pad(raw, [3] * 4)
    windows = [padded[:, y : y + 32, x : x + 32] for y in range(7) for x in range(7)]
    counts = {image.numpy().tobytes(): 0 for window in windows for image in (window, window.flip(2))}
    assert len(counts) == 2 * 7 * 7
    finished = pair.train.batch_transforms(raw.expand(SAMPLES, -1, -1, -1), 0, np.arange(SAMPLES))
    for image in (finished * 255).round().to(torch.uint8):
        counts[image.contiguous().numpy().tobytes()] += 1
    assert stats.chisquare(list(counts.values())).pvalue > LEAST_P


CHANGED = {"mirror": "alternate", "shift_pixels": 5, "shift_padding": "reflect", "random_erasing": 0.5}


@pytest.mark.parametrize(
    "options", [*({"augmentation": name} for name in ("none", "shift", "shift_flip", "crop_flip")), CHANGED], ids=str
)
@pytest.mark.parametrize(("data", "image_size"), [("digits", 0), ("fake", 0), ("fake", 24)])
def test_a_batch_in_memory_is_its_samples_one_by_one(data, image_size, options):
    pair = load_data(DataOptions(data=data, image_size=image_size, seed=2, **options))
    loader = train_loader(pair, 32)
    batch = next(loader.epoch(3))
    for place, index in enumerate(batch.indices.tolist()):
        image, label = pair.train[3, index]
        assert torch.equal(batch.images[place], image)
        assert batch.labels[place] == label
    assert batch.images.dtype == torch.float32
    assert batch.images.is_contiguous(memory_format=torch.channels_last)


def test_a_set_too_large_for_the_memory_is_read_image_by_image(monkeypatch):
    pair = load_data(DataOptions(data="fake", augmentation="shift_flip"))
    in_memory = train_loader(pair, 16)
    monkeypatch.setattr("zerovision.training.data.loader.MAX_BYTES", 1000 * 3 * 38 * 38 - 1)
    too_large = train_loader(pair, 16)
    assert in_memory._from_memory is not None
    assert too_large._from_memory is None
    for first, second in zip(in_memory.epoch(0), too_large.epoch(0), strict=True):
        assert torch.equal(first.images, second.images)
        assert torch.equal(first.labels, second.labels)
