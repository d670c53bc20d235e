"""The sums of an epoch: exact, and so the same in any order."""

from __future__ import annotations

import math

import pytest
import torch

from tests.kit import ALONE
from zerovision.training.tasks.scores import LOSS_UNIT, ScoreSums


def test_the_sums_of_losses_do_not_depend_on_their_order():
    """Losses of very different sizes, in batches of 4, of 64, and backwards."""
    losses = torch.rand(512, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.arange(512).remainder(8).sub(5)
    assert sum(losses.double().tolist()) != sum(reversed(losses.double().tolist())), "the numbers must tell them apart"
    states = []
    for order, size in ((losses, 4), (losses, 64), (losses.flip(0), 4)):
        sums = ScoreSums(10, ALONE.device)
        for part in order.split(size):
            sums.add(part, torch.zeros(len(part), 10), torch.zeros(len(part), dtype=torch.int64), torch.ones(len(part)))
        states.append(sums.state())
    assert torch.equal(states[0], states[1])
    assert torch.equal(states[0], states[2])
    assert states[0][0].item() == pytest.approx(math.fsum(losses.double().tolist()), abs=len(losses) * LOSS_UNIT / 2)


def test_a_loss_that_is_not_finite_shows_and_padding_does_not():
    labels, logits = torch.zeros(2, dtype=torch.int64), torch.zeros(2, 10)
    for value in (math.inf, math.nan):
        for weights, is_finite in (([1.0, 0.0], True), ([1.0, 1.0], False)):
            sums = ScoreSums(10, ALONE.device)
            sums.add(torch.tensor([0.5, value]), logits, labels, torch.tensor(weights))
            assert math.isfinite(sums.reduce(ALONE).loss) == is_finite
