"""The size of images by epoch and for validation: ffcv-imagenet's rule, and the images of a set of that size."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from made_data import train_loader

from tests.kit import ALONE
from zerovision.training.base.errors import UserError
from zerovision.training.config.command_line import parse_args
from zerovision.training.data import DataOptions, load_data
from zerovision.training.data.augmentations import size_ramp
from zerovision.training.engines.build import build_training_model

PROGRESSIVE = DataOptions(
    data="fake", image_size=32, eval_image_size=48, progressive_size="16:1:4", augmentation="shift_flip"
)


def ffcv_resolution(epoch: int, low: int, high: int, first: int, last: int, multiple: int) -> int:
    """`ImageNetTrainer.get_resolution` of libffcv/ffcv-imagenet, train_imagenet.py, whose multiple is 32."""
    if epoch <= first:
        return low
    if epoch >= last:
        return high
    interp = np.interp([epoch], [first, last], [low, high])
    return int(np.round(interp[0] / multiple)) * multiple


@pytest.mark.parametrize(("full", "multiple"), [(192, 32), (224, 32), (128, 32), (96, 4), (32, 4)])
def test_sizes_are_those_of_ffcv(full, multiple):
    for first, last in ((0, 0), (0, 1), (2, 2), (6, 13), (0, 40)):
        low = full // 2
        ramp = size_ramp(f"{low}:{first}:{last}")
        sizes = [ramp.size(epoch, full) for epoch in range(60)]
        assert sizes == [ffcv_resolution(epoch, low, full, first, last, multiple) for epoch in range(60)]
        assert ramp.sizes(full) == sorted(set(sizes))


def test_a_size_between_lies_between():
    ramp = size_ramp("100:0:10")
    assert [ramp.size(epoch, 150) for epoch in (0, 1, 5, 9, 10)] == [100, 100, 128, 150, 150]


def test_an_epochs_images_are_those_of_a_set_of_its_size():
    """In memory and read one by one, forwards and backwards through the epochs."""
    mixed = dataclasses.replace(PROGRESSIVE, cutmix=1.0, random_erasing=0.5, epochs=9)
    pair = load_data(mixed)
    in_memory, by_worker = train_loader(pair, 16), train_loader(pair, 16, workers=1)
    for epoch, size in ((0, 16), (2, 20), (3, 28), (4, 32), (1, 16)):
        options = dataclasses.replace(mixed, image_size=size, eval_image_size=0, progressive_size="")
        plain = load_data(options)
        expected = next(train_loader(plain, 16).epoch(epoch))
        for loader in (in_memory, by_worker):
            batch = next(loader.epoch(epoch))
            assert batch.images.shape == (16, 3, size, size)
            assert torch.equal(batch.images, expected.images)
            assert torch.equal(batch.targets, expected.targets)
        key = (epoch, int(batch.indices[3]))
        assert torch.equal(pair.train[key][0], plain.train[key][0]), "before they are mixed"
    by_worker.close()


@pytest.mark.parametrize("data", ["fake", "digits"])
def test_validation_images_are_those_of_a_set_of_their_size(data):
    """As a later evaluation of the weights sees them."""
    pair = load_data(dataclasses.replace(PROGRESSIVE, data=data))
    assert pair.train.sizes == [16, 20, 28, 32]
    later = {key: getattr(pair.preprocessing, key) for key in ("image_size", "mean", "std")}
    plain = load_data(DataOptions(data=data, **later))
    assert pair.preprocessing == plain.preprocessing
    assert torch.equal(pair.val[0, 7][0], plain.val[0, 7][0])


def build(model: str):
    return build_training_model(parse_args(["--model-type", model])[0], load_data(PROGRESSIVE), ALONE)


def test_the_network_is_made_for_the_validation_images():
    built, flops = build("basic_cnn")
    assert built.description.image_size == 48
    assert flops is None, "the operations of one size would be wrong for the others"


def test_a_network_of_a_fixed_size_is_refused():
    with pytest.raises(UserError, match="is made for images of 48 pixels, and does not work with 16"):
        build("timm:vit_tiny_patch16_224")
