"""Names of other trainers get ours, or 'not there yet'; what resembles nothing gets no guess."""

from __future__ import annotations

import argparse
import re

import deepspeed
import pytest
import timm

from delivery.export import FORMATS, PRECISIONS
from delivery.flags import evaluate_parser, export_parser, predict_parser
from launch.arguments import read_arguments
from models import MODELS, check_model_name
from models.names_elsewhere import FLAGS, VALUES
from training.base.errors import UserError, nearest
from training.config import FIELDS, FLAG_OF
from training.config.command_line import parse_args, training_parser
from training.config.values import allowed_names
from training.data import DATASETS, DataOptions, load_data
from training.data.augmentations import AUGMENTATIONS
from training.engines.strategies import STRATEGIES
from training.recipe.rules import ALLOWED
from training.recipe.schedule import SCHEDULES


def told(words: list[str], parse=parse_args) -> str:
    """Return what a command line is answered with."""
    with pytest.raises(UserError) as caught:
        parse(words)
    return str(caught.value)


@pytest.mark.parametrize(
    ("line", "answer"),
    [
        ("--lr 0.1", "'--lr'. Here that is --learning-rate."),
        ("--fp16", "Here that is --precision fp16."),
        ("--amp", "Here that is --precision bf16."),
        ("--gpus 2", "launch_distributed.sh <model> <strategy> <num_gpus>"),
        ("--num_train_epochs 3", "Here that is --epochs."),
        ("--trainer.max_epochs=3", "Here that is --epochs."),
        ("--trainer.precision 16", "Did you mean '--precision'?"),
        ("imgsz=224", "Here that is --image-size."),
        ("-b 4", "Here that is --batch-size."),
        ("--resume_from_checkpoint x", "Here that is --resume."),
        ("--kfold 5", "Not there yet"),
        ("--wandb", "Not there yet"),
        ("--model-type resnet50", "Did you mean 'timm:resnet50'?"),
        ("--model-type microsoft/ResNet-50", "Did you mean 'timm:resnet50'?"),
        ("--model-type hf-hub:timm/resnet50.a1_in1k", "Did you mean 'timm:resnet50.a1_in1k'?"),
        ("--model-type efficientnet_b3", "Did you mean 'timm:efficientnet_b3'?"),
        ("--model-type mobilnet", "Did you mean 'mobilenet'?"),
        ("--model-type vit_b_16", "Here that is timm:vit_base_patch16_224."),
        ("--strategy fsdp", "Did you mean 'fsdp_stage2' or 'fsdp_stage3'?"),
        ("--strategy deepspeed_stage_3", "Here that is fsdp_stage3."),
        ("--precision float16", "Here that is fp16."),
        ("--precision 16-mixed", "Here that is fp16."),
        ("--optimizer SGD", "Did you mean 'sgd'? "),
        ("--schedule CosineAnnealingLR", "Here that is cosine."),
        ("--schedule reduce_lr_on_plateau", "Not there yet"),
        ("--augmentation ta_wide", "Here that is trivialaugment."),
        ("--offload cpu", "Here that is optimizer."),
        ("--save 3", "Did you mean '--save-every-steps' or '--save-every-minutes'?"),
    ],
)
def test_names_of_others_get_ours(line, answer):
    assert answer in told(line.split())


@pytest.mark.parametrize(
    "line",
    ["--nonsense", "--xyzzy 3", "-z", "stray", "--model-type yolov8n-cls.pt", "--strategy fancy", "--schedule q"],
)
def test_what_resembles_nothing_gets_no_guess(line):
    assert not re.search("Did you mean|Here that is|Not there yet", told(line.split()))


def test_every_answer_names_what_there_is():
    flags = {"--num-gpus", "RUN_OR_WEIGHTS", "IMAGE", "RUN"}
    for parser in (training_parser(), evaluate_parser(None), predict_parser(None), export_parser(None)):
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


def test_other_scripts_answer_with_what_they_have():
    assert "Here that is RUN_OR_WEIGHTS, the first word." in told(
        ["digits", "--ckpt", "x"], evaluate_parser(None).parse
    )
    assert "Here that is --flip." in told(["digits", "--tta"], evaluate_parser(None).parse)
    assert "Here that is --top-k." in told(["digits", "a.png", "--topk", "5"], predict_parser(None).parse)
    words = ["digits", "--format", "onnx", "--int8"]
    assert "Here that is --precision int8." in told(words, export_parser(None).parse)
    with pytest.raises(UserError, match="'--model' stands among the first 5 arguments"):
        read_arguments("launch_distributed.sh", ["--model", "resnet50", "--epochs", "5", "--lr", "1"], {})
    with pytest.raises(UserError, match=r"Here that is torchvision:CIFAR10\."):
        load_data(DataOptions(data="cifar10"))


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
