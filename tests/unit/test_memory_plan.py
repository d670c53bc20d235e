"""The prediction of memory against closed forms; `benchmarks/memory.py` compares it with processes."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from models.dry_run import activation_bytes, model_sizes
from planning.memory import STATE_RULES, plan_memory

PARAMETERS, BUCKET, ACTIVATIONS = 1_000_000, 10_000, 500


def plan(stage, ranks, **changes):
    settings = {"optimizer": "adamw", "engine": "deepspeed", "bucket_elements": BUCKET, "activation_bytes": ACTIVATIONS}
    return plan_memory(parameters=PARAMETERS, zero_stage=stage, ranks=ranks, **(settings | changes))


@pytest.mark.parametrize("ranks", [1, 2, 8])
def test_the_state_follows_the_zero_paper(ranks):
    """Section 3 of arXiv:1910.02054 in fp32: the optimizer's 12 bytes (copy, two moments) are shared at every stage."""
    optimizer = 12 * PARAMETERS / ranks
    for stage, weights in ((1, 4 * PARAMETERS), (2, 4 * PARAMETERS), (3, 4 * PARAMETERS / ranks)):
        found = plan(stage, ranks)
        assert found.weights + found.moments == pytest.approx(weights + optimizer)
    assert plan(2, ranks).gradients == pytest.approx(4 * PARAMETERS / ranks)
    assert plan(3, ranks).gradients == pytest.approx(4 * PARAMETERS / ranks)


def test_more_ranks_and_higher_stages_need_no_more():
    peaks = {(stage, ranks): plan(stage, ranks).peak for _, stage in STATE_RULES for ranks in (1, 2, 4)}
    for stage in (1, 2, 3):
        assert peaks[stage, 1] > peaks[stage, 2] > peaks[stage, 4]
    assert peaks[1, 4] > peaks[2, 4]


def test_sgd_keeps_one_moment_less():
    assert plan(1, 2).moments - plan(1, 2, optimizer="sgd").moments == 4 * PARAMETERS / 2


def test_activations_of_a_small_network():
    """Kept are the images (the first layer's input) and the second layer's input, which ReLU keeps as its output."""
    network = nn.Sequential(nn.Flatten(), nn.Linear(3 * 4 * 4, 5), nn.ReLU(), nn.Linear(5, 2))
    images, hidden = 7 * 3 * 4 * 4, 7 * 5
    assert activation_bytes(network, batch_size=7, image_size=4) == 4 * (images + hidden)
    assert activation_bytes(network, batch_size=7, image_size=4, precision="bf16") == 2 * (images + hidden)


def test_activations_of_a_convolution_with_batchnorm():
    """Kept are the images, the convolution's output, BatchNorm's mean and deviation per channel, and ReLU's output."""
    network = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
    images, maps = 2 * 3 * 6 * 6, 2 * 8 * 6 * 6
    assert activation_bytes(network, batch_size=2, image_size=6) == 4 * (images + 2 * maps + 2 * 8)


def test_sizes_of_a_model():
    network = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    buffer_bytes = 2 * 4 * torch.float32.itemsize + torch.int64.itemsize
    assert model_sizes(network) == {
        "parameters": 3 * 4 + 4 + 4 + 4,
        "largest_parameter": 3 * 4,
        "buffer_bytes": buffer_bytes,
    }
