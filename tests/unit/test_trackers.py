"""What a tracker is given, and that none can hold up or end a run; with a `wandb` that writes all calls to a file."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image
from test_loggers import EPOCH, RUN, STEP, full

from tests.kit import ROOT, train, wait_until
from tests.training.commands import launch
from zerovision.training.base.errors import UserError
from zerovision.training.base.run_folder import EVALUATION, REPORT, WEIGHTS, RunFolder
from zerovision.training.config import FLAG_OF, TrainConfig
from zerovision.training.config.check import check_config
from zerovision.training.observe import loggers
from zerovision.training.observe.loggers import tracker
from zerovision.training.observe.loggers.tracker import TrackerLogger

SAY = """
import json, os, time, types

def say(*words):
    with open(os.environ["CALLS"], "a") as file:
        file.write(json.dumps(words, default=vars) + "\\n")
"""
FAKE = f"""{SAY}
class Error(Exception):
    pass

def does(what):
    return os.environ.get("DOES") == what

class Run:
    def log(self, values, step=None):
        if does("block"):
            time.sleep(600)
        if does("raise"):
            raise RuntimeError("no such\\nproject")
        say("log", step, values)
    def alert(self, title, text, level):
        say("alert", title, text)
    def log_artifact(self, path, name, type):
        say("artifact", os.path.basename(path), name, type)
    def finish(self, exit_code):
        say("finish", exit_code)

def init(**how):
    if does("refuse") or does("append") and "resume_from" in how:
        raise Error("no")
    say("init", how)
    return Run()

Settings = types.SimpleNamespace
Image = Html = str
AlertLevel = types.SimpleNamespace(ERROR="error")
"""
FAKE_MLFLOW = f"""{SAY}
class MlflowException(Exception):
    pass

def log_params(values):
    if any(len(value) > 250 for value in values.values()):
        raise MlflowException("INVALID_PARAMETER_VALUE: exceeds length limit of 250")
    say("params", values)

def log_metrics(values, step):
    say("metrics", step, values)

def start_run(*_, **__):
    return types.SimpleNamespace(info=types.SimpleNamespace(run_id="7"))

def __getattr__(name):
    return lambda *_, **__: None
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Put a package `wandb` in the way of the real one; return a function that reads the calls that it got."""
    package = tmp_path / "packages"
    package.mkdir()
    (package / "wandb.py").write_text(FAKE)
    (package / "mlflow.py").write_text(FAKE_MLFLOW)
    monkeypatch.setenv("PYTHONPATH", str(package))
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    monkeypatch.delenv("WANDB_DIR", raising=False)
    return lambda: [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]


def run_folder(path):
    folder = RunFolder(path / "logs", "digits")
    (folder.path / EVALUATION).mkdir(parents=True, exist_ok=True)
    (folder.path / REPORT).write_text("<p>report</p>")
    (folder.path / WEIGHTS).write_bytes(bytes(100))
    Image.new("RGB", (8, 8)).save(folder.path / EVALUATION / "worst.png")
    return folder


def test_a_tracker_gets_numbers_events_and_files(fake, tmp_path):
    folder = run_folder(tmp_path)
    logger = TrackerLogger("wandb", folder, {"epochs": 3, "weights": None}, 0)
    logger.steps(STEP)
    logger.event("checkpoint", {"step": 13, "name": "step-1", "stall_seconds": 0.5})
    logger.event("checkpoint_failed", {"step": 13, "error": "full"})
    logger.epoch(EPOCH)
    logger.end(RUN)
    logger.delivered()
    logger.close()
    (_, how), step, checkpoint, alert, epoch, end, *files, finish = fake()
    known_as = json.loads((folder.path / "trackers/wandb.json").read_text())
    assert (how["id"], how["name"], how["config"]) == (known_as, "digits", {"epochs": 3, "weights": None})
    assert (how["project"], how["dir"]) == ("zerovision", str(folder.log_dir))
    assert step[:2] == ["log", 13]
    assert (step[2]["train/loss"], step[2]["train/epoch"], step[2]["train/time_shares/data"]) == (0.5, 2, 0.01)
    assert (step[2]["train/disk_free_bytes"], step[2]["train/cpu_utilization/node02"]) == (7e9, 0.75)
    assert "train/mfu" not in step[2], "what is not known is left out"
    assert checkpoint == ["log", 13, {"checkpoint/stall_seconds": 0.5}]
    assert alert == ["alert", "checkpoint_failed", '{"error": "full"}']
    assert (epoch[1], epoch[2]["epoch/val_top1"]) == (20, 0.9)
    best = {"best_epoch": 2, "best_score": 0.9, "best_val_loss": 0.3, "best_val_top1": 0.9, "best_val_top5": 0.99}
    assert best.items() <= epoch[2].items()
    assert (end[1], end[2]["run/images_per_second"]) == (50, 310.0)
    assert files == [
        ["log", 50, {"worst images": str(folder.path / EVALUATION / "worst.png")}],
        ["artifact", "evaluation", f"{known_as}-evaluation", "evaluation"],
        ["artifact", "report.html", f"{known_as}-report", "report"],
        ["log", None, {"report": str(folder.path / REPORT)}],
        ["artifact", "model.safetensors", f"{known_as}-model", "model"],
    ]
    assert finish == ["finish", 0]


def test_the_last_of_the_best_numbers_are_those_of_the_best_epoch(fake, tmp_path):
    """A table of runs shows the last value of each name."""
    logger = TrackerLogger("wandb", run_folder(tmp_path), {}, 0)
    scores = (0.5, math.nan, 0.8, 0.6)
    for number, (score, is_best) in enumerate(zip(scores, (True, False, True, False), strict=True), 1):
        summary = EPOCH.summary._replace(score=score)
        logger.epoch(dataclasses.replace(EPOCH, epoch=number, summary=summary, is_best=is_best))
    logger.close()
    last = {name: value for call in fake() if call[0] == "log" for name, value in call[2].items()}
    assert (last["best_epoch"], last["best_score"], last["epoch/score"]) == (3, 0.8, 0.6)


@pytest.mark.parametrize("long", [(), (3,), (0, 41, 99)])
def test_a_setting_that_a_server_refuses_is_lost_alone(fake, tmp_path, capfd, long):
    config = {f"setting_{number}": "x" * (300 if number in long else 9) for number in range(100)}
    logger = TrackerLogger("mlflow", run_folder(tmp_path), config, 0)
    logger.epoch(EPOCH)
    logger.close()
    taken: dict[str, str] = {}
    for _, values in (call for call in fake() if call[0] == "params"):
        assert not taken.keys() & values.keys()
        taken |= values
    refused = [f"setting_{number}" for number in long]
    assert taken == {name: value for name, value in config.items() if name not in refused}
    told = f"note: mlflow: it rejected the values of {', '.join(refused)}; all others are there\n"
    assert capfd.readouterr().err == (told if long else "")
    assert next(call[2]["best_val_top1"] for call in fake() if call[0] == "metrics") == 0.9


@pytest.mark.parametrize("rewinds", [True, False])
def test_a_resumed_run_goes_back_in_the_same_run(fake, tmp_path, monkeypatch, rewinds):
    monkeypatch.setenv("DOES", "" if rewinds else "append")
    for first_step in (0, 7):
        TrackerLogger("wandb", run_folder(tmp_path), {}, first_step).close()
    first, second = (call[1] for call in fake() if call[0] == "init")
    assert first["id"] == second["id"]
    assert not {"resume_from", "resume"} & first.keys()
    assert second.get("resume_from") == (f"{first['id']}?_step=7" if rewinds else None)
    assert second.get("resume") == (None if rewinds else "allow")


def test_a_tracker_that_waits_for_ever_holds_up_no_step(fake, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("DOES", "block")
    monkeypatch.setattr(tracker, "MOST_WAITING", 100)
    monkeypatch.setattr(tracker, "ENDING_SECONDS", 1.0)
    logger = TrackerLogger("wandb", run_folder(tmp_path), {}, 0)
    start = time.monotonic()
    for _ in range(1000):
        logger.steps(STEP)
    logged = time.monotonic()
    logger.delivered()
    assert logged - start < 5
    assert time.monotonic() - logged < 10
    assert logger._process.wait(5) != 0
    told = capfd.readouterr().err.splitlines()
    assert told[0] == "note: wandb: 100 lines are waiting: further lines are dropped; training continues"
    assert told[1] == "note: wandb: not everything was sent in 1 s: the run's folder has all of it"
    assert told[2].endswith("lines were dropped: metrics.jsonl has them")
    assert len(told) == 3


@pytest.mark.parametrize(
    ("does", "line"),
    [
        ("raise", "RuntimeError: no such project: some of it is missing there, training goes on"),
        ("refuse", "Error: no: the run is not there, training goes on"),
    ],
)
def test_what_a_tracker_raises_is_one_line(fake, tmp_path, monkeypatch, capfd, does, line):
    monkeypatch.setenv("DOES", does)
    logger = TrackerLogger("wandb", run_folder(tmp_path), {}, 0)
    for _ in range(3):
        logger.steps(STEP)
    logger.event("gave_up", {"step": 13, "reason": "nan"})
    logger.close()
    assert capfd.readouterr().err == f"note: wandb: {line}\n"
    if does == "raise":
        assert fake()[-1] == ["finish", 1], "a run that gave up has failed"


def test_a_killed_trainer_leaves_a_killed_run_and_no_process(fake, tmp_path):
    folder = run_folder(tmp_path)
    program = (
        "import os, sys, time; from pathlib import Path; from zerovision.training.base.run_folder import RunFolder\n"
        "from zerovision.training.observe.loggers.tracker import TrackerLogger\n"
        f"logger = TrackerLogger('wandb', RunFolder(Path({str(folder.log_dir)!r}), 'digits'), {{}}, 0)\n"
        "logger.event('resume', {'step': 4, 'restarts': 1})\n"
        f"while not os.path.exists({str(tmp_path / 'calls')!r}): time.sleep(0.01)\n"
        "print(logger._process.pid, flush=True); os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (-9, "")
    wait_until(lambda: not Path(f"/proc/{int(done.stdout)}").exists())
    assert [call[0] for call in fake()] == ["init", "log", "finish"]
    assert fake()[-1] == ["finish", 1]


def test_a_full_disk_ends_no_run(fake, small_disk, monkeypatch, capfd):
    folder = run_folder(small_disk)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    with full(small_disk):
        opened = loggers.open_loggers(TrainConfig(loggers="wandb", progress="off"), folder, {}, {}, 0)
        opened.steps(STEP)
        opened.close()
    lines = [line for line in capfd.readouterr().err.splitlines() if "wandb" in line]
    assert len(lines) == 1
    assert "No space left on device" in lines[0]


def test_the_model_has_the_same_bytes_whatever_a_tracker_does(fake, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path / "packages")
    monkeypatch.setattr(tracker, "ENDING_SECONDS", 1.0)
    values = {"data": "fake", "batch_size": 64, "image_size": 8}
    weights = set()
    for name, does in {"none": "", "raises": "raise", "waits": "block"}.items():
        monkeypatch.setenv("DOES", does)
        loggers = "none" if name == "none" else "wandb"
        weights.add((train(tmp_path / "logs", name, loggers=loggers, **values) / WEIGHTS).read_bytes())
    assert len(weights) == 1
    assert {call[1]["name"] for call in fake() if call[0] == "init"} == {"raises", "waits"}


@pytest.mark.slow
def test_several_ranks_are_one_run_also_after_a_resume(fake, tmp_path):
    where = ["--image-size", "16", "--log-dir", str(tmp_path / "logs"), "--run-name", "two", "--resume", "auto"]
    variables = {"PYTHONPATH": str(tmp_path / "packages"), "CALLS": str(tmp_path / "calls")}
    for epochs in ("1", "2"):
        done = launch("basic_cnn", "ddp", "2", "32", epochs, *where, "--loggers", "wandb", **variables)
        assert done.returncode == 0, done.stderr
    calls = fake()
    first, second = (call[1] for call in calls if call[0] == "init")
    assert first["id"] == second["id"]
    assert second["resume_from"] == f"{first['id']}?_step=23"  # 1,437 images in steps of 64
    assert [call[2]["epoch/epoch"] for call in calls if call[0] == "log" and "epoch/epoch" in call[2]] == [1, 2]


def test_a_missing_package_is_one_line_with_the_cure(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    config = TrainConfig(loggers="mlflow", progress="off")
    loggers.open_loggers(config, run_folder(tmp_path), {}, {}, 0).close()
    assert capsys.readouterr().out == (
        "note: --loggers mlflow: not installed; the run continues without it: pip install mlflow\n"
    )


@pytest.mark.parametrize(
    ("loggers", "tensorboard", "expected"),
    [
        ("tensorboard", True, ["tensorboard"]),
        ("wandb, tensorboard,mlflow", True, ["wandb", "tensorboard", "mlflow"]),
        ("tensorboard,trackio", False, ["trackio"]),
        ("none", True, []),
        ("", True, None),
    ],
)
def test_what_loggers_names(loggers, tensorboard, expected):
    config = TrainConfig(loggers=loggers, tensorboard=tensorboard)
    if expected is None:
        with pytest.raises(UserError, match="Allowed: tensorboard, wandb, mlflow, trackio"):
            check_config(config, FLAG_OF)
    else:
        assert check_config(config, FLAG_OF).destinations == expected
