"""Mixup and cutmix: timm's, of the real samples of a micro-batch alone, and a function of seed, epoch and leaf."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from timm.data.mixup import Mixup

from tests.kit import ELEMENTWISE, assert_same_but_rounding
from zerovision.training.data import DataOptions, load_data
from zerovision.training.data.batch_transforms import Mixing
from zerovision.training.data.loader import Loader
from zerovision.training.data.sampler import BatchPlan
from zerovision.training.world.preserved_process import preserved_generators

BATCH, SIZE, CLASSES = 8, 16, 5
LEAVES = 40


def pixels(seed: int = 0) -> torch.Tensor:
    images = torch.randn(BATCH, 3, SIZE, SIZE, generator=torch.Generator().manual_seed(seed))
    return images.contiguous(memory_format=torch.channels_last)


def mixing(**options) -> Mixing:
    return Mixing(DataOptions(**{"epochs": 3, "seed": 4, **options}), CLASSES)


def mixed_by_timm(images, labels, epoch, leaf, **options):
    """What timm's `Mixup` returns, if its generator is in the state of this leaf."""
    names = {"mixup": "mixup_alpha", "cutmix": "cutmix_alpha", "mixup_probability": "prob"}
    names["mixup_switch_probability"] = "switch_prob"
    given = {names[name]: value for name, value in options.items()}
    with preserved_generators():
        generator = np.random.RandomState(np.random.MT19937(np.random.SeedSequence((4, epoch, leaf))))
        np.random.set_state(generator.get_state())
        mixup = Mixup(**{"mixup_alpha": 0.0, "label_smoothing": 0.0, "num_classes": CLASSES, **given})
        return mixup(images.clone(), labels)


@pytest.mark.parametrize(
    "options",
    [
        {"mixup": 0.2},
        {"cutmix": 1.0},
        {"mixup": 0.8, "cutmix": 0.5, "mixup_probability": 0.7},
        {"mixup": 0.1, "cutmix": 1.0, "mixup_switch_probability": 0.2},
    ],
    ids=" ".join,
)
def test_batches_are_mixed_as_by_timm(options):
    mix, labels, kinds = mixing(**options), torch.arange(BATCH) % CLASSES, set()
    one_hot = torch.nn.functional.one_hot(labels, CLASSES).float()
    for leaf in range(LEAVES):
        images, targets = mix(pixels(leaf), labels, np.ones(BATCH, dtype=np.float32), 1, leaf)
        theirs, their_targets = mixed_by_timm(pixels(leaf), labels, 1, leaf, **options)
        assert_same_but_rounding(images, theirs, ELEMENTWISE)
        assert_same_but_rounding(one_hot if targets is None else targets, their_targets, ELEMENTWISE)
        drawn = mix.drawn(1, leaf, (SIZE, SIZE))
        kinds.add("none" if drawn is None else "mixup" if drawn.box is None else "cutmix")
        if targets is None:
            assert torch.equal(images, pixels(leaf))
    names = {"mixup", "cutmix"} & {*options}
    assert kinds == (names | {"none"} if "mixup_probability" in options else names)


@pytest.mark.parametrize("options", [{"mixup": 1.0}, {"cutmix": 1.0}], ids=" ".join)
@pytest.mark.parametrize("left_out", [[6, 7], [0, 3], [1], list(range(8))], ids=str)
def test_padding_and_unread_images_get_into_no_other(options, left_out):
    mix, labels = mixing(**options), torch.arange(BATCH) % CLASSES
    weights = np.ones(BATCH, dtype=np.float32)
    weights[left_out] = 0
    images = pixels()
    images[left_out] = float("nan")
    mixed, targets = mix(images.clone(), labels, weights, 0, 0)
    real = np.flatnonzero(weights)
    assert mixed[real].isfinite().all()
    assert targets is not None
    assert torch.equal(targets[left_out], torch.nn.functional.one_hot(labels[left_out], CLASSES).float())
    torch.testing.assert_close(targets.sum(1), torch.ones(BATCH))
    # the real ones are a batch of their own
    alone, alone_targets = mix(images[real], labels[real], weights[real], 0, 0)
    assert torch.equal(mixed[real], alone)
    assert torch.equal(targets[real], alone_targets)


def test_the_last_epochs_are_not_mixed():
    mix = mixing(mixup=1.0, mixup_off_epochs=2)
    assert [mix.drawn(epoch, 0, (SIZE, SIZE)) is None for epoch in range(4)] == [False, True, True, True]
    assert mixing(mixup=1.0).drawn(2, 0, (SIZE, SIZE)) is not None


def test_another_seed_epoch_or_leaf_is_another_mix():
    places = [(seed, epoch, leaf) for seed in range(2) for epoch in range(2) for leaf in range(2)]
    assert len({mixing(mixup=1.0, seed=seed).drawn(epoch, leaf, (SIZE, SIZE)) for seed, epoch, leaf in places}) == len(
        places
    )


def micro_batches(pair, world, accumulation, workers=0, first_step=0):
    """Every micro-batch of epoch 1 by (step, leaf), as bytes."""
    plan = BatchPlan(len(pair.train), 6, accumulation, world, seed=0)
    found = {}
    for rank in range(world):
        loader = Loader(pair.train, plan, rank, workers=workers)
        for number, batch in enumerate(loader.epoch(1, first_step)):
            step, micro_step = divmod(number, accumulation)
            parts = (batch.images, batch.targets, batch.labels, batch.weights)
            found[first_step + step, rank * accumulation + micro_step] = [
                None if part is None else part.numpy().tobytes() for part in parts
            ]
        loader.close()
    return found


def test_same_bytes_for_any_ranks_workers_and_after_a_resume():
    """37 images in micro-batches of 6, four to a step: the last step has padding beside a real image."""
    options = {"mixup": 0.4, "cutmix": 1.0, "mixup_probability": 0.8, "random_erasing": 0.5, "mirror": "alternate"}
    pair = load_data(DataOptions(shift_pixels=4, shift_padding="reflect", epochs=2, **options))
    source = pair.train.source
    source.images, source.labels = source.images[:37], source.labels[:37]
    expected = micro_batches(pair, world=1, accumulation=4)
    assert len(expected) == 8
    mixed = [targets is not None for _, targets, _, _ in expected.values()]
    assert any(mixed)
    assert not all(mixed)
    for world, accumulation, workers in ((2, 2, 0), (4, 1, 0), (1, 4, 1)):
        assert micro_batches(pair, world, accumulation, workers) == expected
    rest = micro_batches(pair, 2, 2, first_step=1)
    assert rest == {place: parts for place, parts in expected.items() if place[0] == 1}
