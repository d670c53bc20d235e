"""Images are prepared as for the weights that a run starts from, unless a flag or a line says otherwise."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest
import timm
from PIL import Image
from safetensors.torch import save_file
from timm.data import create_transform, resolve_data_config
from torchvision.transforms.v2.functional import pil_to_tensor

from tests.kit import new_model, save_built
from zerovision.models.preparation import Preparation, crop_share, differences
from zerovision.models.weights_metadata import Preprocessing
from zerovision.training.base.progress import Progress
from zerovision.training.checkpoint.manifest import Manifest
from zerovision.training.checkpoint.store import FoundCheckpoint
from zerovision.training.config import TrainConfig
from zerovision.training.data import DataOptions, data_options, load_data
from zerovision.training.data.augment import evaluation_geometry
from zerovision.training.resume import GLOBAL_BATCH, NORMALIZATION, keep_preparation, preparation_of, resumed

SQUASHED = "timm:convnext_base.fb_in22k_ft_in1k_384"
PUBLISHED = ["timm:test_vit.r160_in1k", "timm:resnet18", "timm:vgg16", "timm:vit_tiny_patch16_384", SQUASHED]


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    folder, draws = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for name in ("a", "b"):
        (folder / name).mkdir()
        for number in range(3):
            pixels = draws.integers(0, 256, (9, 12, 3), dtype=np.uint8)
            Image.fromarray(pixels).resize((420, 300)).save(folder / name / f"{number}.png")
    return folder


def config_of(photos, **settings) -> TrainConfig:
    return TrainConfig(data=str(photos), cache="off", **settings)


NOTES = {
    "timm:test_vit.r160_in1k": "of 160 pixels, here of 224 (--image-size)",
    "timm:vit_tiny_patch16_384": "of 384 pixels, here of 224 (--image-size)",
    SQUASHED: "fitted by squash, here by crop (--fit), of 384 pixels, here of 224 (--image-size)",
}


@pytest.mark.parametrize("model_type", PUBLISHED)
def test_published_weights_bring_what_timm_says_of_them(photos, model_type):
    facts = timm.get_pretrained_cfg(model_type.removeprefix("timm:")).to_dict()
    published = resolve_data_config({}, pretrained_cfg=facts)
    config = config_of(photos, model_type=model_type, pretrained=True)
    plain = load_data(data_options(dataclasses.replace(config, pretrained=False)))
    assert (plain.preprocessing.interpolation, plain.preprocessing.resize_size) == ("bilinear", 256)
    assert plain.notes == []
    data = load_data(data_options(config))
    found = data.preprocessing
    assert (found.mean, found.std) == (published["mean"], published["std"])
    assert found.interpolation == published["interpolation"]
    note = f"the starting weights were trained on images {NOTES.get(model_type)}"
    assert data.notes == [note] * (model_type in NOTES)
    chosen = dataclasses.replace(config, image_size=published["input_size"][-1], fit="crop")
    assert load_data(data_options(chosen)).notes == []
    if model_type == SQUASHED:
        return
    assert found.resize_size == int(224 / published["crop_pct"])
    with Image.open(photos / "a" / "0.png") as image:
        theirs = create_transform(**published | {"input_size": (3, 224, 224)}, normalize=False)(image)
        ours = evaluation_geometry(found)(pil_to_tensor(image))
    assert (theirs.int() - ours.int()).abs().max() <= 2, "Pillow rounds otherwise"


@pytest.mark.parametrize(("flag", "value"), [("interpolation", "bilinear"), ("eval_crop", 0.875), ("eval_crop", 0.9)])
def test_a_flag_goes_before_the_weights(photos, flag, value):
    options = data_options(config_of(photos, model_type="timm:resnet18", pretrained=True, **{flag: value}))
    expected = {"interpolation": "bicubic", "eval_crop": 0.95} | {flag: value}
    assert {name: getattr(options, name) for name in expected} == expected
    assert load_data(options).notes == []


def test_a_file_says_itself_how_its_images_were_prepared(photos, tmp_path):
    """One of our runs, one of the hub's, and one that says nothing: as timm says of the network."""
    settings = {"image_size": 64, "interpolation": "bicubic", "eval_crop": 0.8, "mean": (0.1,) * 3, "std": (0.7,) * 3}
    first = load_data(DataOptions(data=str(photos), **settings))
    built = new_model("basic_cnn", num_classes=2, image_size=64)
    own, hub, bare = tmp_path / "own.safetensors", tmp_path / "hub" / "model.safetensors", tmp_path / "bare.safetensors"
    save_built(own, built, class_names=["a", "b"], preprocessing=first.preprocessing)
    hub.parent.mkdir()
    for file in (hub, bare):
        save_file(built.module.state_dict(), file)
    published = {"mean": [0.2] * 3, "std": [0.3] * 3, "interpolation": "bilinear", "crop_pct": 0.9}
    (hub.parent / "config.json").write_text(json.dumps({"pretrained_cfg": published}))
    wanted = {own: ("bicubic", 80), hub: ("bilinear", 71), bare: ("bicubic", 67)}
    for file, (interpolation, resize_size) in wanted.items():
        data = load_data(data_options(config_of(photos, model_type="timm:resnet18", weights=str(file), image_size=64)))
        found = data.preprocessing
        assert (found.interpolation, found.resize_size) == (interpolation, resize_size), file.name
        assert data.notes == []
    assert found.mean == (0.485, 0.456, 0.406)
    data = load_data(data_options(config_of(photos, model_type="basic_cnn", weights=str(own))))
    assert data.notes == ["the starting weights were trained on images of 64 pixels, here of 224 (--image-size)"]
    assert preparation_of(data)["mean"] == (0.1,) * 3


def test_arrays_keep_their_size_and_take_the_filter():
    data = load_data(data_options(TrainConfig(model_type="mobilenet_finetuned")))
    assert (data.preprocessing.interpolation, data.preprocessing.resize_size) == ("bicubic", None)
    assert data.notes == []


def test_members_that_were_made_in_different_ways_are_told():
    members = "timm:resnet18,timm:vgg16"
    config = TrainConfig(model_type="ensemble", ensemble_members=members, pretrained=True)
    assert data_options(config).interpolation == "bilinear"
    assert load_data(data_options(config)).notes == [
        "the starting weights were trained on images resized by bicubic, here by bilinear (--interpolation)"
    ]


@pytest.mark.parametrize("crop", [0.5, 0.7, 0.875, 0.9, 0.95, 0.965, 0.99, 1.0])
def test_the_share_of_a_crop_gives_the_size_that_it_came_from(crop):
    for side in range(16, 700):
        resized = int(side / crop)
        assert int(side / crop_share(side, resized)) == resized


def test_a_resumed_run_keeps_what_its_weights_brought(photos, tmp_path):
    """Also without them."""
    config = config_of(photos, model_type="timm:resnet18", pretrained=True)
    first = load_data(data_options(config))
    later = dataclasses.replace(config, pretrained=False)
    identity = {NORMALIZATION: json.loads(json.dumps(preparation_of(first))), GLOBAL_BATCH: 16}
    manifest = Manifest(Progress(), identity, {}, 0, None, {}, ())
    kept = resumed(FoundCheckpoint(tmp_path, manifest), later).preparation
    assert keep_preparation(later, load_data(data_options(later)), kept).preprocessing == first.preprocessing


def test_differences_are_told_with_their_flags():
    photograph = Preparation((0.5,) * 3, (0.5,) * 3, "bicubic", "crop", 0.95, 288)
    here = Preparation.of_run(Preprocessing(224, 256, mean=(0.4,) * 3, std=(0.2,) * 3))
    assert differences(photograph, here, of_arrays=False) == (
        "resized by bicubic, here by bilinear (--interpolation), cut to 0.95 of the shorter side, here to 0.875 "
        "(--eval-crop), of 288 pixels, here of 224 (--image-size)"
    )
    assert differences(photograph, here, of_arrays=True) == "resized by bicubic, here by bilinear (--interpolation)"
    assert differences(here, here, of_arrays=False) == ""
