"""The learning-rate range test: its command line, the smoothing, and a real one on two ranks."""

from __future__ import annotations

import itertools
import json
import math
import shutil

import numpy as np
import pytest

from launch.arguments import check_training, read_arguments
from planning.learning_rate import parse, read_curve
from scripts.find_learning_rate import run
from training.config import FLAG_OF, TrainConfig
from training.config_check import check_config
from training.data.mixing import Mixing
from training.errors import UserError
from training.observe.run_folder import LEARNING_RATE
from training.recipe.range_test import SMOOTHING, smoothed, suggested
from training.run import run as train_run

LAUNCH = ["basic_cnn", "ddp", "2", "16", "1", "--data", "fake"]


def test_the_smoothed_loss_is_the_exponentially_weighted_mean():
    losses = np.random.default_rng(0).normal(size=30)
    weights = SMOOTHING ** np.arange(30)[::-1]
    expected = [np.average(losses[: n + 1], weights=weights[29 - n :]) for n in range(30)]
    assert smoothed(losses) == pytest.approx(expected)


def test_a_tenth_of_the_rate_of_the_smallest_loss_is_suggested():
    rates = np.geomspace(1e-6, 1, 601)
    curve = [(rate, (math.log10(rate) + 2) ** 2) for rate in rates]  # smallest at 0.01
    assert 0.001 < suggested(curve) < 0.002, "the mean lags a little behind"


@pytest.mark.parametrize(("steps", "fall", "least"), [(200, 2.0, 48), (60, 4.0, 48), (20, 8.0, 45)])
def test_a_loss_that_no_rate_lowers_suggests_none(steps, fall, least):
    """As for weights that are trained already: noise, until the rates are too high. `fall` is in deviations of it."""
    rates, share = np.geomspace(1e-6, 1, steps), np.arange(steps) / steps
    by_chance = found = 0
    for seed in range(50):
        noise = 0.1 * np.random.default_rng(seed).normal(size=steps)
        noise[0] -= 0.5  # an easy first batch
        flat = 2 + noise + 20 * np.clip(share - 0.85, 0, 1)
        falling = flat - 0.1 * fall * np.clip((share - 0.5) / 0.3, 0, 1)
        by_chance += suggested([*zip(rates, flat, strict=True)]) is not None
        found += (suggested([*zip(rates, falling, strict=True)]) or 0) > 1e-5
    assert by_chance <= 5
    assert found >= least


def test_steps_without_a_finite_loss_are_no_points(tmp_path):
    lines = [{"kind": "step", "learning_rate": rate, "loss": loss} for rate, loss in ((0.1, 2.0), (0.2, None))]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"kind": "epoch"}]))
    assert read_curve(path) == [(0.1, 2.0)]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--lowest", "0.1", "--highest", "0.01", *LAUNCH], "--lowest 0.1 must be below --highest 0.01, and"),
        (["--lowest", "1e-12", "--highest", "100", *LAUNCH], "--highest 100, and at least 1e-09 of it."),
        (["--lowest", "0", *LAUNCH], "--lowest '0': expected a number from 1e-12 to 1."),
        (["--lowest"], "--lowest: expected a number"),
        ([*LAUNCH, "--optimiser", "sgd"], "unknown argument '--optimiser'. Did you mean '--optimizer'?"),
        (["basic_cnn", "dpp", "2", "16", "1"], "unknown strategy 'dpp'. Did you mean 'ddp'?"),
        ([*LAUNCH, "--base-batch-size", "256"], "--base-batch-size: leave it out"),
        (["basic_cnn", "auto", *LAUNCH[2:]], "give ddp, fsdp_stage2, fsdp_stage3 in place of auto."),
        ([], "5 arguments are needed (model strategy num_gpus batch_size epochs), 0 given"),
    ],
)
def test_mistakes_are_one_line_before_anything_starts(words, told):
    with pytest.raises(UserError) as caught:
        parse(words, "")
    assert told.lower() in str(caught.value).lower()


def test_flags_that_a_range_test_sets_itself_are_named(capsys):
    parse([*LAUNCH, "--run-name", "mine", "--learning-rate=0.1"], "")
    assert capsys.readouterr().out == "note: without effect in a range test: --learning-rate, --run-name\n"


@pytest.mark.parametrize(("more", "only_head"), [([], True), (["--head-epochs", "0"], False)])
def test_a_range_test_of_fine_tuning_has_one_regime(more, only_head):
    """As that of --learning-rate auto: the head alone, or all layers."""
    words = parse(["mobilenet_finetuned", "ddp", "2", "16", "9", *more], "").launch
    config = check_training(read_arguments("launch_distributed.sh", words, {}).training)
    assert config.head_epochs == (9 if only_head else 0)


def test_a_range_test_on_two_ranks_that_share_the_weights(tmp_path, capfd, monkeypatch):
    launch = ["basic_cnn", "fsdp_stage3", "2", "16", "2", *LAUNCH[5:]]
    quiet = ["--tensorboard", "false", "--progress", "off", "--log-dir", str(tmp_path)]
    other_ends = ["--early-stopping-patience", "1", "--cooldown-epochs", "1"]  # of the training that this is for
    test = parse(["--lowest", "1e-5", "--highest", "10", *launch, *quiet, *other_ends, "--image-size", "16"], "")
    assert (
        check_training(read_arguments("launch_distributed.sh", test.launch, {}).training).early_stopping_patience == 0
    )
    with monkeypatch.context() as dry:
        dry.setenv("DRY_RUN", "1")
        assert run(test) == 0
    assert not test.run_folder.exists()
    assert run(test) == 0
    result = json.loads((test.run_folder / LEARNING_RATE).read_text())
    rates, losses, _ = np.array(result["curve"]).T
    assert np.diff(np.log(rates)) == pytest.approx(math.log(1e6) / 63)  # twice 1000 images / 32
    assert (rates[0], rates[-1]) == pytest.approx((1e-5, 10))
    assert losses[:5].mean() == pytest.approx(math.log(10), abs=0.5)
    assert 1e-5 <= result["suggested"] <= 1
    assert f"--learning-rate {result['suggested']:.2g}," in capfd.readouterr().out
    assert 'id="chart-range_test"' in (test.run_folder / "report.html").read_text()


def train(log_dir, name, **changes):
    recipe = {"model_type": "basic_cnn", "data": "fake", "image_size": 8, "batch_size": 125, "epochs": 1}
    output = {"progress": "off", "tensorboard": False, "report": False, "log_dir": str(log_dir), "run_name": name}
    assert train_run(TrainConfig(**(recipe | output | changes))) == 0
    folder = log_dir / "runs" / name
    return folder, json.loads((folder / "config.json").read_text())["learning_rate"]


def test_an_automatic_rate_is_that_of_a_test_and_trains_as_the_same_number(tmp_path, monkeypatch):
    monkeypatch.setattr("training.auto_learning_rate.TEST_STEPS", 20)  # three epochs, of 7 of their 8 steps
    auto, rate = train(tmp_path, "auto", learning_rate="auto")
    result = json.loads((auto / LEARNING_RATE).read_text())
    rates, losses, means = np.array(result["curve"]).T
    assert np.diff(np.log(rates)) == pytest.approx(math.log(1e6) / 20)
    assert means == pytest.approx(smoothed(losses))
    assert rate == result["suggested"] == pytest.approx(rates[means.argmin()] / 10, rel=0.05)
    assert not (auto / "range-test").exists()

    typed, _ = train(tmp_path, "typed", learning_rate=rate)
    for name in ("model.safetensors", "checkpoints/step-00001-0000000/shard-00000.safetensors"):
        assert (auto / name).read_bytes() == (typed / name).read_bytes(), name

    monkeypatch.setattr("training.auto_learning_rate._test", None)  # a resume makes no other test
    assert train(tmp_path, "auto", learning_rate="auto", epochs=2, resume="auto")[1] == rate
    shutil.rmtree(auto / "checkpoints")  # as if it had been stopped before the first one
    assert train(tmp_path, "auto", learning_rate="auto", resume="auto")[1] == rate
    shutil.rmtree(auto / "checkpoints")
    monkeypatch.setattr("training.auto_learning_rate._test", lambda *_: 0.25)
    other = {"optimizer": "sgd", "resume": "auto"}  # what was found with another optimizer does not hold
    assert train(tmp_path, "auto", learning_rate="auto", **other)[1] == 0.25


def test_an_epoch_is_not_trained_whole_for_a_short_test(tmp_path, monkeypatch):
    monkeypatch.setattr("training.auto_learning_rate.TEST_STEPS", 25)
    folder, _ = train(tmp_path, "long", learning_rate="auto", batch_size=20)  # 50 steps an epoch
    assert len(json.loads((folder / LEARNING_RATE).read_text())["curve"]) == 25


def test_a_range_test_mixes_as_the_runs_first_epochs(tmp_path, monkeypatch):
    """Whether a micro-batch is mixed does not depend on how many epochs the run has."""
    monkeypatch.setattr("training.auto_learning_rate.TEST_STEPS", 24)
    curves = [
        json.loads((train(tmp_path, name, learning_rate="auto", mixup=8.0, **changes)[0] / LEARNING_RATE).read_text())
        for name, changes in (("one", {}), ("three", {"epochs": 3}))
    ]
    assert curves[0] == curves[1]
    drawn = []
    monkeypatch.setattr(Mixing, "drawn", lambda _self, epoch, _leaf: drawn.append(epoch))
    off, _ = train(tmp_path, "off", learning_rate="auto", mixup=8.0, epochs=3, mixup_off_epochs=1)
    epochs = [epoch for epoch, _ in itertools.groupby(drawn)]
    assert epochs == [0, 1, 0, 1, 2], "the test again from the start in place of epoch 2, then the training"
    rates = [rate for rate, *_ in json.loads((off / LEARNING_RATE).read_text())["curve"]]
    assert rates == pytest.approx(np.geomspace(1e-6, 1, 24))


def test_an_automatic_rate_is_not_scaled():
    with pytest.raises(UserError, match="--base-batch-size: leave it out"):
        check_config(TrainConfig(learning_rate="auto", base_batch_size=256), FLAG_OF)
