"""`import zerovision`: what it costs, and what train, evaluate and predict give back."""

from __future__ import annotations

import html
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

import zerovision
from tests.kit import ROOT
from zerovision.delivery.trained_model import read_run_config
from zerovision.training.run import run
from zerovision.training.steps.carrier import Start

SMALL = {
    "model_type": "basic_cnn",
    "image_size": 8,
    "batch_size": 125,
    "threads_per_rank": 1,
    "epochs": 1,
    "progress": "off",
}


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    return zerovision.train("fake", gradient_accumulation_steps=2, log_dir=tmp_path_factory.mktemp("logs"), **SMALL)


def test_importing_it_takes_little():
    code = (
        "import sys, time; before = time.process_time(); import zerovision; "
        "print(time.process_time() - before, *sys.modules)"
    )
    seconds, *modules = subprocess.check_output([sys.executable, "-c", code], cwd=ROOT, text=True).split()
    assert float(seconds) < 0.05
    assert not {"torch", "numpy", "argparse"} & {*modules}


def test_every_name_that_it_offers_is_there():
    assert {"train", "evaluate", "predict", "load_model", "TrainConfig", "UserError"} <= {*dir(zerovision)}
    for name in zerovision.__all__:
        assert getattr(zerovision, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        zerovision.trian  # noqa: B018


def test_a_training_gives_its_folder_and_scores(result):
    assert result.folder.name == "fake"
    assert (result.weights.is_file(), result.exit_code) == (True, 0)
    evaluation = result.evaluate(output=None)
    assert (evaluation.top1, evaluation.loss) == (result.evaluation.top1, result.evaluation.loss)
    assert evaluation["confusion"] == result.evaluation["confusion"]


def test_runs_without_a_name_have_one_each(result, tmp_path):
    logs = result.folder.parents[1]
    with ThreadPoolExecutor() as pool:  # Python handles signals in the main thread alone
        runs = [
            pool.submit(zerovision.train, "fake", gradient_accumulation_steps=2, log_dir=logs, **SMALL)
            for _ in range(2)
        ]
        names = sorted(one.result().folder.name for one in runs)
    assert names == ["fake-2", "fake-3"]
    weights = {(logs / "runs" / name / "model.safetensors").read_bytes() for name in ("fake", *names)}
    assert len(weights) == 1


def test_notebooks_show_tables(result, tmp_path):
    from PIL import Image

    (tmp_path / "<b>.png").write_bytes(b"no image")
    Image.new("RGB", (20, 20)).save(tmp_path / "one.png")
    predictions = result.predict(tmp_path, top_k=2)
    shown = predictions._repr_html_()
    assert "&lt;b&gt;.png" in shown
    assert "<b>" not in shown
    assert f"{predictions[1].labels[0]} {100 * predictions[1].probabilities[0]:.2f} %" in html.unescape(shown)
    of_run = result._repr_html_()
    assert len(re.findall("<tr>", of_run)) == 2 + len(result.evaluation["classes"]) + len(result.choices)
    assert (result.folder / "report.html").as_uri() in of_run


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epohcs": 5}, r"train\(\): unknown key 'epohcs'. Did you mean 'epochs'\?"),
        ({"lr": 0.1}, "learning-rate"),
        ({"epochs": 0}, r"train\(\): epochs 0: expected a whole number from 1"),
        ({"augmentation": "flip"}, "unknown augmentation 'flip'"),
        ({"data": "digitz"}, "Did you mean 'digits'"),
    ],
)
def test_a_wrong_setting_is_refused_where_it_is_given(settings, message, tmp_path):
    settings = {"data": "fake"} | settings
    with pytest.raises(zerovision.UserError, match=message):
        zerovision.train(settings.pop("data"), log_dir=tmp_path, **settings)
    assert not [*tmp_path.rglob("*/*")]


def test_trained_weights_begin_with_the_head_and_a_run_that_goes_on_keeps_what_it_has(few_images, result, tmp_path):
    given = SMALL | {"weights": result.weights, "log_dir": tmp_path, "run_name": "tuned"}
    tuned = zerovision.train("fake", **given)
    head = zerovision.evaluate(tmp_path / "runs" / "tuned-head", output=None)
    assert tuned.config.weights == str(tmp_path / "runs" / "tuned-head" / "model.safetensors")
    assert head.samples == tuned.evaluation.samples
    assert tuned.choices["optimizer"][0] == tuned.config.optimizer
    longer = zerovision.train("fake", **given | {"epochs": 2, "resume": "auto"})
    assert (longer.folder, longer.config.epochs, longer.choices) == (tuned.folder, 2, {})
    assert longer.config.learning_rate == tuned.config.learning_rate
    assert not (tmp_path / "runs" / "tuned-2").exists()


def test_minutes_count_from_the_call(few_images, tmp_path):
    """Not from the start of the process: a notebook is hours old."""
    data = {"data": "fake", "log_dir": str(tmp_path), "minutes": 0.5, "report": False}
    for name, began in (("now", time.time()), ("earlier", time.time() - 60)):
        config = zerovision.TrainConfig(run_name=name, **SMALL | data | {"epochs": 3})
        assert run(config, Start(began=began)) == 0
    epochs = {name: read_run_config(tmp_path / "runs" / name).epochs for name in ("now", "earlier")}
    assert epochs == {"now": 3, "earlier": 1}


def test_several_ranks_train_the_same_as_one(result, tmp_path):
    two = zerovision.train("fake", gpus=2, log_dir=tmp_path, **SMALL)
    assert two.evaluation.samples == result.evaluation.samples
    assert two.weights.read_bytes() == result.weights.read_bytes()
