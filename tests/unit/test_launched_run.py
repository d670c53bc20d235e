"""`run(config, gpus=N)` with a stub for the launcher: what that is asked for, its lines, its exit code, signals."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from zerovision.launch.arguments import check_training, read_arguments
from zerovision.training import launched_run
from zerovision.training.base.errors import UserError
from zerovision.training.config import TrainConfig
from zerovision.training.config.file import read_preset
from zerovision.training.launched_run import launch_words
from zerovision.training.run import run

# With this many epochs it waits for a signal.
WAITS = 99
STUB = f"""
import os, signal, sys, time
def save(number, frame):
    print("saved at", number, flush=True)
    os._exit(128 + number)
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, save)
print(os.environ["ZEROVISION_CALLER"], *sys.argv[1:], os.environ.get("RANK"), flush=True)
print("grün", file=sys.stderr, flush=True)
if "{WAITS}" in sys.argv:
    time.sleep(60)
os.kill(os.getpid(), signal.SIGKILL) if "77" in sys.argv else sys.exit(65)
"""


@pytest.fixture(autouse=True)
def launcher(tmp_path, monkeypatch):
    (tmp_path / "stub.py").write_text(STUB, encoding="utf-8")
    monkeypatch.setattr(launched_run, "LAUNCHER", [str(tmp_path / "stub.py")])
    monkeypatch.delenv("RANK", raising=False)


@pytest.mark.parametrize(("epochs", "code"), [(3, 65), (77, 137)])
def test_lines_and_exit_code_are_the_launchers(capsys, monkeypatch, epochs, code):
    # What a training in another thread has set is not for the ranks.
    for name, value in {"RANK": "0", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    assert run(TrainConfig(epochs=epochs, strategy="auto"), gpus=2) == code
    assert capsys.readouterr() == (f"{os.getpid()} mobilenet auto 2 16 {epochs} --learning-rate=0.001 None\n", "grün\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signals_reach_the_ranks(capsys, number):
    before = signal.getsignal(number)

    def send() -> None:
        shown, deadline = "", time.monotonic() + 60
        while "mobilenet" not in shown and time.monotonic() < deadline:
            time.sleep(0.05)
            shown += capsys.readouterr().out
        os.kill(os.getpid(), number)

    sender = threading.Thread(target=send)
    sender.start()
    assert run(TrainConfig(epochs=WAITS), gpus=2) == 128 + number
    sender.join()
    assert capsys.readouterr().out == f"saved at {int(number)}\n"
    assert signal.getsignal(number) == before


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"run_name": "a", "learning_rate": 1e-05, "ema": 0.999, "tensorboard": False, "deterministic": True},
        {"data": "~/-my photos", "class_weights": "a b=2,-c=0.5", "batch_size": "auto", "log_dir": "ä\n"},
        {"model_type": "timm:resnet10t", "strategy": "fsdp_stage3", "preset": "cifar10"},
        read_preset("cifar10") | {"preset": "cifar10", "epochs": 1, "label_smoothing": 0.0},
    ],
)
def test_the_ranks_read_the_same_configuration(values):
    """Also where a preset's value was overridden by the default."""
    config = TrainConfig(**values)
    given = read_arguments("launch_distributed.sh", launch_words(config, 3), {})
    assert given.ranks_per_node == 3
    assert check_training(given.training) == config


@pytest.mark.parametrize(
    ("values", "gpus", "message"),
    [
        ({}, 0, "gpus 0: expected a whole number from 1 to 1024."),
        ({}, True, "gpus True: expected a whole number"),
        ({}, "2", "gpus '2': expected a whole number"),
        ({"epochs": 0}, 2, "--epochs 0: expected a whole number from 1"),
        ({"strategy": "dp"}, 2, "unknown strategy 'dp'"),
    ],
)
def test_mistakes_raise_and_start_nothing(capsys, values, gpus, message):
    with pytest.raises(UserError) as caught:
        run(TrainConfig(**values), gpus=gpus)
    assert message in str(caught.value)
    assert capsys.readouterr() == ("", "")


def test_a_rank_starts_no_ranks(monkeypatch):
    for name, value in {"RANK": "0", "LOCAL_RANK": "0", "MASTER_PORT": "29500"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match="this process is already a rank"):
        run(TrainConfig(), gpus=2)


def test_a_job_of_one_pod_starts_its_ranks_and_one_of_several_is_refused(monkeypatch, capsys):
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "23456"}.items():
        monkeypatch.setenv(name, value)
    assert run(TrainConfig(), gpus=2) == 65
    assert capsys.readouterr().out.splitlines()[0].endswith(" None"), "the launcher gives the ranks their numbers"
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="this is one of several pods, and each would train alone"):
        run(TrainConfig(), gpus=2)
