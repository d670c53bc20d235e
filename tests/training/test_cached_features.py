"""`--features cached` as a user trains with it: the bytes of the run that computes them in every epoch."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from commands import assert_success, assert_user_error, launch, read_metrics, train_here
from sklearn.linear_model import LogisticRegression
from torch import nn

from tests.kit import assert_same_but_rounding
from zerovision.delivery.evaluate import evaluate
from zerovision.delivery.predict import predict
from zerovision.models.build import BuiltModel
from zerovision.models.weights_metadata import Description
from zerovision.training import setup
from zerovision.training.base.errors import UserError
from zerovision.training.base.run_folder import CARD, SCORES, WEIGHTS
from zerovision.training.checkpoint.weights import load_model
from zerovision.training.data import DataOptions, load_data
from zerovision.training.observe.sample_history import HISTORY

DATA = (
    "--data",
    "digits",
    "--image-size",
    "8",
    "--augmentation",
    "none",
    "--report",
    "false",
    "--tensorboard",
    "false",
)
HEAD = (*DATA, "--tune", "head", "--epochs", "2", "--save-every-steps", "15", "--keep-last", "99")
CACHED = ("--features", "cached")


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A folder of runs with one whose weights the others begin with, and one that computes features in every epoch."""
    folder = tmp_path_factory.mktemp("logs")
    logs = ("--log-dir", str(folder))
    model = ("--model-type", "basic_cnn", "--batch-size", "32")
    assert_success(train_here(*model, *DATA, *logs, "--epochs", "1", "--run-name", "source"))
    weights = ("--weights", str(folder / "runs" / "source" / WEIGHTS))
    assert_success(train_here(*model, *HEAD, *logs, *weights, "--sampling", "balanced", "--run-name", "computed"))
    return folder, (*logs, *weights, "--sampling", "balanced")


def scores(run):
    return [
        {key: epoch[key] for key in epoch if key.startswith(("val_", "train_"))} for epoch in read_metrics(run, "epoch")
    ]


def test_a_cached_run_and_one_that_goes_on_have_the_same_bytes(source):
    """basic_cnn has BatchNorm, and dropout before its head; the last batches of its digits are padded."""
    folder, flags = source
    model = ("--model-type", "basic_cnn", "--batch-size", "32")
    done = assert_success(train_here(*model, *HEAD, *flags, *CACHED, "--run-name", "cached"))
    assert "1797 images went through the network once" in done.stdout
    assert "note: here the last bits" not in done.stdout
    computed, cached = (folder / "runs" / name for name in ("computed", "cached"))
    assert (
        (cached / WEIGHTS).read_bytes()
        == (computed / WEIGHTS).read_bytes()
        != (folder / "runs" / "source" / WEIGHTS).read_bytes()
    )
    assert scores(cached) == scores(computed)
    # From the midst of the second epoch of either run, in the other way.
    for name, features in (("computed", CACHED), ("cached", ())):
        checkpoint = ("--resume", str(folder / "runs" / name / "checkpoints" / "step-00001-0000015"))
        assert_success(train_here(*model, *HEAD, *flags, *features, *checkpoint, "--run-name", f"{name}-resumed"))
        assert (folder / "runs" / f"{name}-resumed" / WEIGHTS).read_bytes() == (computed / WEIGHTS).read_bytes()


SOLVED = (*CACHED, "--tune", "head", "--features", "cached:lbfgs", "--weight-decay", "0.01", "--label-smoothing", "0")


def test_the_solved_head_is_scikit_learns(source):
    folder, flags = source
    given = ("--model-type", "basic_cnn", "--batch-size", "32", *DATA, *flags[:-2], *SOLVED)
    done = assert_success(train_here(*given, "--epochs", "9", "--run-name", "solved"))
    assert "the head's optimum over 1437 images" in done.stdout
    assert "a gradient of" not in done.stdout
    run = folder / "runs" / "solved"
    module, metadata = load_model(run / WEIGHTS)
    assert metadata["extra"]["epoch"] == 9, "the last is all there is"
    (epoch,) = read_metrics(run, "epoch")
    assert epoch["train_loss"] is None
    assert "NaN" not in (run / "metrics.jsonl").read_text(), "no JSON"
    data, head, read = load_data(DataOptions(image_size=8, augmentation="none")), module.head, []
    head.register_forward_pre_hook(lambda _, inputs: read.append(inputs[0]))
    with torch.no_grad():
        for part in (data.train, data.val):
            module(torch.stack([part[0, index][0] for index in range(len(part))]))
    inputs, labels = read[0].double().numpy(), data.train.source.labels.numpy()
    oracle = LogisticRegression(C=1 / (0.01 * len(inputs)), tol=1e-10, solver="newton-cholesky").fit(inputs, labels)
    # The intercepts have one free constant: theirs have the mean 0, as ours from the start.
    found = {"weight": head.weight, "bias": head.bias}
    assert_same_but_rounding(found, {"weight": oracle.coef_, "bias": oracle.intercept_}, 1e-3)  # where solvers stop
    (epoch,) = read_metrics(run, "epoch")
    assert epoch["val_top1"] == pytest.approx(oracle.score(read[1].double().numpy(), data.val.source.labels))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp_stage3"])
def test_two_ranks_solve_for_the_same_bytes(source, strategy):
    folder, flags = source
    words = (*DATA, *flags[:-2], *SOLVED, "--threads-per-rank", "1", "--run-name")
    for ranks, batch in (("1", "32"), ("2", "32")):
        assert_success(launch("basic_cnn", strategy, ranks, batch, "2", *words, f"solved-{strategy}-{ranks}"))
    one, two = ((folder / "runs" / f"solved-{strategy}-{ranks}" / WEIGHTS).read_bytes() for ranks in "12")
    assert one == two


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp_stage2", "fsdp_stage3"])
def test_two_ranks_of_a_cached_run_leave_the_same_bytes(source, strategy):
    folder, flags = source
    words = ("basic_cnn", strategy, "2", "16", "2", *HEAD, *flags, "--threads-per-rank", "1")
    runs = {}
    for name, features in ((f"{strategy}-2", ()), (f"{strategy}-2-cached", CACHED)):
        assert_success(launch(*words, *features, "--run-name", name))
        runs[name] = folder / "runs" / name
    computed, cached = runs.values()
    assert (cached / WEIGHTS).read_bytes() == (computed / WEIGHTS).read_bytes()
    assert scores(cached) == scores(computed)
    shutil.rmtree(cached)


def test_what_changes_features_is_refused(source):
    """Other settings that change them are in tests/references/errors.txt."""
    given = ("--model-type", "basic_cnn", *DATA, *source[1], *CACHED, *SOLVED, "--sampling", "uniform")
    assert_user_error(
        train_here(*given, "--weight-decay", "0", "--run-name", "refused"), "needs a --weight-decay above 0"
    )
    assert not (source[0] / "runs" / "refused").exists()


class Noisy(nn.Module):
    """A network whose features, in training, are `noise` of those in evaluation."""

    def __init__(self, noise, head):
        super().__init__()
        self.noise, self.flatten, self.head = noise, nn.Flatten(), head

    def forward(self, images):
        return self.head(self.noise(self.flatten(images)))


@pytest.mark.parametrize(
    ("module", "heads", "line"),
    [
        (Noisy(nn.Sequential(nn.Dropout(0.1), nn.LayerNorm(192)), nn.Linear(192, 10)), ["head"], "use --drop-path 0"),
        (Noisy(nn.BatchNorm1d(192), nn.Linear(192, 10)), ["head"], "between training and evaluation"),
        (
            Noisy(nn.Unflatten(1, (3, 8, 8)), nn.Sequential(nn.Conv2d(3, 10, 8), nn.Flatten())),
            ["head.0"],
            "reads 3 x 8 x 8 numbers",
        ),
        (nn.Sequential(nn.Flatten(), nn.Linear(192, 10), nn.Linear(10, 10)), ["1", "2"], "several heads"),
    ],
)
def test_a_network_that_computes_other_features_in_training_is_refused(source, module, heads, line, monkeypatch):
    def build(_config, data, _world, **_options):
        names = frozenset(f"{head}.{kind}" for head in heads for kind in ("weight", "bias"))
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(name in names or "noise" in name)
        description = Description("basic_cnn", None, num_classes=10, image_size=8)
        return BuiltModel(module, description, head_parameter_names=names), None

    monkeypatch.setattr(setup, "build_training_model", build)
    torch.manual_seed(0)
    done = train_here("--model-type", "basic_cnn", *HEAD, *source[1], *CACHED, "--run-name", "other")
    shutil.rmtree(source[0] / "runs" / "other", ignore_errors=True)
    assert_user_error(done, "--features cached", line)


FEATURES = ("--data", "digits", "--image-size", "8", "--loss", "supcon::32")


def test_a_head_makes_a_classifier_of_features(tmp_path):
    flags = ("--model-type", "basic_cnn", "--batch-size", "128", "--learning-rate", "0.003", "--log-dir", str(tmp_path))
    done = assert_success(train_here(*flags, *FEATURES, "--epochs", "2", "--run-name", "features"))
    run = tmp_path / "runs" / "features"
    assert max(epoch["val_top1"] for epoch in read_metrics(run, "epoch")) > 0.85
    assert json.loads((run / "evaluation" / SCORES).read_text())["top1"] > 0.85
    assert "top-1 is that of the 20 nearest training images" in done.stdout
    assert not (run / CARD).exists()
    assert not (run / HISTORY).exists()  # the outputs are no probabilities of classes
    for use in (lambda: evaluate(str(run)), lambda: predict(str(run), [str(tmp_path)])):
        with pytest.raises(UserError, match=r"was trained with --loss supcon and has no classifier yet"):
            use()
    head = ("--data", "digits", "--image-size", "8", "--weights", str(run / WEIGHTS), "--tune", "head")
    assert_success(train_here(*flags, *head, "--epochs", "3", "--learning-rate", "0.02", "--run-name", "head"))
    assert max(epoch["val_top1"] for epoch in read_metrics(tmp_path / "runs" / "head", "epoch")) > 0.85
    assert evaluate(str(tmp_path / "runs" / "head"), verbose=False)["top1"] > 0.85


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp_stage2"])
def test_any_number_of_ranks_leaves_the_same_file_and_scores(strategy, tmp_path):
    found = []
    for ranks in (1, 2, 4):
        words = ("basic_cnn", strategy, str(ranks), str(128 // ranks), "1", "--threads-per-rank", "1")
        assert_success(launch(*words, *FEATURES, "--log-dir", str(tmp_path), "--run-name", f"on-{ranks}"))
        run = tmp_path / "runs" / f"on-{ranks}"
        (epoch,) = read_metrics(run, "epoch")
        scores = (epoch["val_top1"], epoch["val_loss"], epoch["train_loss"], epoch["train_top1"])
        found.append(((run / WEIGHTS).read_bytes(), scores))
    assert found[0] == found[1] == found[2]
