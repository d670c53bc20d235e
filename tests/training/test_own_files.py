"""Trainings with a user's own files, which the examples are: on any number of ranks, resumed, evaluated."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from commands import assert_success, command_here, launch, train_here

from zerovision.training.base import plugins
from zerovision.training.checkpoint.weights import read_metadata

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
SMALL = (
    "--data fake --progress off --report false --tensorboard false --schedule constant --warmup-epochs 0 --best-by loss"
)

pytestmark = pytest.mark.usefixtures("no_plugins_stay")


def of(*names: str) -> list[str]:
    return [f"--plugin={EXAMPLES / name}.py" for name in names]


def evaluate(*words: str):
    return command_here("evaluate", *words)


def test_network_loss_and_logger_of_own_files_are_trained_and_evaluated(tmp_path):
    files = of("own_network", "own_logger", "own_loss")
    flags = f"{SMALL} --learning-rate 0.01 --loss focal --loggers csv --log-dir {tmp_path} --run-name run".split()
    assert_success(launch("patches", "ddp", "2", "16", "2", *flags, *files))
    run = tmp_path / "runs" / "run"
    best = json.loads((run / "evaluation" / "scores.json").read_text())
    lines = list(csv.reader((run / "epochs.csv").open()))
    assert [line[0] for line in lines] == ["1", "2"]
    assert best["top1"] in [float(line[3]) for line in lines]
    for words in ([str(run)], [str(run / "model.safetensors"), *of("own_logger", "own_loss")]):
        refused = evaluate(*words)
        assert refused.returncode == 2
        assert "--plugin 'own_network.py', which is never loaded automatically: add --plugin FILE." in refused.stderr
        assert refused.stderr.count("\n") == 1
    assert_success(evaluate(str(run), *files, "--output", str(tmp_path / "again")))
    assert json.loads((tmp_path / "again" / "scores.json").read_text())["top1"] == best["top1"]


def test_own_augmentation_gives_equal_bytes_on_two_ranks_and_after_a_resume(tmp_path, monkeypatch):
    mine = tmp_path / "mine.py"
    mine.write_text((EXAMPLES / "own_augmentation.py").read_text())
    flags = [*f"{SMALL} --augmentation turned --image-size 16 --log-dir {tmp_path} --plugin {mine}".split()]
    alone = ["--model-type=basic_cnn", "--batch-size=16", "--workers=1", "--gradient-accumulation-steps=2"]
    for name, epochs in (("one", 2), ("two", 1)):
        assert train_here(*alone, *flags, f"--run-name={name}", f"--epochs={epochs}").returncode == 0
    more = ("--run-name=two", "--workers=0", "--resume=auto")
    result = assert_success(launch("basic_cnn", "ddp", "2", "16", "2", *flags, *more))
    assert "resuming from" in result.stdout
    one, two = (tmp_path / "runs" / name / "model.safetensors" for name in ("one", "two"))
    assert read_metadata(one)["extra"]["epoch"] == 2
    assert one.read_bytes() == two.read_bytes()
    mine.write_text(mine.read_text().replace("RandomRotation(15)", "RandomRotation(16)"))
    changed = train_here(*alone, *flags, "--run-name=one", "--epochs=3", "--resume=auto")
    assert changed.returncode == 2
    assert "was made with another plug-in: entry 0 is 'mine.py@" in changed.stderr
    assert changed.stderr.count("\n") == 1
    monkeypatch.setattr(plugins, "_LOADED", {})
    forgotten = train_here("--run-name=one", f"--log-dir={tmp_path}", "--epochs=3", "--resume=auto")
    assert forgotten.returncode == 2
    assert "this run was made with --plugin 'mine.py', which is never loaded automatically" in forgotten.stderr
