"""`timm:hf-hub:ORG/NAME`: a network of the hub, from its local cache."""

import dataclasses
import json
import shutil

import pytest
import timm
import torch
from huggingface_hub import constants
from safetensors.torch import save_file

from zerovision.models.build import build_model
from zerovision.models.preparation import starting_preparations
from zerovision.training.base.atomic_write import write_json
from zerovision.training.base.errors import UserError
from zerovision.training.base.run_folder import CONFIG, LAST
from zerovision.training.config.command_line import parse_args
from zerovision.training.observe.new_run import run_folder

FACTS = {
    "architecture": "resnet10t",
    "num_classes": 7,
    "pretrained_cfg": {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6], "input_size": [3, 64, 64]},
}


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """The hub's cache with one repository, and no hub."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    folder = tmp_path / "models--team--net"
    for revision, name in (("a" * 40, "main"), ("b" * 40, "v2")):
        snapshot = folder / "snapshots" / revision
        snapshot.mkdir(parents=True)
        (folder / "refs").mkdir(exist_ok=True)
        (folder / "refs" / name).write_text(revision)
        (snapshot / "config.json").write_text(json.dumps(FACTS))
        torch.manual_seed(len(name))
        save_file(timm.create_model("resnet10t", num_classes=7).state_dict(), snapshot / "model.safetensors")
    return folder / "snapshots" / ("a" * 40)


@pytest.mark.parametrize("more", [[], ["--pretrained"]])
def test_a_repository_gives_network_weights_and_normalization(repository, more):
    config, _ = parse_args(["--model-type", "timm:hf-hub:team/net", *more])
    assert (config.model_type, config.weights) == ("timm:resnet10t", str(repository / "model.safetensors"))
    (found,) = starting_preparations(config.model_type, [], pretrained=config.pretrained, weights=config.weights)
    assert (found.mean, found.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    torch.manual_seed(len("main"))
    published = timm.create_model("resnet10t", num_classes=7).state_dict()
    built = build_model(config.model_type, num_classes=5, weights=config.weights, image_size=224).module.state_dict()
    assert {name for name in published if not torch.equal(built[name], published[name])} == {"fc.weight", "fc.bias"}


def test_a_revision_and_other_weights_may_be_given(repository):
    config, _ = parse_args(["--model-type", "timm:hf-hub:team/net@v2"])
    assert config.weights == str(repository.with_name("b" * 40) / "model.safetensors")
    config, _ = parse_args(["--model-type", "timm:hf-hub:team/net", "--weights", "mine.safetensors"])
    assert config.weights == "mine.safetensors"


@pytest.mark.parametrize(
    ("facts", "line"),
    [
        ({"model_type": "vit"}, "names no network of timm's"),
        ([1], "names no network of timm's"),
        (FACTS | {"architecture": 7}, "names no network of timm's"),
        (FACTS | {"model_args": {"global_pool": "max"}}, "takes model_args"),
        (FACTS | {"architecture": "nonsense"}, "names no network of timm's"),
        (None, "its config.json could not be read: https://huggingface.co cannot be reached, and its local cache"),
    ],
)
def test_what_is_not_of_timms_form_is_one_line(repository, facts, line):
    path = repository / "config.json"
    path.unlink() if facts is None else path.write_text(json.dumps(facts))
    with pytest.raises(UserError, match=line) as refused:
        parse_args(["--model-type", "timm:hf-hub:team/net"])
    assert "\n" not in str(refused.value)


def test_pickles_are_not_read(repository):
    (repository / "model.safetensors").rename(repository / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"its model\.safetensors could not be read"):
        parse_args(["--model-type", "timm:hf-hub:team/net"])
    config, _ = parse_args(["--model-type", "timm:hf-hub:team/net", "--weights", "mine.safetensors"])
    assert config.weights == "mine.safetensors"


def test_its_weights_may_be_left_out(repository):
    (repository / "model.safetensors").unlink()
    config, _ = parse_args(["--model-type", "timm:hf-hub:team/net", "--pretrained", "false"])
    assert (config.model_type, config.weights, config.pretrained) == ("timm:resnet10t", "", False)


def test_a_run_goes_on_without_the_cache(repository, tmp_path):
    line = ["--model-type", "timm:hf-hub:team/net", "--run-name", "r", "--log-dir", str(tmp_path), "--resume", "auto"]
    config, _ = parse_args(line)
    folder = run_folder(config)
    folder.checkpoints.mkdir(parents=True)
    write_json(folder.path / CONFIG, dataclasses.asdict(config))
    shutil.rmtree(repository.parents[1])
    with pytest.raises(UserError, match="could not be read"):
        parse_args(line)
    (folder.checkpoints / LAST).touch()
    assert parse_args(line)[0] == config
    with pytest.raises(UserError, match="could not be read"):
        parse_args(["--model-type", "timm:hf-hub:team/other", *line[2:]])


@pytest.mark.parametrize("name", ["hf-hub:team/net", "timm:hf_hub:team/net", "HF-Hub:team/net", "hf_hub:team/net"])
def test_a_misspelt_prefix_gets_the_right_one(name):
    with pytest.raises(
        UserError, match=f"^model '{name}': a network of the Hugging Face hub is timm:hf-hub:team/net\\.$"
    ):
        parse_args(["--model-type", name])


def test_features_without_a_classifier_get_one(repository):
    save_file(timm.create_model("resnet10t", num_classes=0).state_dict(), repository / "model.safetensors")
    config, _ = parse_args(["--model-type", "timm:hf-hub:team/net"])
    built = build_model(config.model_type, num_classes=5, weights=config.weights, image_size=224)
    assert "head added: the file has none, it starts from random weights" in built.notes


@pytest.mark.parametrize("name", ["", "net", "a/b/c", "team/net?"])
def test_a_name_of_another_form_is_one_line(name):
    with pytest.raises(UserError, match="expected timm:hf-hub:ORG/NAME"):
        parse_args(["--model-type", f"timm:hf-hub:{name}"])
