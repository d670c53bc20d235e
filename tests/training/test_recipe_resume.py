"""A recipe of many ingredients, on grey images: two ranks that nothing disturbed, and one that goes on from them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from commands import read_epochs
from safetensors.numpy import load_file

from zerovision.training.base.run_folder import LEARNING_RATE

RECIPE = {
    "model_type": "airbench_small",
    "epochs": 3,
    "batch_size": 64,
    "image_size": 16,
    "image_channels": 1,
    "loss": "bce",
    "repeated_augmentation": 3,
    "progressive_size": "12:0:2",
    "eval_image_size": 20,
    "augmentation": "shift_flip",
    "mirror": "alternate",
    "shift_padding": "reflect",
    "random_erasing": 0.3,
    "mixup": 0.4,
    "cutmix": 1.0,
    "mixup_probability": 0.7,
    "ema": 0.8,
    "lookahead": 3,
    "layer_decay": 0.8,
    "keep_last": 99,
    "save_every_steps": 1,
}
RARE = [  # they exclude each other
    pytest.param({"sampling": "balanced"}, marks=pytest.mark.slow),
    {"class_weights": "wave-3=2.5", "optimizer": "muon"},  # under PyTorch's engine
]


@pytest.fixture(scope="module")
def train(train_on_ranks):
    """Train with the recipe on so many ranks, and return the folder of the run."""
    return lambda ranks, logs, **changes: train_on_ranks(ranks, logs, **RECIPE | changes)


@pytest.fixture(scope="module", params=RARE, ids=lambda more: "".join(more))
def whole(request, train, tmp_path_factory) -> tuple[Path, dict[str, str]]:
    """The folder of three epochs of 8 steps on two ranks, with a checkpoint after each step, and an option of it."""
    return train(2, tmp_path_factory.mktemp("whole"), **request.param), request.param


def weights(folder: Path) -> dict[str, np.ndarray]:
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("checkpoint", ["step-00000-0000001", "step-00002-0000003"])
def test_one_rank_goes_on_from_any_step_of_two_and_ends_with_the_same_bytes(whole, train, tmp_path, checkpoint):
    folder, option = whole
    place = str(folder / "checkpoints" / checkpoint)
    resumed = train(1, tmp_path, gradient_accumulation_steps=2, resume=place, **option)
    ours, theirs = weights(resumed), weights(folder)
    assert ours.keys() == theirs.keys()
    assert all(ours[name].tobytes() == theirs[name].tobytes() for name in ours)
    assert read_epochs(resumed).items() <= read_epochs(folder).items()
    assert max(read_epochs(resumed)) == 3


@pytest.mark.slow
def test_all_ranks_take_the_rate_of_one_search(train, tmp_path):
    automatic = {
        "model_type": "basic_cnn",
        "strategy": "fsdp_stage3",
        "batch_size": 16,
        "image_size": 8,
        "progressive_size": "",
        "eval_image_size": 0,
        "repeated_augmentation": 1,
        "learning_rate": "auto",
        "epochs": 1,
        "save_every_steps": 0,
        "rate_trial_steps": 20,
        "mixup": 0.0,
        "cutmix": 0.0,
    }
    one = train(1, tmp_path / "one", gradient_accumulation_steps=2, **automatic)
    two = train(2, tmp_path / "two", **automatic)
    rates = [json.loads((folder / LEARNING_RATE).read_text()) for folder in (one, two)]
    assert rates[0]["tried"] == rates[1]["tried"]
    assert (one / "model.safetensors").read_bytes() == (two / "model.safetensors").read_bytes()


def test_the_stem_still_whitens_at_the_end(whole):
    """Its filters are pairs with opposite signs, which no training would leave so."""
    filters = weights(whole[0])["stem.weight"]
    assert filters.any()
    assert (filters[: len(filters) // 2] == -filters[len(filters) // 2 :]).all()
