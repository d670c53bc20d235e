"""Lines for people: of a foreign death, of names of other trainers, and durations, sizes and counts."""

from __future__ import annotations

import argparse
import os
import re
import signal
from types import SimpleNamespace

import deepspeed
import pytest
import timm
import torch
from torch.utils.data import DataLoader, Dataset

from zerovision.delivery.export import FORMATS, PRECISIONS
from zerovision.delivery.settings import EvaluateSettings, ExportSettings, PredictSettings
from zerovision.delivery.trained_model import TrainedModel, find_model, find_run
from zerovision.launch.doctor import data_fields
from zerovision.models import MODELS, check_model_name
from zerovision.models.weights_file import read_weights_file
from zerovision.training.base.errors import RunEnded, UserError, known_failure, names_elsewhere, nearest, printable
from zerovision.training.base.points import Loggers
from zerovision.training.base.units import format_bytes, format_duration, plural
from zerovision.training.checkpoint.weights import read_metadata
from zerovision.training.config import FIELDS, FLAG_OF, TrainConfig
from zerovision.training.config.command_line import parse_args, training_parser
from zerovision.training.config.values import allowed_names
from zerovision.training.data import DATASETS, DataOptions, load_data
from zerovision.training.data.augmentations import AUGMENTATIONS
from zerovision.training.data.folder import listing
from zerovision.training.engines.ways import STRATEGIES
from zerovision.training.recipe.rules import ELEMENT_WISE, WHOLE_PARAMETER
from zerovision.training.recipe.schedule import SCHEDULES
from zerovision.training.tasks.settings import LOSSES


class DeadlyData(Dataset):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        os.kill(os.getpid(), signal.SIGKILL)
        return torch.zeros(1)


def test_the_death_of_a_real_worker_is_one_line():
    with pytest.raises(RuntimeError) as caught:
        list(DataLoader(DeadlyData(), num_workers=1))
    line = known_failure(caught.value, 3)
    assert line is not None
    assert line.startswith("a data worker of rank 3 died: DataLoader worker")
    assert "\n" not in line


def test_a_lost_peer_is_one_line_and_a_bug_keeps_its_traceback():
    gloo = "[/pytorch/gloo/pair.cc:561] Connection closed by peer [127.0.0.1]:20395.\nCheck the logs"
    assert known_failure(RuntimeError(gloo), 0) == "rank 0 lost the connection to another rank"
    assert known_failure(RuntimeError("mat1 and mat2 shapes cannot be multiplied"), 0) is None


def test_what_a_terminal_would_obey_is_escaped_in_mistakes_and_in_the_log():
    name = "\x1b]0;x\x07\x9b2J a\r\nb \u202e\u2028 \ud83d 📷 é می\u200cخواهم"
    shown = r"\x1b]0;x\x07\x9b2J a\r\nb \u202e\u2028 \ud83d 📷 é می" + "\u200cخواهم"
    assert printable(name) == shown
    assert str(UserError(f"class '{name}'")) == f"class '{shown}'"
    assert str(RunEnded(name, 65, 3)) == shown
    lines = []
    logger = SimpleNamespace(message=lines.append)
    Loggers([logger]).message(f"note: {name}")
    assert lines == [f"note: {shown}"]


def test_a_run_is_found_from_other_folders(tmp_path, monkeypatch):
    """By its name, and as the documentation writes its folder and weights; a file of the current folder comes first."""
    run, other = tmp_path / "repository" / "logs" / "runs" / "digits", tmp_path / "other"
    for folder in (run, other):
        folder.mkdir(parents=True)
    (run / "config.json").write_text("{}")
    weights = run / "model.safetensors"
    weights.write_bytes(bytes(8) + b"{}")
    monkeypatch.setattr("zerovision.delivery.trained_model.log_folder", lambda: tmp_path / "repository" / "logs")
    monkeypatch.chdir(other)
    for word in ("digits", "logs/runs/digits", "logs/runs/digits/", "logs/runs/digits/model.safetensors"):
        assert find_model(word) == TrainedModel(weights, run)
    assert find_run("logs/runs/digits") == run
    (other / "digits").mkdir()  # the data, after which train has named the run
    assert find_run("digits") == run
    own = other / "logs" / "runs" / "digits"
    own.mkdir(parents=True)
    (own / "config.json").write_text("{}")
    assert find_run("logs/runs/digits") == own
    (own / "config.json").write_text("{")  # damaged: told when it is read
    assert find_run("logs/runs/digits") == own


@pytest.mark.parametrize("word", ["~nobody.of.this.name/x", "n" * 300])
def test_a_path_that_no_file_can_have_is_one_line(word):
    for use in (find_model, find_run, lambda word: read_weights_file(word, []), read_metadata):
        with pytest.raises(UserError, match=r"does not exist|neither a file"):
            use(word)
    for use in (load_data, listing):
        with pytest.raises(UserError, match="no folder of that name exists"):
            use(DataOptions(data=word))
    assert data_fields(TrainConfig(data=word))["data"].endswith(word)


DURATIONS = {
    0: "0 s",
    0.0015: "1.5 ms",
    0.32: "320 ms",
    0.9999: "1 s",
    7.309: "7.31 s",
    45.0: "45 s",
    59.96: "1 min 00 s",
    200: "3 min 20 s",
    3599.6: "1 h 00 min",
    7500: "2 h 05 min",
    273_600: "3 d 04 h",
}
SIZES = {
    0: "0 B",
    999: "999 B",
    1000: "1 kB",
    999_600: "1 MB",
    12_340_000: "12.3 MB",
    1.234e9: "1.23 GB",
    5e15: "5e+03 TB",
}


def test_durations_sizes_and_counts():
    assert {seconds: format_duration(seconds) for seconds in DURATIONS} == DURATIONS
    assert {size: format_bytes(size) for size in SIZES} == SIZES
    assert [plural(count, "class") for count in (0, 1, 2000)] == ["0 classes", "1 class", "2,000 classes"]
    assert [plural(count, "step") for count in (1, 2)] == ["1 step", "2 steps"]


FLAGS, VALUES = (names_elsewhere()[table] for table in ("flags", "values"))


def told(*words: str) -> str:
    """Return what a command line is answered with."""
    with pytest.raises(UserError) as caught:
        parse_args(words)
    return str(caught.value)


def test_every_answer_names_what_there_is():
    flags = {"--num-gpus", "RUN_OR_WEIGHTS", "IMAGE", "RUN"}
    for parser in (training_parser(), EvaluateSettings.parser(), PredictSettings.parser(), ExportSettings.parser()):
        flags |= {*parser._option_string_actions}
    assert {answer.split()[0].strip(",") for answer in FLAGS if not answer.endswith(".")} <= flags
    tables = {
        "strategy": STRATEGIES,
        "optimizer": ELEMENT_WISE + WHOLE_PARAMETER,
        "loss": LOSSES,
        "schedule": SCHEDULES,
        "augmentation": AUGMENTATIONS,
    }
    tables |= {"model": {*MODELS, *(f"timm:{name}" for name in timm.list_models())}, "format": FORMATS}
    tables |= {"data set": {entry.usage for entry in DATASETS.values()}}
    for kind, answers in VALUES.items():
        known = {*tables.get(kind, ())} or {*allowed_names(FIELDS[kind]), *(PRECISIONS if kind == "precision" else ())}
        names = {answer for answer in answers if not answer.endswith(".")} - known
        assert all(name.startswith("torchvision:") for name in names), kind


def test_no_flag_of_ours_is_taken_for_anothers(tmp_path, monkeypatch):
    """In a command line and in a file, every word of the table is answered, unless it is a flag of the trainer's."""
    parser = training_parser()  # made anew for each of hundreds of words, it would be most of the time
    monkeypatch.setattr("zerovision.training.config.command_line.training_parser", lambda **_: parser)
    file, own = tmp_path / "args.yaml", {flag[2:] for flag in FLAG_OF.values()}
    words = {word for answer, words in FLAGS.items() if answer.startswith("--") for word in words.split()}
    trainers = {answer for answer in FLAGS if answer.split()[0] in FLAG_OF.values() or answer.endswith(".")}
    answered = {word for answer in trainers for word in FLAGS[answer].split()}
    for word in sorted(words & answered - {"b", "c", "m", "a", "j", "v", "q", "k", "o"}):
        assert word not in own
        assert re.search("[.] [A-Z]", told(f"--{word}", "1"))
        file.write_text(f"{word.replace('-', '_')}: 1\n")
        assert re.search(r"unknown key '.*'\. [A-Z]", told("--config", str(file)))


def test_the_flags_that_deepspeed_adds_to_a_script_choose_its_file():
    theirs = deepspeed.add_config_arguments(argparse.ArgumentParser())
    for words in (["--deepspeed", "a.json"], ["--deepspeed", "--deepspeed_config", "a.json"], ["--deepspeed=a.json"]):
        assert parse_args(words)[0].deepspeed_config == "a.json"
    assert {"--deepspeed", "--deepspeed_config"} <= {*theirs._option_string_actions}
    assert parse_args(["--deepspeed"])[0].deepspeed_config == ""


def test_a_name_of_timm_is_found_however_it_is_written():
    for given in ("resnet18", "ResNet-18", "timm/resnet18", "resnet_18"):
        with pytest.raises(UserError, match="'timm:resnet18'"):
            check_model_name(given)


def test_the_nearest_is_named_as_it_is_written():
    assert nearest("cifar10", ["CIFAR10", "CIFAR100"]) == " Did you mean 'CIFAR10'?"
