"""The search for a learning rate: its decisions, its command line, and real ones."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import os
import re
import shutil
import signal

import numpy as np
import pytest
import torch

from tests import kit
from tests.kit import ROUNDING
from tests.training.commands import read_metrics
from zerovision.training import auto_learning_rate
from zerovision.training.auto_learning_rate import HIGHEST, LOWEST, find_rate
from zerovision.training.base.errors import TOO_MANY_BAD_STEPS_EXIT_CODE, RunEnded
from zerovision.training.base.run_folder import LEARNING_RATE
from zerovision.training.config import TrainConfig
from zerovision.training.data.batch_transforms import Mixing
from zerovision.training.data.reader import Batch
from zerovision.training.tasks.labels import GUESSES, build_loss
from zerovision.training.trial import KeptSteps

GUESS = math.log(10)


def trained(rate, best, *, steps=100):
    """Losses that end the lower the nearer the rate is to the best; far above it there are none."""
    off = math.log10(rate / best)
    final = 0.5 + 0.5 * abs(off) + (50 if off > 1.6 else 0)
    noise = 0.05 * np.random.default_rng(3).normal(size=steps)  # of the images, which are the same for each rate
    losses = final + 1.5 * np.exp(-np.arange(steps) / 20) + noise
    return [None] * steps if off > 3.1 else losses.tolist()


@pytest.mark.parametrize("best", [1e-5, 1e-4, 3.2e-4, 1e-3, 3.2e-3, 0.01, 0.1, 1.0])
def test_the_rate_with_the_lowest_final_loss_is_found_from_the_usual_one(best):
    calls = []

    def measure(rate):
        calls.append(rate)
        return trained(rate, best)

    found, tried = find_rate(1e-3, LOWEST, HIGHEST, GUESS, measure)
    assert found == pytest.approx(best, rel=0.05)
    assert calls == [*tried], "each once"
    assert 1e-3 in tried
    assert LOWEST <= min(tried) <= max(tried) <= HIGHEST
    assert len(tried) <= abs(math.log10(best / 1e-3)) * 2 + 4.1


def test_a_rate_that_is_hardly_better_does_not_replace_the_usual_one():
    """A loss that differs by chance, or by less than it takes to tell in a validation."""
    noise = np.random.default_rng(0).normal(size=(7, 100))
    found, tried = find_rate(
        1e-3, LOWEST, HIGHEST, GUESS, lambda rate: trained(rate, 1e-3) + (rate != 1e-3) * noise[0] * 1e-3
    )
    assert (found, len(tried)) == (1e-3, 3)
    drop = lambda rate: np.array(trained(1e-3, 1e-3)) - 0.005 * (rate > 1e-3)  # noqa: E731
    assert find_rate(1e-3, LOWEST, HIGHEST, GUESS, drop)[0] == 1e-3
    scattered = lambda rate: np.array(trained(1e-3, 1e-3)) + noise[int(2 * math.log10(rate) + 7)]  # noqa: E731
    assert find_rate(1e-3, LOWEST, HIGHEST, GUESS, scattered)[0] in (1e-3, None)


def test_a_usual_rate_that_diverges_is_replaced_by_the_first_that_does_not():
    too_high = lambda rate: [None] * 100 if rate > 1e-4 else trained(rate, 1e-4)  # noqa: E731
    assert find_rate(1e-3, LOWEST, HIGHEST, GUESS, too_high)[0] == 1e-4
    found, tried = find_rate(1e-3, LOWEST, HIGHEST, GUESS, lambda _: [None] * 100)
    assert (found, sorted(tried)) == (None, [1e-4, 3.2e-4, 1e-3, 3.2e-3, 0.01]), "a decade each way"


def test_an_untrained_network_that_learns_to_answer_the_same_has_learned_nothing():
    """As mobilenet did here: losses of 3.4 at first, and at rates so high that it was ruined those of a guess."""
    noise = 0.06 * np.random.default_rng(1).normal(size=100)
    ruined = lambda rate: GUESS + np.exp(-np.arange(100) * rate * 30) + noise  # noqa: E731
    assert find_rate(1e-3, LOWEST, HIGHEST, GUESS, ruined)[0] is None
    learns_at_one = lambda rate: ruined(rate) - (rate == 1e-3) * np.linspace(0, 0.4, 100)  # noqa: E731
    assert find_rate(1e-3, LOWEST, HIGHEST, GUESS, learns_at_one)[0] == 1e-3
    better_above = lambda rate: ruined(rate) - (rate == 0.01) * np.linspace(0, 0.4, 100)  # noqa: E731
    assert find_rate(1e-3, LOWEST, HIGHEST, GUESS, better_above)[0] == 0.01


@pytest.mark.parametrize("name", GUESSES)
def test_the_loss_of_a_guess_is_that_of_equal_probabilities(name):
    config, classes = TrainConfig(loss=name), 7
    loss = build_loss(config, [*"abcdefg"], [1] * classes, torch.device("cpu"))
    logits = torch.full((1, classes), -math.log(classes - 1))  # of 1 / 7, for a sigmoid as for a softmax
    batch = Batch(torch.empty(0), torch.zeros(1, dtype=torch.int64), torch.ones(1), torch.zeros(1))
    assert float(loss(logits, batch)) == pytest.approx(GUESSES[name](classes), rel=ROUNDING)


def test_a_few_steps_without_a_loss_do_not_matter():
    with_gaps = lambda rate: [None, *trained(rate, 0.01)[1:-2], None, math.nan]  # noqa: E731
    assert find_rate(1e-3, LOWEST, HIGHEST, GUESS, with_gaps)[0] == pytest.approx(0.01)


@pytest.mark.parametrize("steps", [300, 100])
def test_a_loss_that_no_rate_lowers_suggests_none(steps):
    """As for weights that are trained already: the higher the rate, the more is lost."""
    by_chance = found = 0
    for seed in range(50):
        noise = 0.1 * np.random.default_rng(seed).normal(size=steps)
        noise[0] -= 0.5  # an easy first batch

        def unlearned(rate, noise=noise):
            return 0.5 + noise + min(rate / 1e-4, 1) * np.sin(np.linspace(0.1, 3, steps))

        def falling(_rate, noise=noise):
            return 2 + noise - 0.2 * np.linspace(0, 1, steps)  # by two deviations

        by_chance += find_rate(1e-3, LOWEST, HIGHEST, GUESS, unlearned)[0] is not None
        found += find_rate(1e-3, LOWEST, HIGHEST, GUESS, falling)[0] == 1e-3
    assert by_chance <= 5
    assert found >= 45


RECIPE = {"image_size": 8, "batch_size": 8, "epochs": 1}  # of 8 steps


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> str:
    """A set of ten colours, 64 images to train on: as few as a rate can be told by."""
    draws, labels = np.random.default_rng(5), np.arange(96) % 10
    pixels = draws.integers(0, 190, (10, 1, 1, 3))[labels] + draws.integers(0, 60, (96, 8, 8, 3))
    path, pixels = tmp_path_factory.mktemp("images") / "images.npz", pixels.astype(np.uint8)
    np.savez(path, x_train=pixels[:64], y_train=labels[:64], x_test=pixels[64:], y_test=labels[64:])
    return f"npz:{path}"


@pytest.fixture
def train(images, tmp_path):
    """Train on the images; return the folder of the run and its rate."""

    def run(name, code=0, **changes):
        folder = kit.train(tmp_path, name, code=code, **({"data": images} | RECIPE | changes))
        return folder, code or json.loads((folder / "config.json").read_text())["learning_rate"]

    return run


def test_an_automatic_rate_is_the_best_of_short_trainings_and_trains_as_the_same_number(train, monkeypatch):
    monkeypatch.setattr("zerovision.training.auto_learning_rate.TRIAL_STEPS", 20)  # three epochs, of 7 of their 8 steps
    recipe = {"learning_rate": "auto", "optimizer": "sgd"}  # whose usual rate is not the best
    auto, rate = train("auto", epochs=3, **recipe)
    result = json.loads((auto / LEARNING_RATE).read_text())
    tried = {row[0]: row[1:] for row in result["tried"]}
    assert {1e-3, 3.2e-3, rate} < tried.keys()
    assert rate != 1e-3
    assert [len(losses) for _, losses in tried.values()] == [21] * len(tried)
    assert [final for final, _ in tried.values()] == pytest.approx(
        [np.mean(losses[-4:]) for _, losses in tried.values()]
    )
    assert rate == result["suggested"]
    assert all(tried[rate][0] <= final for final, _ in tried.values())
    assert not (auto / "learning-rate-trial").exists()

    typed, _ = train("typed", epochs=3, **recipe | {"learning_rate": rate})
    for name in ("model.safetensors", "checkpoints/step-00003-0000000/shard-00000.safetensors"):
        assert (auto / name).read_bytes() == (typed / name).read_bytes(), name

    monkeypatch.setattr("zerovision.training.auto_learning_rate._search", None)  # a resume makes no other search
    assert train("auto", epochs=4, resume="auto", **recipe)[1] == rate
    shutil.rmtree(auto / "checkpoints")  # as if it had been stopped before the first one
    assert train("auto", resume="auto", **recipe)[1] == rate
    shutil.rmtree(auto / "checkpoints")
    monkeypatch.setattr("zerovision.training.auto_learning_rate._search", lambda *_: (0.25, "tried"))
    other = recipe | {"optimizer": "momentum", "momentum": 0.1}  # for which what was found does not hold
    assert train("auto", resume="auto", **other)[1] == 0.25


def only_the_first(first, *given):
    """Try one rate in the place of a search."""
    return first, {first: given[-1](first)}


def test_a_trial_is_the_run_in_small(train, monkeypatch):
    """As a run of as many steps with that rate: the same weights, images and schedule."""
    monkeypatch.setattr("zerovision.training.auto_learning_rate.TRIAL_STEPS", 24)
    monkeypatch.setattr("zerovision.training.auto_learning_rate.find_rate", only_the_first)
    recipe = {"optimizer": "muon", "schedule": "linear", "mixup": 0.5, "epochs": 3, "warmup_epochs": 1.0}
    folder, _ = train("auto", learning_rate="auto", **recipe)
    rate, _, losses = json.loads((folder / LEARNING_RATE).read_text())["tried"][0]
    typed, _ = train("typed", learning_rate=rate, log_every_steps=1, **recipe)
    assert losses == [entry["loss"] for entry in read_metrics(typed, "step")]


@pytest.mark.slow
def test_a_trial_is_as_long_as_the_run_at_most_and_trains_no_epoch_whole_for_less(train, monkeypatch):
    steps = []
    monkeypatch.setattr(
        "zerovision.training.auto_learning_rate.find_rate", lambda *given: (0.5, {1e-3: steps.append(given[-1](1e-3))})
    )
    monkeypatch.setattr("zerovision.training.auto_learning_rate.describe_search", lambda *_: {})
    monkeypatch.setattr("zerovision.training.auto_learning_rate.in_words", lambda _: "")
    train("short", learning_rate="auto", data="fake", batch_size=20)  # 50 steps an epoch
    monkeypatch.setattr("zerovision.training.auto_learning_rate.TRIAL_STEPS", 25)
    train("long", learning_rate="auto", data="fake", batch_size=20)
    assert [len(losses) for losses in steps] == [50, 25]


@pytest.mark.slow
def test_trials_mix_as_the_runs_first_epochs(train, monkeypatch):
    monkeypatch.setattr("zerovision.training.auto_learning_rate.TRIAL_STEPS", 24)
    monkeypatch.setattr("zerovision.training.auto_learning_rate.find_rate", only_the_first)
    drawn = []
    monkeypatch.setattr(Mixing, "drawn", lambda _self, epoch, *_: drawn.append(epoch))
    train("off", learning_rate="auto", mixup=8.0, epochs=3, mixup_off_epochs=1)
    epochs = [epoch for epoch, _ in itertools.groupby(drawn)]
    assert epochs == [0, 1, 0, 1, 2], "the trial again from the start in place of epoch 2, then the training"


def test_a_rate_whose_training_ends_early_is_lost_although_its_last_losses_were_low(train, monkeypatch, capsys):
    trials, steps = [], KeptSteps.steps

    def logged(losses, point):
        trials.extend([] if losses in trials else [losses])
        low = dataclasses.replace(point, loss=point.loss / 100) if len(trials) == 2 else point
        steps(losses, low)
        if low.loss != point.loss and len(losses.losses) == 23:
            raise RunEnded("10 steps in a row were skipped", TOO_MANY_BAD_STEPS_EXIT_CODE, 23)

    monkeypatch.setattr(KeptSteps, "steps", logged)
    monkeypatch.setattr("zerovision.training.auto_learning_rate.TRIAL_STEPS", 24)
    folder, rate = train("early", progress="lines", learning_rate="auto", epochs=3)
    tried = {one: losses for one, *losses in json.loads((folder / LEARNING_RATE).read_text())["tried"]}
    assert tried[3.2e-3] == [None, [None] * 24]
    assert rate != 3.2e-3
    assert re.search(r"^--learning-rate auto: 0\.0032 diverges \(\d+ s\)$", capsys.readouterr().out, re.MULTILINE)


def test_no_clear_fall_ends_the_run_and_names_the_default(train, monkeypatch, capsys):
    monkeypatch.setattr("zerovision.training.auto_learning_rate._train", lambda *_: [2.0] * 100)
    train("none", code=2, learning_rate="auto")
    told = "no rate from 0.00032 to 0.0032 clearly lowered the loss within 100 steps: use a number (the default is"
    assert f"{told} 0.001)." in capsys.readouterr().err


@pytest.mark.parametrize("when", ["in a trial", "between trials"])
def test_a_stop_during_the_search_is_obeyed_at_the_next_step_with_the_usual_end(train, monkeypatch, capsys, when):
    trials, steps, free = [], KeptSteps.steps, auto_learning_rate.free_memory

    def logged(losses, point):
        steps(losses, point)
        if not trials or trials[-1] is not losses:
            trials.append(losses)
        if when == "in a trial" and len(trials) == 2 and len(losses.losses) == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    def freed(world):
        free(world)
        if when == "between trials":
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(KeptSteps, "steps", logged)
    monkeypatch.setattr(auto_learning_rate, "free_memory", freed)
    folder, _ = train("r", code=143, progress="lines", learning_rate="auto", epochs=3)
    assert [len(losses.losses) for losses in trials] == ([24, 3] if when == "in a trial" else [24])
    lines = capsys.readouterr().out.splitlines()
    own = [line for line in lines if line.startswith("--learning-rate auto: ")]
    assert len(own) == 2
    assert re.fullmatch(r"--learning-rate auto: 0\.001 has a loss of \d\.\d{3} after 24 steps \(\d+ s\)", own[1])
    assert [line for line in lines if line.endswith("stopped by SIGTERM before the first step")]
    assert [line for line in lines if "to continue  " in line and line.endswith("--run-name=r --resume=auto")]
    assert not (folder / LEARNING_RATE).exists()
    assert not (folder / "learning-rate-trial").exists()
