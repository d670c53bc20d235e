"""Training, evaluating and predicting inside a Python process, by the documentation's own lines."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from PIL import Image

from zerovision.delivery.evaluate import evaluate
from zerovision.delivery.predict import predict
from zerovision.training.base.errors import AgreedError, UserError
from zerovision.training.config import TrainConfig
from zerovision.training.run import run
from zerovision.training.world.preserved_process import preserved_generators, preserved_process

DOCS = Path(__file__).resolve().parents[2] / "docs"
LINEAR = torch.nn.functional.linear
CHANGES = (
    'epochs=1, batch_size=64, image_size=16, deterministic=True, log_dir="logs", run_name="{name}", progress="off"'
)


def process_state() -> list[object]:
    """Return what code from outside may rely on."""
    return [
        {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"},
        [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)],
        sys.excepthook,
        dist.is_initialized(),
        (torch.get_num_threads(), torch.backends.cudnn.benchmark, torch.backends.cudnn.allow_tf32),
        (torch.are_deterministic_algorithms_enabled(), torch.backends.cuda.matmul.allow_tf32),
        (torch.get_rng_state().tolist(), random.getstate()),
    ]


def code_of(heading: str) -> str:
    section = (DOCS / "guides" / "python.md").read_text(encoding="utf-8").partition(f"\n## {heading}\n")[2]
    return re.search(r"```python\n(.*?)```", section, re.DOTALL)[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A folder with images, and later a run `digits`, trained by the lines of the guide."""
    folder = tmp_path_factory.mktemp("notebook")
    (folder / "photos").mkdir()
    for path in (folder / "photo.png", folder / "photos" / "one.png"):
        Image.new("RGB", (20, 20), "white").save(path)
    (folder / "photos" / "two.png").write_bytes(b"no image")
    return folder


@pytest.fixture(autouse=True)
def notebook(folder, monkeypatch):
    """Work in the folder, in a process that no launcher started, and see that it stays as it was."""
    monkeypatch.chdir(folder)
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    before = process_state()
    yield
    assert process_state() == before


def train(name: str) -> Path:
    names: dict = {}
    code = code_of("Train").replace("epochs=1", CHANGES.format(name=name))
    exec(code, names)
    assert names["result"].exit_code == 0
    return Path("logs/runs") / name


@pytest.fixture
def digits(notebook) -> Path:
    """The folder of a run `digits`, trained by the first test that needs it."""
    path = Path("logs/runs/digits")
    return path if path.exists() else train("digits")


@pytest.mark.slow
def test_two_trainings_in_one_process_are_the_same(digits, capsys):
    """The second in another thread, where Python has no signal handlers."""
    with ThreadPoolExecutor() as pool:
        first, second = digits, pool.submit(train, "again").result()
    notes = [line for line in capsys.readouterr().out.splitlines() if "main thread" in line]
    assert len(notes) == 1
    assert "Ctrl-C and SIGTERM do not stop the run" in notes[0]
    assert "--run-name again --resume auto" in notes[0]
    assert (first / "model.safetensors").read_bytes() == (second / "model.safetensors").read_bytes()
    assert {"README.md", "report.html", "evaluation"} <= set(os.listdir(second))
    shutil.rmtree(second)


@pytest.mark.slow  # twice in one process under ddp: tests/training/test_run.py
@pytest.mark.parametrize("strategy", ["ddp", "fsdp_stage2", "fsdp_stage3"])
def test_deepspeed_trains_twice_in_one_process(strategy, tmp_path):
    """It keeps groups of the first run's ranks, which are gone by the second."""
    given = {"model_type": "basic_cnn", "epochs": 1, "batch_size": 64, "image_size": 8, "progress": "off"}
    given |= {"engine": "deepspeed", "strategy": strategy, "log_dir": str(tmp_path), "report": False}
    first, second = (tmp_path / "runs" / name / "model.safetensors" for name in ("first", "second"))
    assert [run(TrainConfig(run_name=path.parent.name, **given)) for path in (first, second)] == [0, 0]
    assert first.read_bytes() == second.read_bytes()
    sharding = json.loads((first.parent / "deepspeed_config.json").read_text())
    assert sharding["zero_optimization"]["stage"] == 1 + ("ddp", "fsdp_stage2", "fsdp_stage3").index(strategy)
    assert torch.nn.functional.linear is LINEAR


def test_a_folder_that_the_evaluation_would_replace_stops_a_run_at_once(tmp_path, capsys):
    notes = tmp_path / "runs" / "kept" / "evaluation" / "notes.txt"
    notes.parent.mkdir(parents=True)
    notes.touch()
    small = {"data": "fake", "model_type": "basic_cnn", "image_size": 8, "batch_size": 250, "epochs": 1}
    config = TrainConfig(run_name="kept", log_dir=str(tmp_path), **small)
    assert run(config) == 2
    assert "kept/evaluation' exists and contains no evaluation: move it away" in capsys.readouterr().err
    shutil.move(notes.parent, tmp_path / "moved")
    assert run(config) == 0


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("bad", {"weights": "none.safetensors"}, "weights file 'none.safetensors' does not exist"),
        ("", {"weights": "none.safetensors"}, "weights file 'none.safetensors' does not exist"),
        ("bad", {"resume": "none"}, "--resume none: no checkpoint there"),
        ("bad", {"model_type": "ensemble", "ensemble_members": "airbench,vgg"}, "image"),
    ],
)
def test_a_start_that_is_refused_leaves_no_folder_and_one_that_was_there_as_it_was(
    name, changes, message, tmp_path, capsys
):
    small = {"data": "fake", "model_type": "basic_cnn", "image_size": 8, "batch_size": 250, "epochs": 1}
    config = TrainConfig(run_name=name, log_dir=str(tmp_path), **small | changes)
    assert run(config) == 2
    assert message in capsys.readouterr().err
    assert not [*tmp_path.glob("*/*")]
    (tmp_path / "runs" / "bad").mkdir()
    (tmp_path / "runs" / "bad" / "notes.txt").touch()
    assert run(config) == 2
    assert [path.name for path in tmp_path.glob("runs/bad/*.txt")] == ["notes.txt"]


def test_a_head_that_is_refused_after_the_loggers_were_opened_leaves_no_folder(digits, tmp_path, monkeypatch, capsys):
    def refuse(*_) -> int:
        raise AgreedError("this head reads no vector.")

    monkeypatch.setattr("zerovision.training.run.cache_features", refuse)
    head = {"tune": "head", "features": "cached", "augmentation": "none", "weights": str(digits / "model.safetensors")}
    given = {"data": "digits", "model_type": "basic_cnn", "image_size": 16, "batch_size": 64, "epochs": 1}
    assert run(TrainConfig(log_dir=str(tmp_path), progress="off", **given | head)) == 2
    assert "this head reads no vector." in capsys.readouterr().err
    assert not [*tmp_path.glob("*/*")]


def test_evaluate_and_predict_by_the_documentations_lines(digits, capsys):
    exec(code_of("Evaluate and predict"), names := {})
    scores = evaluate("logs/runs/digits", output=None, batch_size=256)
    assert names["scores"].scores == scores
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == f"{scores['top1']} {scores['macro']['f1']} {scores['top5']}"
    assert [line.split()[0] for line in lines] == ["photo.png", "photos/one.png", "photos/two.png"]
    assert lines[0].split()[1:] == lines[1].split()[1:]
    assert lines[2].startswith("photos/two.png [] [] ")
    assert len(lines[2]) > 30, "the reason"


def test_threads_evaluate_one_after_the_other(digits, capsys):
    """Each would take the other's process group and restore the other's settings."""
    with ThreadPoolExecutor() as pool:
        with preserved_process():
            evaluations = [pool.submit(evaluate, digits, output=None) for _ in range(2)]
            notes, deadline = "", time.monotonic() + 60
            while notes.count("waiting for it to end") < 2 and time.monotonic() < deadline:
                notes += capsys.readouterr().err
                time.sleep(0.05)
            assert not any(one.done() for one in evaluations)
        assert evaluations[0].result() == evaluations[1].result() == evaluate(digits, output=None)
        predictions = [pool.submit(lambda: list(predict(digits, "photos"))) for _ in range(2)]
        assert predictions[0].result() == predictions[1].result() == list(predict(digits, "photos"))


def test_no_thread_restores_what_another_has_drawn():
    before, first_is_in, second_is_in, first_is_out = torch.get_rng_state(), *(threading.Event() for _ in range(3))

    def first() -> None:
        with preserved_generators():
            torch.manual_seed(1)
            first_is_in.set()
            second_is_in.wait(0.2)  # it does not come in
        first_is_out.set()

    def second() -> None:
        first_is_in.wait()
        with preserved_generators():
            second_is_in.set()
            first_is_out.wait()

    threads = [threading.Thread(target=target) for target in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("kind", [str, Path])
def test_a_path_alone_is_a_list_of_one(digits, kind):
    assert [one.image for one in predict("logs/runs/digits", kind("photos"))] == ["photos/one.png", "photos/two.png"]


def test_without_an_output_nothing_is_written(folder, digits):
    before = sorted(folder.rglob("*"))
    evaluate("logs/runs/digits", split="train", output=None)
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: run(TrainConfig(epochs="1")), "--epochs '1': expected a whole number"),
        (lambda: evaluate("logs/runs/digits", split="tset"), "--split 'tset': expected auto, val"),
        (lambda: evaluate("logs/runs/digits", "digitz"), "Did you mean 'digits'?"),
        (lambda: predict("logs/runs/digits", ["a.png"], device="tpu"), "--device 'tpu': expected cpu or cuda."),
        (lambda: predict("logs/runs/digist", []), "is neither a file, nor a folder, nor a run"),
    ],
)
def test_mistakes_raise_the_commands_line(digits, call, message, capsys):
    with pytest.raises(UserError) as caught:
        call()
    assert message in str(caught.value)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("function", [evaluate, partial(predict, images=["a.png"])])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"batch_size": 0}, "--batch-size 0: expected a whole number from 1 to 65536."),
        ({"batch_size": "auto"}, "--batch-size 'auto': expected a whole number from 1 to 65536."),
        ({"batch_size": 10**5000}, "--batch-size a huge number: expected a whole number from 1 to 65536."),
        ({"batch_size": True}, "--batch-size True: expected a whole number from 1 to 65536."),
        ({"shift_pixels": 1.5}, "--shift-pixels 1.5: expected a whole number from 0 to 4096."),
        ({"shift_pixels": "2"}, "--shift-pixels '2': expected a whole number from 0 to 4096."),
    ],
)
def test_numbers_are_those_of_the_flags(digits, function, given, message):
    with pytest.raises(UserError) as caught:
        function("logs/runs/digits", **given)
    assert str(caught.value) == message


def test_a_process_group_of_the_users_is_left_alone():
    hook = sys.excepthook
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(UserError, match=r"destroy_process_group\(\) first"), preserved_process():
            pass
        assert dist.is_initialized()
    finally:
        dist.destroy_process_group()
        sys.excepthook = hook
