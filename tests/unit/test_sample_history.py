"""What is kept of each training image by epoch, against softmax itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.kit import ALONE, assert_same_but_rounding
from zerovision.training.data.reader import Batch
from zerovision.training.observe.observer import Seen
from zerovision.training.observe.sample_history import HISTORY, MOST_EPOCHS, SampleHistory, mean_probabilities

IMAGES, CLASSES, EPOCHS = 40, 3, 2  # of three classes the two probabilities that are kept tell the third
LABELS = torch.arange(IMAGES) % CLASSES
LOGITS = 5 * torch.randn(EPOCHS, IMAGES, CLASSES, generator=torch.Generator().manual_seed(0))


def batch(indices: torch.Tensor, **changes: object) -> Batch:
    given = {"labels": LABELS[indices], "weights": torch.ones(len(indices))} | changes
    return Batch(torch.empty(0), indices=indices, **given)


def add(history: SampleHistory, epoch: int, indices: torch.Tensor) -> None:
    for some in indices.split(8):
        see(history, epoch, batch(some), LOGITS[epoch, some])


def see(history, epoch, batch, logits):
    history.before_step(epoch)
    history.seen(Seen(batch, logits[:, 0], logits, logits[:, 0]))


def kept(folder):
    return {path.name: path.read_bytes() for path in (folder / HISTORY).iterdir()}


def means(folder):
    return mean_probabilities(folder, LABELS.numpy(), CLASSES)


@pytest.fixture
def whole(tmp_path):
    history = SampleHistory(tmp_path / "whole", ALONE, EPOCHS, 1)
    (tmp_path / "whole").mkdir()
    for epoch in range(EPOCHS):
        add(history, epoch, torch.randperm(IMAGES))
        history.after_steps()
    return tmp_path / "whole"


def test_means_are_those_of_softmax(whole):
    assert_same_but_rounding(means(whole), LOGITS.double().softmax(2).mean(0))


def test_an_epoch_that_was_interrupted_and_goes_on_before_that_has_the_same_bytes(whole, tmp_path):
    for epoch in range(EPOCHS):
        for first, last in ((0, 24), (16, IMAGES)):
            history = SampleHistory(tmp_path, ALONE, EPOCHS, 1)
            add(history, epoch, torch.arange(first, last))
            history.after_steps()
    assert kept(tmp_path) == kept(whole)


def test_padding_and_mixed_and_broken_images_are_left_out(tmp_path):
    history = SampleHistory(tmp_path, ALONE, 1, 1)
    everything = torch.arange(IMAGES)
    logits = LOGITS[0].clone()
    logits[7] = torch.nan
    see(history, 0, batch(everything, targets=torch.ones(IMAGES, CLASSES)), logits)
    history.after_steps()
    assert not (tmp_path / HISTORY).exists()
    see(history, 0, batch(everything, weights=(everything != 3).float()), logits)
    history.after_steps()
    assert np.flatnonzero(np.isnan(means(tmp_path)).any(1)).tolist() == [3, 7]
    # An image of which there are two views has the mean of both.
    see(history, 0, batch(torch.tensor([5])), LOGITS[1, 5:6])
    history.after_steps()
    assert_same_but_rounding(means(tmp_path)[5], LOGITS[:, 5].softmax(1).mean(0))


def test_of_a_long_run_epochs_at_equal_distances_are_kept(tmp_path):
    history = SampleHistory(tmp_path, ALONE, 2 * MOST_EPOCHS + 1, 1)
    for epoch in range(2 * MOST_EPOCHS + 1):
        see(history, epoch, batch(torch.arange(4)), LOGITS[0, :4])
        history.after_steps()
    assert sorted(kept(tmp_path)) == [f"{epoch:03}.npy" for epoch in range(3, 2 * MOST_EPOCHS + 2, 3)]


def test_images_of_other_data_are_not_mistaken_for_these(whole):
    assert np.isnan(mean_probabilities(whole, (LABELS.numpy() + 1) % CLASSES, CLASSES)).all()
    assert np.isnan(mean_probabilities(whole, LABELS[:-1].numpy(), CLASSES)).all()


def test_a_damaged_file_is_as_none(whole):
    path = whole / HISTORY / "001.npy"
    for content in (b"", b"x", path.read_bytes()[:-3]):
        path.write_bytes(content)
        assert_same_but_rounding(means(whole), LOGITS[1].double().softmax(1))
    path.unlink()
    rows = np.load(whole / HISTORY / "002.npy")
    rows["other"][0] = CLASSES
    np.save(whole / HISTORY / "002.npy", rows)
    assert np.isnan(means(whole)).all()
