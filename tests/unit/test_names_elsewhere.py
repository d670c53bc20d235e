"""Names of other trainers get ours, or 'not there yet'; what resembles nothing gets no guess."""

from __future__ import annotations

import argparse
import re

import deepspeed
import pytest
import timm

from zerovision.delivery.export import FORMATS, PRECISIONS
from zerovision.delivery.settings import EvaluateSettings, ExportSettings, PredictSettings
from zerovision.models import MODELS, check_model_name
from zerovision.training.base.errors import UserError, names_elsewhere, nearest
from zerovision.training.config import FIELDS, FLAG_OF
from zerovision.training.config.command_line import parse_args, training_parser
from zerovision.training.config.values import allowed_names
from zerovision.training.data import DATASETS
from zerovision.training.data.augmentations import AUGMENTATIONS
from zerovision.training.engines.strategies import STRATEGIES
from zerovision.training.recipe.rules import ALLOWED
from zerovision.training.recipe.schedule import SCHEDULES

FLAGS, VALUES = (names_elsewhere()[table] for table in ("flags", "values"))


def told(words: list[str], parse=parse_args) -> str:
    """Return what a command line is answered with."""
    with pytest.raises(UserError) as caught:
        parse(words)
    return str(caught.value)


def test_every_answer_names_what_there_is():
    flags = {"--num-gpus", "RUN_OR_WEIGHTS", "IMAGE", "RUN"}
    for parser in (training_parser(), EvaluateSettings.parser(), PredictSettings.parser(), ExportSettings.parser()):
        flags |= {*parser._option_string_actions}
    assert {answer.split()[0].strip(",") for answer in FLAGS if not answer.endswith(".")} <= flags
    tables = {"strategy": STRATEGIES, "optimizer": ALLOWED, "schedule": SCHEDULES, "augmentation": AUGMENTATIONS}
    tables |= {"model": {*MODELS, *(f"timm:{name}" for name in timm.list_models())}, "format": FORMATS}
    tables |= {"data set": {entry.usage for entry in DATASETS.values()}}
    for kind, answers in VALUES.items():
        known = {*tables.get(kind, ())} or {*allowed_names(FIELDS[kind]), *(PRECISIONS if kind == "precision" else ())}
        names = {answer for answer in answers if not answer.endswith(".")} - known
        assert all(name.startswith("torchvision:") for name in names), kind


def test_no_flag_of_ours_is_taken_for_anothers(tmp_path):
    """In a command line and in a file, every word of the table is answered, unless it is a flag of the trainer's."""
    file, own = tmp_path / "args.yaml", {flag[2:] for flag in FLAG_OF.values()}
    words = {word for answer, words in FLAGS.items() if answer.startswith("--") for word in words.split()}
    trainers = {answer for answer in FLAGS if answer.split()[0] in FLAG_OF.values() or answer.endswith(".")}
    answered = {word for answer in trainers for word in FLAGS[answer].split()}
    for word in sorted(words & answered - {"b", "c", "m", "a", "j", "v", "q", "k", "o"}):
        assert word not in own
        assert re.search("Here that is|[.] [A-Z]", told([f"--{word}", "1"]))
        file.write_text(f"{word.replace('-', '_')}: 1\n")
        assert re.search(r"unknown key '.*'\. [A-Z]", told(["--config", str(file)]))


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
