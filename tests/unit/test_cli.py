"""The command `zerovision`: its verbs, and what it imports for them."""

from __future__ import annotations

import os
import subprocess
import sys
from unittest import mock

import pytest

from zerovision import cli
from zerovision.commands import COMMANDS
from zerovision.training.base.errors import UserError
from zerovision.training.base.points import Loggers
from zerovision.training.base.run_folder import SCRIPTS, TYPED, as_typed

REPO_ROOT = cli.Path(cli.__file__).parents[1]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-X", "importtime", "-m", "zerovision.cli", *words]
    environment = os.environ | {"PYTHONPATH": str(REPO_ROOT)}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def test_every_command_is_a_verb():
    assert {SCRIPTS.get(verb, verb) for verb in cli.VERBS} - COMMANDS.keys() == {"launch"}
    assert COMMANDS.keys() <= {SCRIPTS.get(verb, verb) for verb in cli.VERBS}


@pytest.mark.parametrize("words", [[], ["--help"], ["--version"], ["lunch"]])
def test_help_imports_little(words):
    result = run(*words)
    lines = result.stderr.splitlines()
    imported = {line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")}
    base = "zerovision.training.base.lasting_output"
    of_ours = {name for name in imported if name.startswith("zerovision")}
    assert all(base.startswith(name) or name.rpartition(".")[0] == base.rpartition(".")[0] for name in of_ours)
    assert not {"argparse", "yaml", "numpy", "torch"} & imported
    assert result.returncode == (2 if words == ["lunch"] else 0)
    if words == ["lunch"]:
        [said] = [line for line in lines if not line.startswith("import time:")]
        assert said.startswith("zerovision: unknown command 'lunch': expected one of train, launch, ")
        assert said.endswith(" Did you mean launch?")


def test_help_of_the_launcher_names_the_words_of_one_machine_and_of_several():
    one, several = (run("launch", *words, "--help").stdout for words in ([], ["m", "ddp", "2", "8", "16", "50"]))
    assert "\n    zerovision launch <model> <strategy> <num_gpus> <batch_size> <epochs> [flags]\n" in one
    assert "\n    zerovision launch <model> <strategy> <num_nodes> <gpus_per_node> <batch_size> <epochs>" in several
    command = ["bash", str(REPO_ROOT / "scripts" / "launch_distributed.sh"), "vgg", "--help", "all"]
    of_script = subprocess.run(command, capture_output=True, text=True)
    for all_flags in (run("launch", "--help", "all"), of_script):
        assert all_flags.returncode == 0, all_flags.stderr
        assert {"--sync-batchnorm", "--mixup-probability"} <= {*all_flags.stdout.split()}


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("type bash scripts/launch_multi_node.sh vgg", "type zerovision launch vgg"),
        ("python scripts/audit_data.py ~/photos", "zerovision audit ~/photos"),
        ("scripts/evaluate.py RUN --split test", "zerovision evaluate RUN --split test"),
        ("torchrun -n 2 scripts/evaluate.py digits", "torchrun -n 2 -m zerovision.commands evaluate digits"),
        ("deepspeed scripts/train_distributed.py", "deepspeed --module zerovision.commands.train_distributed"),
        ("torchrun -n 2 scripts/train_distributed.py", "torchrun -n 2 -m zerovision.commands.train_distributed"),
        (
            "'train_distributed.py', see scripts/train_distributed.py --help",
            "'train_distributed.py', see python -m zerovision.commands.train_distributed --help",
        ),
    ],
)
def test_a_message_names_what_the_user_has(text, command, monkeypatch):
    monkeypatch.delenv(TYPED, raising=False)
    assert as_typed(text) == str(UserError(text)) == text
    monkeypatch.setenv(TYPED, "evaluate")
    assert as_typed(text) == str(UserError(text)) == command
    said = mock.Mock()
    Loggers([said]).message(text)
    said.message.assert_called_once_with(command)


def test_a_mistake_is_told_under_the_verb():
    assert "\nbisect: the following arguments are required: " in run("bisect").stderr


@pytest.mark.parametrize("words", [["--help"], ["launch", "--help"]])
def test_somebody_may_stop_reading_the_help(words):
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "zerovision.cli", *words]
    environment = os.environ | {"PYTHONPATH": str(REPO_ROOT)}
    with os.fdopen(writer, "wb") as nobody_reads:
        ended = subprocess.run(command, env=environment, stdout=nobody_reads, stderr=subprocess.PIPE, check=False)
    assert (ended.returncode, ended.stderr) == (0, b"")
