"""What `train DATA` chooses: facts -> settings with reasons, the line that repeats them, and a real training."""

from __future__ import annotations

import dataclasses
import html
import json
import math
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import zerovision
from tests.kit import ROOT, call
from zerovision.commands.train import TrainSettings
from zerovision.delivery.trained_model import read_run_config
from zerovision.launch.arguments import read_arguments
from zerovision.planning.choose import EFFORTS, Facts, Published, choose, has_head_first, of_head
from zerovision.planning.chosen_run import choose_run, describe, gather, with_head
from zerovision.training.base.errors import UserError
from zerovision.training.base.units import plural
from zerovision.training.config import FLAG_OF, TrainConfig
from zerovision.training.config.check import check_config
from zerovision.training.config.command_line import parse_args
from zerovision.training.config.file import read_preset
from zerovision.training.config.global_batch import check_division
from zerovision.training.data import DataOptions, load_data

PHOTOGRAPHS = Facts(images=3000, classes=10, rarest=200, commonest=400, side=400, has_val=True)
SMALL = dataclasses.replace(PHOTOGRAPHS, images=2000, side=32)
DIGITS = dataclasses.replace(SMALL, side=8, is_files=False)
FEW = dataclasses.replace(PHOTOGRAPHS, images=300, rarest=2, has_val=False)
RESNET = Published("timm:resnet18.a1_in1k", 224, "apache-2.0", "in the hub's cache")
TRAINED = dataclasses.replace(PHOTOGRAPHS, published=RESNET)
UNREACHABLE = dataclasses.replace(TRAINED, published=dataclasses.replace(RESNET, where="", is_there=False))
GPUS = {"ranks": 4, "has_gpus": True}


def values_of(facts: Facts, given: dict | None = None, effort: str = "minutes") -> dict:
    return {name: value for name, (value, _) in choose(facts, given or {}, effort).items()}


@pytest.mark.parametrize(
    ("facts", "effort", "expected"),
    [
        (PHOTOGRAPHS, "minutes", {"model_type": "airbench_small", "image_size": 64, "augmentation": "crop_flip"}),
        (PHOTOGRAPHS, "hours", {"model_type": "airbench", "image_size": 96, "batch_size": 64, "minutes": 240}),
        (SMALL, "minutes", {"model_type": "airbench_small", "image_size": 32, "augmentation": "shift_flip"}),
        (DIGITS, "minutes", {"model_type": "basic_cnn", "image_size": 8, "optimizer": "adamw"}),
        (FEW, "minutes", {"val_fraction": 0.2, "class_weights": "balanced", "batch_size": 32, "epochs": 200}),
        (TRAINED, "minutes", {"model_type": RESNET.network, "pretrained": True, "image_size": 224}),
        (TRAINED, "seconds", {"tune": "head", "features": "cached", "solver": "lbfgs", "augmentation": "none"}),
        (UNREACHABLE, "minutes", {"model_type": "airbench_small", "image_size": 64}),
        (dataclasses.replace(PHOTOGRAPHS, has_bf16=True), "minutes", {"precision": "bf16"}),
        (dataclasses.replace(TRAINED, **GPUS), "best", {"batch_size": "auto", "global_batch": 128}),
        (dataclasses.replace(PHOTOGRAPHS, **GPUS), "minutes", {"model_type": "timm:resnet18", "learning_rate": 0.028}),
        (dataclasses.replace(PHOTOGRAPHS, images=10**6, **GPUS), "minutes", {"global_batch": 256, "epochs": 3}),
    ],
)
def test_facts_decide(facts, effort, expected):
    found = values_of(facts, effort=effort)
    assert {name: found.get(name) for name in expected} == expected


@pytest.mark.parametrize(
    ("facts", "setting", "said"),
    [
        (UNREACHABLE, "model_type", f"{RESNET.network} has pretrained weights, which are not available here"),
        (TRAINED, "model_type", "in the hub's cache, license apache-2.0"),
        (FEW, "class_weights", "the rarest class has 2 images, the most common 400"),
        (FEW, "batch_size", "8 updates per epoch"),
        (PHOTOGRAPHS, "minutes", "--effort minutes"),
    ],
)
def test_the_reason_is_said(facts, setting, said):
    assert said in choose(facts, {}, "minutes")[setting][1]


@pytest.mark.parametrize("images", [20, 60, 300, 1000, 5000, 10**6])
@pytest.mark.parametrize("gpus", [0, 1, 8])
@pytest.mark.parametrize("effort", EFFORTS)
def test_an_epoch_has_several_updates_unless_the_ranks_have_eight_images_each(images, gpus, effort):
    facts = dataclasses.replace(PHOTOGRAPHS, images=images, ranks=max(gpus, 1), has_gpus=gpus > 0)
    found = values_of(facts, effort=effort)
    total = found.get("global_batch") or found["batch_size"]
    assert math.ceil(images / total) >= (20 if total > 32 else 4) or total == 8 * max(gpus, 1)
    assert found["epochs"] >= 3


@pytest.mark.parametrize("images", [16, 300, 10**5])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("has_gpus", [False, True])
@pytest.mark.parametrize("given", [{}, {"batch_size": 4}, {"batch_size": "auto"}, {"gradient_accumulation_steps": 4}])
def test_rate_and_epochs_are_those_of_the_images_per_update(images, ranks, has_gpus, given):
    facts = dataclasses.replace(PHOTOGRAPHS, images=images, ranks=ranks, has_gpus=has_gpus)
    choices = choose(facts, given, "minutes")
    config = check_config(TrainConfig(**{name: value for name, (value, _) in choices.items()} | given), FLAG_OF)
    check_division(config, ranks)
    total = config.global_batch or config.batch_size * config.gradient_accumulation_steps * ranks
    updates = math.ceil(images / total)
    assert choices["epochs"][1] == f"{updates * config.epochs} updates of {total} images"
    if config.batch_size != "auto" and "batch_size" not in given:
        assert choices["batch_size"][1] == plural(updates, "update") + " per epoch"
    whole = choose(dataclasses.replace(facts, ranks=1), {"batch_size": total}, "minutes")
    assert [choices[name] for name in ("epochs", "learning_rate")] == [whole["epochs"], whole["learning_rate"]]


@pytest.mark.parametrize(
    ("given", "gone", "kept"),
    [
        ({"model_type": "timm:resnet18"}, {"image_size", "lookahead"}, {"optimizer": "muon", "learning_rate": 0.02}),
        ({"model_type": "vgg"}, {"image_size", "lookahead"}, {"optimizer": "adamw"}),
        ({"model_type": "mobilenet"}, {"image_size"}, {"optimizer": "adamw", "learning_rate": 0.0015}),
        ({"optimizer": "sgd"}, {"optimizer", "learning_rate", "lookahead", "schedule"}, {"batch_size": 64}),
        ({"learning_rate": 0.1}, {"learning_rate"}, {"optimizer": "muon"}),
        ({"epochs": 5}, {"epochs", "minutes"}, {"batch_size": 64}),
        ({"batch_size": 16}, {"batch_size", "global_batch"}, {"learning_rate": 0.02}),
        ({"minutes": 20.0}, {"minutes"}, {"epochs": 171}),
    ],
)
def test_what_is_given_is_kept(given, gone, kept):
    found = values_of(PHOTOGRAPHS, given)
    assert not gone & found.keys()
    assert {name: found[name] for name in kept} == kept


@pytest.mark.parametrize(
    ("given", "gone"),
    [
        ({"fit": "pad"}, {"augmentation", "crop_scale"}),
        ({"fit": "squash"}, {"augmentation", "crop_scale"}),
        ({"decode": "exact"}, {"cache"}),
        ({"decode": "numbers"}, {"cache"}),
        ({"folds": 5}, {"val_fraction"}),
    ],
)
def test_what_another_setting_decides_is_not_chosen(given, gone):
    usual = values_of(FEW)
    assert gone <= usual.keys()
    assert values_of(FEW, given) == {name: value for name, value in usual.items() if name not in gone}


def test_the_updates_are_those_of_the_images_outside_the_fold():
    assert choose(FEW, {"folds": 2}, "minutes")["batch_size"][1] == "5 updates per epoch"  # 150 images, 32 at a time


def test_no_limit_is_no_limit_that_is_given():
    assert choose(PHOTOGRAPHS, {"minutes": 0.0}, "minutes")["epochs"] == choose(PHOTOGRAPHS, {}, "minutes")["epochs"]


@pytest.mark.parametrize("effort", EFFORTS)
@pytest.mark.parametrize("facts", [PHOTOGRAPHS, SMALL, DIGITS, FEW, TRAINED, UNREACHABLE])
@pytest.mark.parametrize("gpus", [0, 2])
def test_the_line_that_repeats_it_gives_the_same_configuration(facts, effort, gpus, tmp_path, monkeypatch):
    monkeypatch.delenv("ZEROVISION_COMMAND", raising=False)
    given = {"data": "my photos", "log_dir": str(tmp_path), "run_name": "photos"}
    facts = dataclasses.replace(facts, ranks=gpus or 1, has_gpus=gpus > 0)
    choices = choose(facts, given, effort)
    config = check_config(TrainConfig(**{name: value for name, (value, _) in choices.items()} | given), FLAG_OF)
    stages = [config]
    if has_head_first(facts, vars(config), given):
        head = TrainConfig(**of_head(vars(config)) | {"run_name": "photos-head"})
        stages = with_head(check_config(head, FLAG_OF), config)
    lines = "\n".join(describe(facts, choices, stages, gpus or 1)).partition("to repeat it: ")[2]
    assert lines.count("&&") == len(stages) - 1
    for stage, line in zip(stages, lines.replace("\\\n", "").split("&&"), strict=True):
        _bash, script, *words = shlex.split(line)
        arguments = read_arguments(Path(script).name, words, {})
        again, _ = parse_args(arguments.training)
        assert arguments.ranks_per_node == max(gpus, 1)
        names = {name for name in vars(again) if getattr(again, name) != getattr(stage, name)}
        assert names <= {"run_name", "weights"}


def test_published_weights_begin_with_the_head():
    found = values_of(TRAINED)
    assert has_head_first(TRAINED, found, {})
    assert not has_head_first(TRAINED, found, {"tune"})
    assert not has_head_first(dataclasses.replace(TRAINED, images=10**5), found, {})
    assert not has_head_first(PHOTOGRAPHS, values_of(PHOTOGRAPHS), {})


def make_photos(folder: Path, count: int = 20) -> Path:
    """Write JPEGs of three classes, and a broken one."""
    random = np.random.default_rng(0)
    for place, name in enumerate(("red", "green", "blue")):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            pixels = random.normal(80, 50, (120, 160, 3))
            pixels[..., place] += 100
            Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / name / f"{number}.jpg")
    (folder / "red" / "broken.jpg").write_text("no picture")
    return folder


def test_facts_of_a_folder(tmp_path):
    folder = make_photos(tmp_path / "photos")
    found = gather({"data": str(folder), "pretrained": False}, "minutes", 1, 0)
    expected = Facts(images=61, classes=3, rarest=20, commonest=21, side=120, has_bf16=found.has_bf16)
    assert found == expected


def test_the_side_of_numbers_is_that_of_their_array(tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        for number in range(3):
            np.save(tmp_path / name / f"{number}.npy", np.full((9, 12, 2), number, np.uint16))
        Image.new("I;16", (12, 30)).save(tmp_path / name / "grey.png")
    given = {"data": str(tmp_path), "decode": "numbers"}
    found = gather(given, "minutes", 1, 0)
    assert found.side == 9
    assert values_of(found, given)["image_size"] == 9


@pytest.mark.parametrize("side", [0, 400])
def test_images_of_unknown_size_are_photographs(side):
    found = values_of(dataclasses.replace(PHOTOGRAPHS, side=side))
    assert (found["image_size"], found["augmentation"]) == (64, "crop_flip")


@pytest.mark.parametrize(("side", "size"), [(1, 8), (7, 8), (8, 8), (30, 30), (64, 64)])
def test_an_image_size_is_chosen_that_is_allowed(side, size, tmp_path):
    for name in "ab":
        (tmp_path / name).mkdir()
        for number in range(3):
            Image.new("L", (70, side), 80 * number).save(tmp_path / name / f"{number}.png")
    chosen = choose(gather({"data": str(tmp_path), "pretrained": False}, "minutes", 1, 0), {}, "minutes")
    assert chosen["image_size"][0] == size
    assert ("own size" in chosen["image_size"][1]) == (side == size)
    load_data(DataOptions(data=str(tmp_path), image_size=size))


def test_facts_of_an_array():
    found = gather({"data": "digits"}, "minutes", 2, 2)
    assert (found.images, found.classes, found.side, found.is_files, found.has_val) == (1437, 10, 32, False, True)
    assert (found.ranks, found.has_gpus) == (2, True)


def test_ranks_that_share_the_model_read_the_same_images():
    assert gather({"data": "digits", "tensor_parallel": 2}, "minutes", 6, 0).ranks == 3
    with pytest.raises(UserError, match="1 rank cannot form groups of 2"):
        gather({"data": "digits", "tensor_parallel": 2}, "minutes", 1, 0)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--epochs", "3", "photos"], "'--epochs' comes before DATA"),
        (["photos", "--epoch", "3"], "unknown argument '--epoch'"),
        (["photos", "--max-restart", "3"], "Did you mean '--max-restarts'?"),
        (["photos", "--data", "digits"], "but DATA is 'photos'"),
        (["photos", "--effort", "minute"], "Did you mean 'minutes'?"),
    ],
)
def test_mistakes_are_one_line(words, said):
    with pytest.raises(UserError) as caught:
        TrainSettings.read(words)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.fixture
def given(tmp_path) -> dict:
    return {"data": "digits", "log_dir": str(tmp_path), "model_type": "vgg"}


def test_a_rate_that_is_not_chosen_is_the_networks_own(given):
    given |= {"optimizer": "adamw", "model_type": "mobilenet"}
    chosen = choose_run(given, "", (1, 0), FLAG_OF, is_launched=True)
    assert "learning_rate" not in chosen.choices
    assert chosen.config.learning_rate == chosen.config.default_rate != TrainConfig.learning_rate


def test_a_preset_and_a_setting_override_what_is_chosen(given):
    chosen = choose_run(given | {"preset": "cifar10", "epochs": 3}, "", (1, 0), FLAG_OF, is_launched=True)
    preset = read_preset("cifar10")
    assert not {*preset, "epochs", "minutes"} & {*chosen.choices}
    assert chosen.config.epochs == 3
    assert chosen.config.optimizer == preset["optimizer"]


def test_only_a_launcher_finds_a_strategy(given):
    given |= {"strategy": "auto"}
    assert choose_run(given, "", (2, 0), FLAG_OF, is_launched=True).config.strategy == "auto"
    with pytest.raises(UserError, match="--strategy auto is only for the launchers"):
        choose_run(given, "", (1, 0), FLAG_OF, is_launched=False)


@pytest.mark.parametrize(("ranks", "steps"), [(2, 1), (1, 4), (2, 4)])
def test_ranks_on_the_cpu_and_accumulation_divide_what_is_chosen(given, ranks, steps):
    given |= {"gradient_accumulation_steps": steps}
    chosen = choose_run(given, "", (ranks, 0), FLAG_OF, is_launched=True)
    total = chosen.config.batch_size * steps * ranks
    assert chosen.choices["batch_size"][1] == f"{math.ceil(1437 / total)} updates per epoch"
    assert chosen.choices["epochs"][1].endswith(f" updates of {total} images")


def test_two_runs_at_once_have_a_name_each(given):
    """Also before either has written anything."""
    runs = [choose_run(given, "", (1, 0), FLAG_OF, is_launched=True) for _ in range(2)]
    assert [one.config.run_name for one in runs] == ["digits", "digits-2"]
    assert runs[0].train(lambda _config: 2) == 2
    assert not runs[0].folder.path.exists(), "refused: nothing is left of it"


def test_a_resume_needs_the_name_of_a_run(given):
    with pytest.raises(UserError, match="resume auto continues a run: add --run-name"):
        choose_run(given | {"resume": "auto"}, "", (1, 0), FLAG_OF, is_launched=True)


def test_the_minutes_of_a_run_are_those_that_are_left(given):
    chosen = choose_run(given | {"minutes": 5.0}, "", (1, 0), FLAG_OF, is_launched=True)
    seen = []
    dataclasses.replace(chosen, began=time.time() - 120).train(lambda config: seen.append(config.minutes) or 0)
    assert 2.9 < seen[0] <= 3


def test_one_word_trains_a_folder_and_python_chooses_the_same(tmp_path, monkeypatch):
    folder = make_photos(tmp_path / "my photos")
    flags = ["--effort=seconds", "--minutes=1", "--epochs=3", "--report=false", f"--data-root={tmp_path}/cache"]
    command = [sys.executable, str(ROOT / "scripts" / "train.py"), str(folder), *flags]
    command += [f"--log-dir={tmp_path}/logs", "--pretrained=false", "--max-restarts=0"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    first = subprocess.run(command, capture_output=True, text=True, check=False, env=environment, cwd=tmp_path)
    assert first.returncode == 0, first.stderr
    run = tmp_path / "logs" / "runs" / "my-photos"
    config = json.loads((run / "config.json").read_text())
    assert 1 <= config["epochs"] <= 3
    assert config["minutes"] == 0  # which the epochs are of now
    said = first.stdout
    assert (run / "choice.txt").read_text() in said
    assert "1 unreadable image skipped" in said
    scores = json.loads((run / "evaluation" / "scores.json").read_text())
    worst = min(one["recall"] for one in scores["classes"])
    assert f"accuracy     {100 * scores['top1']:.2f} % of {scores['samples']} images held out" in said
    assert f": {100 * worst:.2f} % of its " in said
    line = next(line for line in said.splitlines() if "scripts/evaluate.py" in line).partition("python ")[2]
    script, *words = shlex.split(line, comments=True)
    assert f"{words[0]} PHOTO  # a new photo, or a folder" in said
    assert f"{words[0]} --format onnx --with-preprocessing\n" in said
    assert script == "scripts/evaluate.py"
    monkeypatch.chdir(tmp_path)
    assert call("evaluate", *words, "--output", tmp_path / "scores")[0] == 0
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    settings = {"minutes": 1, "epochs": 3, "report": False, "data_root": tmp_path / "cache", "pretrained": False}
    result = zerovision.train(folder, effort="seconds", log_dir=tmp_path / "logs", **settings)
    assert result.folder.name == "my-photos-2"
    lines = [(one / "choice.txt").read_text().replace("my-photos-2", "my-photos") for one in (run, result.folder)]
    assert lines[0] == lines[1]
    assert all(reason in lines[1] for _value, reason in result.choices.values())
    other = {"epochs": 0, "run_name": "", "minutes": 0}  # the first is by the speed
    assert vars(result.config) | other == vars(read_run_config(run)) | other
    assert result.choices["batch_size"][0] == result.config.batch_size
    assert all(html.escape(reason) in result._repr_html_() for _value, reason in result.choices.values())
    taken = {"data": str(folder), "run_name": "my-photos", "log_dir": str(tmp_path / "logs"), "pretrained": False}
    with pytest.raises(UserError, match="already contains a run"):  # before a line of what was chosen
        choose_run(taken, "seconds", (1, 0), FLAG_OF, is_launched=True)
