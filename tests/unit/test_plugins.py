"""A user's own files: what they may add is known where it is checked, and they are loaded when they are named alone."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from exports import lines_of

import zerovision
from zerovision.delivery.settings import ExportSettings, PredictSettings
from zerovision.training.base import plugins
from zerovision.training.base.errors import UserError
from zerovision.training.base.plugins import load_plugins, require_plugins
from zerovision.training.config import FLAG_OF
from zerovision.training.config.check import check_config
from zerovision.training.config.command_line import parse_args
from zerovision.training.data import DataOptions, load_data
from zerovision.training.data.reader import _Readers
from zerovision.training.observe.environment import software
from zerovision.training.tasks.labels import build_loss

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
EVERYTHING = """
from zerovision import *
import torch

class Shrunk(torch.optim.SGD):
    pass

from timm.optim import OptimInfo
from timm.optim._optim_factory import default_registry
default_registry.register(OptimInfo(name="shrunk", opt_class=Shrunk, description="mine", has_momentum=True))
ELEMENT_WISE.append("shrunk")
MODELS["mine"] = ModelSpec("mine", timm_name="resnet18")
DATASETS["mine"] = DatasetEntry("mine", "mine", __name__)
SCHEDULES["halved"] = SCHEDULES["constant"]
LOGGERS["mine"] = lambda *of_run: RunLogger()
FORMATS["mine"] = FORMATS["safetensors"]

def dark(image, generator):
    return image // 2

AUGMENTATIONS["dark"] = Augmentation(function=dark)

def load(options):
    from dataclasses import replace
    from zerovision.training.data.arrays import load
    return load(replace(options, data="fake"))

class Words(torch.utils.data.Dataset):
    def __len__(self):
        return 1
    def __getitem__(self, index):
        return torch.full((1,), 7)
"""
pytestmark = pytest.mark.usefixtures("no_plugins_stay")


@pytest.fixture
def everything(tmp_path) -> Path:
    file = tmp_path / "my own.py"
    file.write_text(EVERYTHING)
    return file


@pytest.mark.parametrize(
    "flags",
    ["--model-type mine", "--augmentation dark", "--optimizer shrunk", "--schedule halved", "--loggers none,mine"],
)
def test_names_of_a_file_are_known_when_they_are_checked(flags, everything):
    with pytest.raises(UserError, match=r"unknown|expected"):
        parse_args(flags.split())
    config, _ = parse_args([*flags.split(), "--plugin", str(everything)])
    assert config.plugin == f"{everything}@{software(config.plugin)[str(everything)][:16]}"
    assert check_config(config, FLAG_OF) == config


def test_several_files_are_named_by_flags_or_in_yaml(everything, tmp_path):
    example = EXAMPLES / "own_logger.py"
    flags = ["--plugin", str(everything), f"--plugin={example}", "--model-type", "mine", "--loggers", "csv"]
    config, _ = parse_args(flags)
    file = tmp_path / "run.yaml"
    file.write_text(f"plugin: {everything},{example}\nmodel-type: mine\nloggers: csv\n")
    assert parse_args(["--config", str(file)])[0] == config


def test_other_commands_load_files_before_their_flags_are_checked(everything):
    with pytest.raises(UserError, match="expected safetensors"):
        ExportSettings.read(["run", "--format", "mine"])
    words = ["run", "--format", "mine", "--plugin", str(everything)]
    assert ExportSettings.read(words).format == "mine"
    assert PredictSettings(model="run", images=["a.png"], plugin=str(everything)).plugin


def test_data_and_augmentation_of_a_file_give_images(everything):
    load_plugins(str(everything))
    plain, dark = (
        load_data(DataOptions(data="mine", augmentation=name, mean=(0,) * 3, std=(1,) * 3)) for name in ("none", "dark")
    )
    expected = (plain.train[0, 3][0] * 255).round() // 2
    assert torch.equal((dark.train[0, 3][0] * 255).round(), expected)


def test_workers_load_the_files_before_what_they_are_sent(everything):
    load_plugins(str(everything))
    (name,) = plugins._LOADED
    sent = pickle.dumps(_Readers([sys.modules[name].Words()]))
    del plugins._LOADED[name], sys.modules[name]  # as in a process that begins
    assert pickle.loads(sent)._datasets[0][0].item() == 7


def test_a_file_that_cannot_be_used_is_one_line(tmp_path):
    for content, said in (("1 +", "SyntaxError"), ("\nimport no_such", "line 2: ModuleNotFoundError: No module")):
        (tmp_path / "wrong.py").write_text(content)
        with pytest.raises(UserError, match=said) as caught:
            load_plugins(str(tmp_path / "wrong.py"))
        assert "\n" not in str(caught.value)
    with pytest.raises(UserError, match="No such file"):
        load_plugins(str(tmp_path / "none.py"))


def test_a_file_with_its_hash_is_that_file(everything):
    pinned = load_plugins(str(everything))
    assert load_plugins(pinned) == pinned
    everything.write_text(EVERYTHING + "# changed\n")
    with pytest.raises(UserError, match="the file has changed: its sha256 begins with"):
        load_plugins(pinned)
    assert load_plugins(str(everything)) != pinned
    assert software(pinned)[str(everything)] != pinned.rpartition("@")[2]


def test_what_was_made_with_a_file_asks_for_it(everything):
    needed = [f"{everything.name}@{'0' * 16}"]
    with pytest.raises(UserError, match=r"run 'a' was made with --plugin 'my own.py', .* add --plugin FILE"):
        require_plugins("run 'a'", needed)
    pinned = load_plugins(str(everything))
    assert require_plugins("run 'a'", needed) == [Path(pinned).name]
    assert require_plugins("run 'a'", plugins.names_of(pinned)) == []


def test_a_wrong_function_is_told(tmp_path):
    file = tmp_path / "wrong.py"
    file.write_text(
        "from zerovision import *\ndef cut(image, generator):\n    return image[:, 1:]\n"
        "AUGMENTATIONS['cut'] = Augmentation(function=cut)\n"
    )
    load_plugins(str(file))
    data = load_data(DataOptions(data="fake", augmentation="cut"))
    with pytest.raises(
        UserError, match=r"the augmentation cut made torch.uint8 \[3, 31, 32\] of torch.uint8 \[3, 32, 32\]"
    ):
        data.train[0, 0]
    file.write_text("from zerovision import *\nAugmentation(function=lambda image, generator: image)\n")
    with pytest.raises(UserError, match="`def` at the top of a file"):
        load_plugins(str(file))


def test_the_lines_for_albumentations_draw_from_the_generator_of_the_image(tmp_path):
    pytest.importorskip("albumentations")
    (tmp_path / "varied.py").write_text(lines_of("albumentations"))
    load_plugins(str(tmp_path / "varied.py"))
    vary = zerovision.AUGMENTATIONS["varied"].function
    image = torch.randint(0, 256, (3, 20, 30), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    first, again = ([vary(image.clone(), np.random.default_rng(seed)) for seed in range(8)] for _ in range(2))
    assert {(one.shape, one.dtype) for one in first} == {(image.shape, image.dtype)}
    assert all(map(torch.equal, first, again))
    assert len({one.sum() for one in first}) > 2


def test_the_example_of_a_loss_is_torchvisions_focal_loss():
    from types import SimpleNamespace

    from torchvision.ops import sigmoid_focal_loss

    config, _ = parse_args(["--plugin", str(EXAMPLES / "own_loss.py"), "--loss", "focal", "--label-smoothing", "0"])
    of_first = torch.linspace(-4, 4, 9)
    logits, labels = torch.stack([of_first, torch.zeros(9)], 1), torch.arange(9) % 2
    batch = SimpleNamespace(labels=labels, targets=None, loss_weights=None)
    found = build_loss(config, ["a", "b"], [1, 1], torch.device("cpu"))(logits, batch)
    # Of two classes, the softmax is the sigmoid of the difference.
    torch.testing.assert_close(found, sigmoid_focal_loss(of_first, 1.0 - labels, alpha=-1, gamma=2))
    mixed = SimpleNamespace(labels=labels, targets=torch.nn.functional.one_hot(labels).float(), loss_weights=None)
    torch.testing.assert_close(build_loss(config, ["a", "b"], [1, 1], torch.device("cpu"))(logits, mixed), found)
    with pytest.raises(UserError, match="--loss focal cannot be combined with --learning-rate auto"):
        parse_args([*["--loss", "focal", "--learning-rate", "auto", "--plugin"], str(EXAMPLES / "own_loss.py")])
