"""The learning-rate range test: its command line, the smoothing, and a real one on two ranks."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from planning.learning_rate import RESULT, SMOOTHING, parse, read_curve, run, smoothed, suggested
from training.errors import UserError

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


def test_steps_without_a_finite_loss_are_no_points(tmp_path):
    lines = [{"kind": "step", "learning_rate": rate, "loss": loss} for rate, loss in ((0.1, 2.0), (0.2, None))]
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in [*lines, {"kind": "epoch"}]))
    assert read_curve(path) == [(0.1, 2.0)]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--lowest", "0.1", "--highest", "0.01", *LAUNCH], "--lowest 0.1 must be below --highest 0.01."),
        (["--lowest", "0", *LAUNCH], "--lowest '0': expected a number from 1e-12 to 1."),
        (["--lowest"], "--lowest: expected a number"),
        ([*LAUNCH, "--optimiser", "sgd"], "unknown argument '--optimiser'. Did you mean '--optimizer'?"),
        (["basic_cnn", "dpp", "2", "16", "1"], "unknown strategy 'dpp'. Did you mean 'ddp'?"),
        ([*LAUNCH, "--base-batch-size", "256"], "--base-batch-size: leave it out"),
        ([], "5 arguments are needed (model strategy num_gpus batch_size epochs), 0 given"),
    ],
)
def test_mistakes_are_one_line_before_anything_starts(words, told):
    with pytest.raises(UserError) as caught:
        parse(words, "")
    assert told.lower() in str(caught.value).lower()


def test_a_range_test_on_two_ranks(tmp_path, capfd):
    quiet = ["--tensorboard", "false", "--report", "false", "--progress", "off", "--log-dir", str(tmp_path)]
    test = parse(["--lowest", "1e-5", "--highest", "10", *LAUNCH, *quiet, "--image-size", "16"], "")
    assert run(test) == 0
    result = json.loads((test.run_folder / RESULT).read_text())
    rates, losses, _ = np.array(result["curve"]).T
    assert np.diff(np.log(rates)) == pytest.approx(math.log(1e6) / 32)  # 1000 images / 32
    assert rates[0] == pytest.approx(1e-5)
    assert losses[:5].mean() == pytest.approx(math.log(10), abs=0.5)
    assert 1e-5 <= result["suggested"] <= 1
    assert f"--learning-rate {result['suggested']:.2g}," in capfd.readouterr().out
