"""The note on flags that change nothing."""

from __future__ import annotations

import dataclasses

import pytest

from zerovision.training.base.settings import PRESETS
from zerovision.training.config import FLAG_OF, TrainConfig
from zerovision.training.config.check import USED, note_unused_flags
from zerovision.training.config.command_line import parse_args

MUON, PAIRS = {"optimizer": "muon"}, {"batch_size": 2}
CASES = {  # a value, and what gives it an effect
    "momentum": (0.5, {"optimizer": "sgd"}),
    "final_learning_rate_scale": (0.1, {"schedule": "wsd:1:linear"}),
    "cooldown_epochs": (2.0, {"schedule": "linear"}),
    "fallback_optimizer": ("lion", MUON),
    "head_epochs": (1, {"model_type": "mobilenet_finetuned"}),
    "backbone_learning_rate_scale": (0.2, {"model_type": "mobilenet_finetuned"}),
    "mixup": (0.4, PAIRS),
    "cutmix": (1.0, PAIRS),
    "mixup_probability": (0.5, PAIRS | {"cutmix": 1.0}),
    "mixup_off_epochs": (1, PAIRS | {"mixup": 1.0}),
    "mixup_switch_probability": (0.3, PAIRS | {"mixup": 1.0, "cutmix": 1.0}),
    "shift_padding": ("reflect", {"shift_pixels": 2}),
    "eval_crop": (0.9, {"fit": "crop"}),
    "teacher_classes": ("names.txt", {"teacher": "large", "distill": "kl:4"}),
    "outer_learning_rate": (0.5, {"local_steps": 10}),
    "outer_momentum": (0.5, {"local_steps": 10}),
    "outer_precision": ("bf16", {"local_steps": 10}),
    "pipeline_schedule": ("interleaved", {"pipeline_parallel": 2}),
    "pipeline_split": ("blocks.1", {"pipeline_parallel": 2}),
}


def test_every_flag_of_the_table_has_a_case():
    replaced = {"val_fraction", "epochs", "learning_rate", "optimizer", "schedule"}
    assert CASES.keys() | replaced == USED.keys()


@pytest.mark.parametrize("name", CASES)
def test_a_flag_without_what_it_belongs_to_is_named(name):
    value, others = CASES[name]
    base = {"shift_pixels": 0, "augmentation": "none", "schedule": "constant", "batch_size": 1, "fit": "pad"}
    config = TrainConfig(**{**base, name: value})
    assert note_unused_flags(config) == [f"without effect in this run: {FLAG_OF[name]}"]
    assert note_unused_flags(dataclasses.replace(config, **others)) == []


@pytest.mark.parametrize(
    ("flag", "given"),
    [
        (
            "--epochs, --learning-rate, --optimizer",
            {"epochs": 3, "learning_rate": 0.1, "optimizer": "sgd", "solver": "lbfgs"},
        ),
        ("--val-fraction", {"folds": 5, "val_fraction": 0.3}),
        ("--optimizer MOMENTUM", {"optimizer": "sgd", "optimizer_options": "momentum=0.9", "momentum": 0.5}),
        ("--head-epochs", {"model_type": "mobilenet_finetuned", "tune": "head", "head_epochs": 1}),
        ("--head-epochs BACKBONE_LEARNING_RATE_SCALE", {"model_type": "mobilenet_finetuned", "tune": "lora:2"}),
        (
            "--pipeline-parallel SCHEDULE",
            {"pipeline_schedule": "interleaved", "pipeline_parallel": 2, "model_type": "ensemble"},
        ),
        ("--shift-pixels PADDING", {"shift_pixels": 0, "shift_padding": "reflect"}),
        ("--shift-pixels PADDING", {"augmentation": "crop_flip", "shift_padding": "reflect"}),
    ],
)
def test_a_flag_that_another_one_replaces_is_named(flag, given):
    config = TrainConfig(**({"backbone_learning_rate_scale": 0.3} if "BACKBONE" in flag else {}), **given)
    assert note_unused_flags(config) == [f"without effect in this run: {flag}"]


@pytest.mark.parametrize("preset", PRESETS)
def test_no_preset_has_any(preset):
    assert note_unused_flags(parse_args(["--preset", preset])[0]) == []
