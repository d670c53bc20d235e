"""The configuration: one merge order, types and ranges, and a file that gives the same run again."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import shlex
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import get_args

import pytest

from tests.kit import ROOT, train
from zerovision.commands import train_distributed
from zerovision.training.base.errors import UserError
from zerovision.training.base.files import write_json
from zerovision.training.base.run_folder import LAST
from zerovision.training.base.settings import PRESETS
from zerovision.training.config import FIELDS, FLAG_OF, WORDS, TrainConfig, part_name
from zerovision.training.config.check import check_config
from zerovision.training.config.command_line import parse_args, training_parser
from zerovision.training.config.file import read_config_file
from zerovision.training.config.saved import with_saved_settings
from zerovision.training.config.values import (
    allowed_names,
    changed_flags,
    field_types,
    launch_command,
    read_words,
    word_of,
)
from zerovision.training.launched_run import launch_words
from zerovision.training.observe.new_run import run_folder


def test_order_is_default_preset_file_command_line(tmp_path):
    """Wherever --config stands on the command line, and the preset in the file."""
    (tmp_path / "run.yaml").write_text(
        "batch-size: 8\nlearning_rate: 0.5\nepochs: 3\npreset: digits\nworkers: 2\ndownload: true\n"
    )
    config, _ = parse_args(["--learning-rate", "0.25", "--config", str(tmp_path / "run.yaml"), "--epochs", "7"])
    assert (config.batch_size, config.learning_rate, config.epochs) == (8, 0.25, 7)
    assert (config.preset, config.model_type) == ("digits", "basic_cnn")
    assert (config.workers, config.download, config.momentum) == ("2", True, 0.9)


@pytest.mark.parametrize(
    ("words", "rate"),
    [
        ("", 0.003),
        ("--model-type timm:mobilenetv3_small_100.lamb_in1k", 0.003),  # the same network
        ("--model-type timm:efficientnet_b0", 0.003),
        ("--model-type basic_cnn", 0.001),
        ("--model-type ensemble", 0.001),
        ("--model-type timm:resnet18", 0.001),
        ("--learning-rate 0.001", 0.001),
        ("--learning-rate auto", "auto"),
        ("--pretrained", 0.001),  # fine-tuning needs less
        ("--weights model.safetensors", 0.001),
        ("--model-type mobilenet_finetuned", 0.001),
        ("--optimizer sgd", 0.001),  # measured is AdamW's
        ("--preset efficientnet-b0-450 --data photos", 0.048),
    ],
)
def test_the_learning_rate_is_the_networks_unless_one_is_given(words, rate):
    assert parse_args(words.split())[0].learning_rate == rate


def test_the_start_says_whose_learning_rate_it_is(tmp_path, monkeypatch, capsys):
    for count in ("FAKE_TRAIN_IMAGES", "FAKE_VAL_IMAGES"):
        monkeypatch.setattr(f"zerovision.training.data.arrays.{count}", 16)
    for model, words in (("mobilenet", " (the default of mobilenet from random weights)\n"), ("basic_cnn", "\n")):
        config, _ = parse_args(["--model-type", model])
        train(tmp_path, model, data="fake", model_type=model, image_size=16, learning_rate=config.learning_rate)
        assert f"; peak learning rate {config.learning_rate}{words}" in capsys.readouterr().out


def test_the_rate_of_a_network_survives_the_command_that_is_printed():
    for rate in (0.001, 0.003, 0.01):
        config = TrainConfig(learning_rate=rate)
        for words in (launch_command(config, 1, 1)[7:], launch_words(config, 1)[5:]):
            assert parse_args(words)[0].learning_rate == rate, words


PARTS = [(whole, part) for whole, parts in WORDS.items() for part in parts[1:]]
TEXTS = {"optimizer_options": "eps=1e-6,betas=0.9/0.95", "pipeline_split": "blocks.3,blocks.6", "label_separator": ";"}
TEXTS |= {"ensemble_members": "vgg,mobilenet", "randaugment": "rand-m5", "crop_ratio": "1/2,2"}
TEXTS |= {"eval_image_size": "8x9"}


def with_part(whole: str, part: str) -> TrainConfig:
    """Return a configuration in which one part of a word has another value than its default."""
    field, first = FIELDS[part], FIELDS[part].metadata["part_of"][1] or FIELDS[whole].default
    names, high = allowed_names(field), field.metadata["high"]
    value = TEXTS.get(part) or next((name for name in names if name != field.default), None)
    if value is None:
        value = type(field.default)(3 if high > 3 else high / 4)
    return TrainConfig(**{whole: first, part: value})


@pytest.mark.parametrize(("whole", "part"), PARTS)
def test_every_part_of_a_word_comes_back(whole, part, tmp_path):
    """From the fields to a command, a file, a call and JSON, and back."""
    config = with_part(whole, part)
    assert getattr(config, part) != FIELDS[part].default
    word = word_of(vars(config), whole)
    assert word.startswith(f"{getattr(config, whole)}:")
    assert read_words({whole: word}, FLAG_OF) == {name: getattr(config, name) for name in WORDS[whole]}
    flags = [f"--model-type={word}"] if whole == "model_type" else changed_flags(config, TrainConfig())
    assert flags == [f"{FLAG_OF[whole]}={word}"]
    values = vars(training_parser().parse(flags))
    assert values[whole] == word
    for content in (f"{whole.replace('_', '-')}: {json.dumps(word)}", json.dumps({whole: word}), f"{whole}: {word}\n"):
        (tmp_path / "run.yaml").write_text(content)
        assert TrainConfig(**read_config_file(tmp_path / "run.yaml")) == config
    write_json(tmp_path / "config.json", dataclasses.asdict(config))
    assert TrainConfig(**read_config_file(tmp_path / "config.json")) == config


@pytest.mark.parametrize(("words", "steps"), [([], 1), (["--local-steps", "50:4"], 50)])
def test_ranks_train_alone_for_the_steps_that_are_given(words, steps):
    assert parse_args(words)[0].steps_alone == steps


def test_an_empty_part_has_its_default():
    read = partial(read_words, label_of=FLAG_OF)
    assert read({"pipeline_parallel": "4::blocks.3"}) == {
        **{"pipeline_parallel": 4, "pipeline_schedule": "1f1b", "pipeline_split": "blocks.3"}
    }
    assert read({"shift_pixels": ":reflect"}) == {"shift_pixels": "auto", "shift_padding": "reflect"}
    assert read({"cache": "ram"}) == read({"cache": "ram:"}) == {"cache": "ram", "cache_gb": 0.0}
    assert read({"model_type": "timm:resnet18"})["model_type"] == "timm:resnet18"  # whose colon is its own


def test_a_word_replaces_the_whole_word_of_a_preset_or_a_file(tmp_path):
    (tmp_path / "run.yaml").write_text("cache: ram:8\nfolds: 5:2\nlocal-steps: 50:4\n")  # no base of 60, as in YAML 1.1
    words = ["--config", str(tmp_path / "run.yaml"), "--data", "photos"]
    config, _ = parse_args(words)
    assert (config.cache_gb, config.folds, config.fold, config.islands) == (8, 5, 2, 4)
    config, _ = parse_args([*words, "--cache", "disk"])
    assert (config.cache, config.cache_gb) == ("disk", 0)
    assert parse_args(["--preset", "cifar10-94"])[0].momentum == 0.6
    assert parse_args(["--preset", "cifar10-94", "--optimizer", "muon"])[0].momentum == 0.9


def test_the_number_of_a_rank_that_launchers_add_is_passed_over():
    config, only_check = parse_args(["--epochs", "100", "--local_rank=3"])
    assert (config, only_check) == (TrainConfig(epochs=100, learning_rate=0.003), False)


LOW = {name: field.metadata["low"] - 1 for name, field in FIELDS.items() if field.metadata["low"] is not None}
NUMBERS = [name for name, annotation in field_types().items() if float in (annotation, *get_args(annotation))]


@pytest.mark.parametrize(("name", "value"), [*LOW.items(), *((name, float("nan")) for name in NUMBERS)])
def test_every_lower_bound_holds_and_nan_is_in_no_range(name, value):
    with pytest.raises(UserError, match=FLAG_OF[name]):
        check_config(TrainConfig(**{name: value}), FLAG_OF)


@pytest.mark.parametrize(
    "data", ["Fotos 📷", "a\tb", 'quote " and \\', "\N{NO-BREAK SPACE}é", os.fsdecode(b"latin-1 \xe9"), "- no: list"]
)
def test_a_saved_configuration_comes_back_the_same_whatever_characters_its_paths_have(tmp_path, data):
    config = TrainConfig(data=data, learning_rate=3e-5, pretrained=True, seed=12)
    write_json(tmp_path / "config.json", dataclasses.asdict(config))
    assert parse_args(["--config", str(tmp_path / "config.json")])[0] == config


# Each is a line of YAML, and a word of what is said of it; the file is refused whole, at once, and with one line.
STRANGE_CONFIGS = {  # others are in tests/references/errors.txt
    "brackets": ("[" * 50_000, "'batch-size: 16'"),
    "braces": ("{" * 50_000, "'batch-size: 16'"),
    "a deep value": ("data: " + "[" * 20_000 + "]" * 20_000, "line 1: "),
    "lists as deep as Python goes": ('{"data": ' + "[" * 900 + "]" * 900 + "}", "data"),
    "lists deeper than Python goes": ('{"data": ' + "[" * 30_000 + "]" * 30_000 + "}", "nested"),
    "merges that double": (
        "\n".join(["a0: &a0 {k: v}", *(f"a{i}: &a{i} {{<<: [*a{i - 1}, *a{i - 1}]}}" for i in range(1, 40))]),
        "line 1: ",
    ),
    "a number of many digits": ("epochs: " + "9" * 10_000, "9999': expected a whole number"),
    "the same in JSON": ('{"epochs": ' + "9" * 10_000 + "}", "9999': expected a whole number"),
    "a number of many hexadecimal digits": ("epochs: 0x" + "f" * 10_000, "ffff': expected a whole number"),
    "a number of 4000 digits": ("epochs: " + "9" * 4_000, "9999: expected a whole number"),
    "sexagesimal": ("epochs: " + "1:" * 5_000 + "1", "epochs"),
    "an object": ("data: !!python/object/apply:os.system ['touch executed']", "line 1: "),
    "a zero byte": ("data: a\0b", "special characters are not allowed"),
    "a long key": ("x" * 900 + ": 1", "unknown key"),
    "a long value": ("epochs: " + "x" * 5_000, "epochs"),
    "more than any configuration": ("# " + "x" * 2**17, "larger than"),
}


@pytest.mark.parametrize("name", STRANGE_CONFIGS)
def test_strange_configuration_files_get_one_line(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    text, said = STRANGE_CONFIGS[name]
    Path("run.conf").write_text(text)
    with pytest.raises(UserError) as caught:
        parse_args(["--config", "run.conf"])
    line = str(caught.value)
    assert line.startswith("--config run.conf")
    assert said in line
    assert line.isprintable()
    assert len(line) < 400
    assert os.listdir() == ["run.conf"]


@pytest.mark.timeout(20)  # a reader that waits for a pipe fails instead of hanging
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)])
def test_only_regular_files_are_read_as_a_configuration(tmp_path, make):
    make(tmp_path / "run.yaml")
    with pytest.raises(UserError, match=r"run\.yaml: cannot be read \((not a regular file|Is a directory)\)"):
        read_config_file(tmp_path / "run.yaml")


def test_help_names_every_flag_with_default_and_imports_no_torch():
    program = [sys.executable, "-X", "importtime", str(ROOT / "scripts" / "train_distributed.py"), "--help", "all"]
    done = subprocess.run(program, capture_output=True, text=True, check=True, timeout=60)
    shown, imported = done.stdout, {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    for name, field in FIELDS.items():
        of_part = "".join(f"{part_name(name)}: {field.metadata['help']}".split())
        assert f"  {FLAG_OF[name]} " in shown or of_part in "".join(shown.split())
        if field.metadata["low"] is not None and isinstance(field.default, int):
            assert f"from {field.metadata['low']}" in " ".join(shown.split())
    assert all(f"{name}," in "".join(shown.split()) for name in PRESETS[:-1])
    assert "zerovision.training.config" in imported
    assert "torch" not in imported


@pytest.mark.parametrize(
    ("lines", "words", "wrong", "kept", "refused"),
    [
        ("offload: optimizer", "--strategy fsdp_stage2", "--strategy ddp", {"offload": "optimizer"}, "offload"),
        ("schedule: wsd:40", "--epochs 300", "--epochs 39", {"schedule": "wsd:40"}, "schedule"),
        (
            "tune: lora:8",
            "--pretrained --model-type timm:resnet18",
            "--model-type timm:resnet18",
            {"tune": "lora:8"},
            "tune",
        ),
        (
            "pipeline-parallel: 2",
            "--distill kl:4 --teacher t --model-type ensemble",
            "--distill kl:4 --teacher t",
            {"pipeline_parallel": 2},
            "pipeline-parallel 2 cannot be combined with --distill",
        ),
        (
            "mixup: 0.2\nmixup-probability: 1::40",
            "--preset resnet50-rsb-a2",
            "--preset resnet50-rsb-a2 --epochs 39",
            {"mixup_off_epochs": 40},
            "mixup-probability OFF_EPOCHS 40: the run has only 39",
        ),
    ],
)
def test_a_file_is_checked_together_with_the_flags(lines, words, wrong, kept, refused, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(lines)
    config, _ = parse_args(["--config", str(file), *words.split()])
    assert vars(config).items() >= kept.items()
    with pytest.raises(UserError, match=rf"^--config {file}: {refused}\b"):
        parse_args(["--config", str(file), *wrong.split()])


@pytest.mark.parametrize(
    ("lines", "words", "undo"),
    [
        ("", "--preset vit-small-finetune --weights x", "--pretrained false"),
        ("", "--preset resnet50-ffcv-16 --epochs 1", "--warmup-epochs auto"),
        ("preset: resnet50-ffcv-16\nimage-size: 192\ncompile: 'on'", "", "--progressive-size ''"),
        # Where overriding it does not mend the mistake, no flag is told.
        ("", "--preset cifar10 --learning-rate -1", ""),
        ("", "--preset cifar10 --strategy fsdp_stage2", ""),
        ("", "--preset cifar10 --optimizer muon:0:nesterov=true", ""),
        ("", "--preset deit3-small-800 --augmentation randaugment:m5", ""),
        ("preset: cifar10\nlearning-rate: -1", "", ""),
        ("preset: resnet50-ffcv-16\ncompile: 'on'", "", ""),
    ],
)
def test_a_value_of_a_preset_that_does_not_go_is_told_with_the_flag_that_overrides_it(lines, words, undo, tmp_path):
    (tmp_path / "run.yaml").write_text(lines)
    given = [*words.split(), *(["--config", str(tmp_path / "run.yaml")] if lines else [])]
    with pytest.raises(UserError) as caught:
        parse_args(given)
    if not undo:
        assert "override" not in str(caught.value)
        return
    name = f"{lines} {words}".split()[1]
    assert str(caught.value).endswith(f" It is set by preset {name}: to override it, add {undo}.")
    parse_args([*given, *shlex.split(undo)])


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_valid_and_names_its_source_and_what_was_measured(name):
    config, _ = parse_args(["--preset", name])
    lines = (ROOT / "zerovision" / "presets" / f"{name}.yaml").read_text().splitlines()
    first, source, *_, measured = itertools.takewhile(lambda line: line.startswith("#"), lines)
    assert source.startswith("# Source: ")
    assert measured.startswith("# Measured here: ")
    # The line to type gives what the launcher needs, as the preset has it.
    words = first.partition("launch_distributed.sh ")[2].split()
    assert words[:2] == [config.model_type, "ddp"]
    assert [int(word) for word in words[3:5]] == [config.batch_size, config.epochs]
    assert words[5:7] == ["--preset", name]


def test_settings_that_are_right_are_said_to_be(capsys):
    assert train_distributed.train(["--check-config", "--epochs", "3"]) == 0
    assert capsys.readouterr().out.startswith("these settings are valid; ")


# A run that goes on.


@pytest.fixture
def going_on(tmp_path):
    """A folder of a run that has a checkpoint, and the words that name it."""

    def begin(**settings):
        folder = run_folder(TrainConfig(log_dir=str(tmp_path), run_name="first"))
        (folder.checkpoints / LAST).mkdir(parents=True)
        saved = dataclasses.asdict(TrainConfig(**settings)) | {"run_name": "first", "log_dir": str(tmp_path)}
        write_json(folder.path / "config.json", saved)
        return ["--log-dir", str(tmp_path), "--run-name", "first", "--resume", "auto"]

    return begin


RECIPE = {
    "model_type": "basic_cnn",
    "learning_rate": 0.02,
    "optimizer": "sgd",
    "epochs": 7,
    "seed": 3,
    "data": "fake",
    "mixup": 0.2,
    "threads_per_rank": 3,
    "compile": "off",
}


def test_a_resumed_run_needs_no_flag_of_its_recipe(going_on, tmp_path):
    words = going_on(**RECIPE)
    folder = tmp_path / "runs/first"
    for place in (words, ["--resume", str(folder)], ["--resume", str(folder / "checkpoints")]):
        config, _ = parse_args(place)
        assert {name: getattr(config, name) for name in RECIPE} == RECIPE
    assert parse_args([*words[:-1], "never"])[0].seed == 0


def test_what_is_given_goes_before_what_is_saved_and_auto_means_that(going_on):
    words = going_on(**RECIPE, weights="first.safetensors", progress="bar")
    given = ["--seed", "0", "--strategy", "fsdp_stage2", "--learning-rate", "auto", "--weights", "other.safetensors"]
    config, _ = parse_args([*words, *given])
    assert (config.seed, config.strategy, config.epochs) == (0, "fsdp_stage2", 7)
    assert (config.learning_rate, config.weights, config.progress) == (0.02, "first.safetensors", "auto")


@pytest.mark.parametrize(("given", "size", "steps"), [([], 64, 2), (["auto"], "auto", 1), (["8"], 8, 2)])
def test_images_of_a_rank_are_those_that_the_run_has_unless_they_are_given(going_on, given, size, steps):
    words = going_on(**RECIPE, batch_size=64, gradient_accumulation_steps=2)
    config, _ = parse_args([*words, *(f"--batch-size={word}" for word in given)])
    assert (config.batch_size, config.gradient_accumulation_steps) == (size, steps)


def test_a_run_of_compiled_code_goes_on_with_recomputed_activations(going_on):
    words = going_on(**RECIPE | {"compile": "on"})
    assert parse_args(words)[0].compile == "on"
    config, _ = parse_args([*words, "--activation-checkpointing"])
    assert (config.activation_checkpointing, config.compile) == (True, "auto")


def test_from_python_what_is_left_open_is_as_the_run_has_it(going_on, tmp_path):
    going_on(**RECIPE, islands=2)
    place = {"log_dir": str(tmp_path), "run_name": "first", "resume": "auto"}
    config = with_saved_settings(TrainConfig(**place, batch_size="auto"), is_restart=False)
    assert (config.threads_per_rank, config.islands, config.compile, config.batch_size) == (3, 2, "off", "auto")
    assert (config.seed, config.epochs, config.learning_rate) == (0, TrainConfig().epochs, TrainConfig().learning_rate)


def test_a_run_that_goes_on_keeps_the_rate_that_it_began_with(going_on, tmp_path):
    """Also one of before networks had their own."""
    words = going_on()
    for saved, rate in ((0.001, 0.001), (0.02, 0.02), ("x", 0.003), (None, 0.003)):
        write_json(tmp_path / "runs/first/config.json", {"learning_rate": saved})
        assert parse_args(words)[0].learning_rate == rate
        assert parse_args([*words, "--learning-rate", "0.5"])[0].learning_rate == 0.5
        assert parse_args([*words[:-1], "never"])[0].learning_rate == 0.003


@pytest.mark.parametrize("resume", ["never", "auto", "elsewhere"])
def test_a_restart_keeps_what_the_run_has_found_whatever_it_was_resumed_from(going_on, tmp_path, resume):
    going_on(**RECIPE)
    place = {"log_dir": str(tmp_path), "run_name": "first", "resume": resume, "minutes": 3.0}
    config = with_saved_settings(TrainConfig(**place), is_restart=True)
    assert (config.threads_per_rank, config.compile, config.epochs, config.minutes) == (3, "off", 7, 0.0)
    assert config.resume == resume
    (tmp_path / "runs/first/checkpoints/last").rmdir()
    given = TrainConfig(**place | {"resume": "never"})
    assert with_saved_settings(given, is_restart=True) == given


@pytest.mark.parametrize("content", ["", "[]", "{", '{"seed": "x", "epochs": -1, "unknown": 1}'])
def test_settings_that_cannot_be_read_are_as_none(going_on, tmp_path, content):
    words = going_on()
    (tmp_path / "runs/first/config.json").write_text(content)
    assert parse_args(words)[0].seed == TrainConfig().seed
