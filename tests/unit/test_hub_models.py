"""`timm:hf-hub:ORG/NAME` from its local cache, and two layers of ours: whitened, and a product over its whole input."""

from __future__ import annotations

import dataclasses
import json
import shutil

import pytest
import timm
import torch
from huggingface_hub import constants
from PIL import Image
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from tests.kit import assert_same_but_rounding, new_model
from zerovision.models.dry_run import without_data
from zerovision.models.preparation import starting_preparations
from zerovision.models.timm_models import WholeInputConv2d, create
from zerovision.models.weights_metadata import Description
from zerovision.training.base.errors import UserError
from zerovision.training.base.files import write_json
from zerovision.training.base.run_folder import CONFIG, LAST
from zerovision.training.config.command_line import parse_args
from zerovision.training.data import DataOptions, load_data
from zerovision.training.observe.new_run import run_folder
from zerovision.training.recipe.tuning import EPSILON, whiten_stem, whitening_filters

FACTS = {
    "architecture": "test_resnet",
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
        save_file(timm.create_model("test_resnet", num_classes=7).state_dict(), snapshot / "model.safetensors")
    return folder / "snapshots" / ("a" * 40)


@pytest.mark.parametrize("more", [[], ["--pretrained"]])
def test_a_repository_gives_network_weights_and_normalization(repository, more):
    config, _ = parse_args(["--model-type", "timm:hf-hub:team/net", *more])
    assert (config.model_type, config.weights) == ("timm:test_resnet", str(repository / "model.safetensors"))
    (found,) = starting_preparations(config.model_type, [], pretrained=config.pretrained, weights=config.weights)
    assert (found.mean, found.std) == ((0.1, 0.2, 0.3), (0.4, 0.5, 0.6))
    torch.manual_seed(len("main"))
    published = timm.create_model("test_resnet", num_classes=7).state_dict()
    built = new_model(config.model_type, num_classes=5, weights=config.weights, image_size=224).module.state_dict()
    assert {name for name in published if not torch.equal(built[name], published[name])} == {"fc.weight", "fc.bias"}


def test_a_revision_and_other_weights_may_be_given(repository):
    config, _ = parse_args(["--model-type", "timm:hf-hub:team/net@v2"])
    assert config.weights == str(repository.with_name("b" * 40) / "model.safetensors")
    config, _ = parse_args(["--model-type", "timm:hf-hub:team/net", "--weights", "mine.safetensors"])
    assert config.weights == "mine.safetensors"


@pytest.mark.parametrize(
    ("facts", "line"),
    [
        ({"model_type": "vit"}, "names no timm network"),
        ([1], "names no timm network"),
        (FACTS | {"architecture": 7}, "names no timm network"),
        (FACTS | {"model_args": {"global_pool": "max"}}, "takes model_args"),
        (FACTS | {"architecture": "nonsense"}, "names no timm network"),
        (None, "its config.json could not be read: https://huggingface.co cannot be reached, and the local cache"),
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
    assert (config.model_type, config.weights, config.pretrained) == ("timm:test_resnet", "", False)


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


def test_features_without_a_classifier_get_one(repository):
    save_file(timm.create_model("test_resnet", num_classes=0).state_dict(), repository / "model.safetensors")
    config, _ = parse_args(["--model-type", "timm:hf-hub:team/net"])
    built = new_model(config.model_type, num_classes=5, weights=config.weights, image_size=224)
    assert "head added: the file has none, so it starts from random weights" in built.notes


SIZE = (3, 3)


def smooth_images(count: int = 40) -> torch.Tensor:
    """Images whose neighbouring pixels are alike, as photographs' are: float32 [count, 3, 12, 12]."""
    noise = torch.randn(count, 3, 14, 14, generator=torch.Generator().manual_seed(0))
    return functional.avg_pool2d(noise, 3, stride=1) * 2


def filters_of_the_paper(images: torch.Tensor) -> torch.Tensor:
    """As `get_patches` and `get_whitening_parameters` of cifar10-airbench, whose patches are [n, 3, h, w]."""
    patches = images.unfold(2, 3, 1).unfold(3, 3, 1).permute(0, 2, 3, 1, 4, 5).reshape(-1, 27)
    values, vectors = torch.linalg.eigh((patches.T @ patches / len(patches)).double())
    return (vectors.T.flip(0) / torch.sqrt(values.flip(0) + EPSILON).view(-1, 1)).float()


def test_filters_are_the_papers_and_whiten():
    images = smooth_images()
    filters = whitening_filters(images, SIZE)
    expected = filters_of_the_paper(images)
    signs = (filters * expected).sum(1).sign()  # of an eigenvector, either
    torch.testing.assert_close(filters * signs[:, None], expected, rtol=1e-2, atol=1e-3)
    outputs = functional.conv2d(images, filters.view(27, 3, 3, 3)).transpose(0, 1).flatten(1)
    covariance = outputs @ outputs.T / outputs.shape[1]
    torch.testing.assert_close(covariance[:9, :9], torch.eye(9), atol=0.02, rtol=0)
    raw = functional.unfold(images, SIZE).transpose(0, 1).flatten(1)
    assert (raw @ raw.T / raw.shape[1]).diag().max() > 0.1


@pytest.fixture(scope="module")
def digits():
    return load_data(DataOptions())


def test_the_stem_is_frozen_with_filters_of_a_fixed_sample_on_the_rank_that_computes_them(digits):
    stems = []
    for computes in (True, True, False):
        torch.manual_seed(0)
        built = new_model("basic_cnn", num_classes=10, image_size=32)
        before = [parameter.clone() for parameter in built.module.parameters()]
        whiten_stem(built, digits, computes=computes)
        stem, *others = built.module.parameters()
        assert not stem.requires_grad
        assert all(parameter.requires_grad for parameter in others)
        assert all(torch.equal(now, then) for now, then in zip(others, before[1:], strict=True))
        assert torch.equal(stem, before[0]) != computes
        stems.append(stem)
    assert torch.equal(stems[0], stems[1])
    images = torch.stack([digits.val[0, index][0] for index in range(100)])
    outputs = functional.conv2d(images, stems[0])
    assert torch.equal(stems[0][:16], -stems[0][16:])
    deviations = outputs[:, :8].transpose(0, 1).flatten(1).square().mean(1).sqrt()
    torch.testing.assert_close(deviations, torch.ones(8), atol=0.25, rtol=0)


def test_without_a_readable_image_for_the_stem_the_run_ends_as_with_any_model(tmp_path, monkeypatch):
    for path in (
        tmp_path / part / name / f"{number}.png" for part in ("train", "val") for name in "ab" for number in (0, 1)
    ):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("<html>404</html>")

    def whiten(bad_images):
        data = load_data(DataOptions(str(tmp_path), image_size=16, bad_images=bad_images))
        built = new_model("basic_cnn", num_classes=2, image_size=16)
        before = built.module.blocks[0][0].weight.clone()
        whiten_stem(built, data, computes=True)
        return not torch.equal(built.module.blocks[0][0].weight, before)

    for bad_images, told in (
        ("error", r"cannot use image .*train/a/0.png': .* Repair or remove it, or add --bad-images skip\."),
        ("skip:0.5", "more than 2 of 4 images cannot be used, which is the limit of --bad-images"),
    ):
        with pytest.raises(UserError, match=told):
            whiten(bad_images)
    monkeypatch.setattr("zerovision.training.recipe.tuning.MOST_IMAGES", 1)  # an unreadable one
    Image.new("RGB", (16, 16), "red").save(tmp_path / "train/a/1.png")
    assert whiten("skip:0.5")


KERNEL_SIZE, CHANNELS = 3, 4
SIZES = pytest.mark.parametrize("size", [KERNEL_SIZE, KERNEL_SIZE + 2], ids=["its-whole-input", "larger-input"])


class Operators(TorchDispatchMode):
    """Collects the names of the operators that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.names.append(function._overloadpacket.__name__)
        return function(*args, **(kwargs or {}))


def products_and_convolutions(network: nn.Module, size: int, channels: int = 3) -> tuple[int, int]:
    with Operators() as found, torch.no_grad():
        without_data(network)(torch.empty(2, channels, size, size, device="meta"))
    return sum(name in ("mm", "addmm") for name in found.names), found.names.count("convolution")


def numbers_of(layer: nn.Module, images: torch.Tensor) -> list[torch.Tensor]:
    images = images.clone().requires_grad_()
    outputs = layer(images)
    outputs.square().sum().backward()
    return [outputs, images.grad, *(parameter.grad for parameter in layer.parameters())]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@SIZES
def test_outputs_and_gradients_are_those_of_a_convolution(layout, size):
    torch.manual_seed(0)
    plain, ours = nn.Conv2d(CHANNELS, 6, KERNEL_SIZE), WholeInputConv2d(CHANNELS, 6, KERNEL_SIZE)
    ours.load_state_dict(plain.state_dict())
    images = torch.randn(2, CHANNELS, size, size)
    found = numbers_of(ours.to(memory_format=layout), images.to(memory_format=layout))
    for ours_of, expected in zip(found, numbers_of(plain, images), strict=True):
        assert_same_but_rounding(ours_of, expected)
    assert products_and_convolutions(ours, size, CHANNELS) == ((1, 0) if size == KERNEL_SIZE else (0, 1))


@pytest.mark.parametrize(("image_size", "products"), [(32, 3), (224, 3), (256, 1)])
def test_the_products_of_vgg(image_size, products):
    """Its whole classifier; on 256 pixels the first two layers see 8 x 8 and 2 x 2 pixels."""
    with torch.device("meta"):
        network = create(Description("timm:vgg16_bn", "vgg16_bn", 10, image_size))
    assert products_and_convolutions(network, image_size)[0] == products
