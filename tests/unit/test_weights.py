"""The delivered file: plain PyTorch and timm load it, metadata says what it is, a crash leaves the old one."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from crafted_weights import craft_metadata, peak_bytes
from PIL import Image
from safetensors.torch import load_file, save_file

import zerovision.training.checkpoint.weights
from tests.kit import new_model, save_built
from zerovision.models.build import rebuild_model, tensor_mismatch
from zerovision.models.weights_metadata import Description, Preprocessing
from zerovision.training.base.errors import UserError
from zerovision.training.checkpoint.weights import load_model, preprocess, read_metadata, save_weights
from zerovision.training.data.augment import evaluation_transform

CLASS_NAMES = ["null", "eins", "zwei", "drei", "四"]
DESCRIPTION = Description("basic_cnn", None, num_classes=5, image_size=32)
PREPROCESSING = Preprocessing(32, 36, mean=(0.5, 0.4, 0.3), std=(0.2, 0.25, 0.5))


def save_state(path: Path, state: dict[str, torch.Tensor], **changes):
    facts = {"description": DESCRIPTION, "class_names": CLASS_NAMES, "preprocessing": PREPROCESSING}
    save_weights(path, state, **facts | changes)


def save(path: Path, model_type: str = "basic_cnn", **changes):
    torch.manual_seed(0)
    built = new_model(model_type, num_classes=5, image_size=32, ensemble_members="basic_cnn,cnn_lstm")
    facts = {"description": built.description, "extra": {"epoch": 3, "top1": 0.5}}
    save_state(path, built.module.state_dict(), **facts | changes)
    return built


@pytest.mark.parametrize("model_type", ["basic_cnn", "mobilenet", "cnn_lstm", "ensemble", "timm:vit_tiny_patch16_224"])
def test_a_saved_model_loads_and_answers_the_same(tmp_path, model_type):
    built = save(tmp_path / "model.safetensors", model_type)
    loaded, metadata = load_model(tmp_path / "model.safetensors")
    images = torch.randn(3, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(loaded(images), built.module.eval()(images))
    assert not loaded.training
    assert metadata == {
        "description": built.description,
        "class_names": CLASS_NAMES,
        "preprocessing": PREPROCESSING,
        "extra": {"epoch": 3, "top1": 0.5},
    }


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused_by_name(tmp_path, value):
    torch.manual_seed(0)
    path = tmp_path / "model.safetensors"
    built = new_model("basic_cnn", num_classes=5, image_size=32)
    state = built.module.state_dict()
    name = next(name for name in state if name.endswith("running_var"))  # no output need be NaN for it
    state[name][1] = value
    save_state(path, state, description=built.description)
    message = rf"'{path}' contains NaN or infinity in '{name}'"
    with pytest.raises(UserError, match=message):
        load_model(path)
    with pytest.raises(UserError, match=message):
        new_model("basic_cnn", num_classes=5, image_size=32, weights=str(path))


def test_timm_loads_its_own_model_by_name(tmp_path):
    torch.manual_seed(0)
    file = tmp_path / "model.safetensors"
    built = new_model("timm:resnet18", num_classes=5, image_size=64)
    save_built(file, built, class_names=CLASS_NAMES, preprocessing=PREPROCESSING)
    network = timm.create_model("resnet18", num_classes=5, checkpoint_path=str(file))
    images = torch.randn(2, 3, 64, 64)
    with torch.no_grad():
        assert torch.equal(network.eval()(images), built.module.eval()(images))


def test_the_file_can_start_another_training(tmp_path):
    built = save(tmp_path / "model.safetensors")
    again = new_model("basic_cnn", num_classes=5, image_size=32, weights=str(tmp_path / "model.safetensors"))
    assert all(torch.equal(t, built.module.state_dict()[name]) for name, t in again.module.state_dict().items())


def test_views_into_one_flat_buffer_and_strided_tensors_are_saved_as_they_read(tmp_path):
    flat = torch.arange(24, dtype=torch.float32)
    state = {"a": flat[:6].view(2, 3), "b": flat[6:12], "t": flat.view(4, 6).t(), "n": torch.tensor(3)}
    save_state(tmp_path / "w.safetensors", state)
    found = load_file(tmp_path / "w.safetensors")
    assert found.keys() == state.keys()
    assert all(torch.equal(found[name], state[name]) and found[name].dtype == state[name].dtype for name in state)


def test_weights_that_share_no_memory_are_written_without_a_copy(tmp_path, monkeypatch):
    """A whole network's copy beside the training is memory that may be missing. Tied ones and views are copied."""
    whole, tied, flat = torch.rand(2, 3), torch.rand(4), torch.rand(6)
    state = {"whole": whole, "tied": tied, "again": tied, "view": flat[:5]}
    written = {}

    def write(tensors, *words, **facts):
        written.update(tensors)
        save_file(tensors, *words, **facts)

    monkeypatch.setattr("zerovision.training.checkpoint.weights.save_file", write)
    save_state(tmp_path / "w.safetensors", state)
    assert {name for name in state if written[name].data_ptr() == state[name].data_ptr()} == {"whole"}


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    save(tmp_path / "model.safetensors")
    before = (tmp_path / "model.safetensors").read_bytes()

    def full_disk(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(zerovision.training.checkpoint.weights, "save_file", full_disk)
    with pytest.raises(OSError, match="No space"):
        save(tmp_path / "model.safetensors", "cnn_lstm")
    assert (tmp_path / "model.safetensors").read_bytes() == before
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_files_that_are_no_delivery_are_refused(tmp_path):
    file = tmp_path / "w.safetensors"
    with pytest.raises(UserError, match="does not exist"):
        read_metadata(file)
    file.write_text("hello")
    with pytest.raises(UserError, match="cannot be read"):
        read_metadata(file)
    save_file({"a": torch.zeros(1)}, file)
    with pytest.raises(UserError, match=r"has no metadata: it is not the model\.safetensors of a run"):
        load_model(file)
    built = save(file)
    six = {"description": replace(built.description, num_classes=6), "class_names": [*CLASS_NAMES, "five"]}
    save(file, **six)
    with pytest.raises(UserError, match=r"does not fit its own description: 'head.weight' is \[5, 128\]"):
        load_model(file)


# What a crafted file says of itself, and a part of the line that it gets.
CRAFTED = {
    "names that are numbers": ({"class_names": [0, 1, 2, 3, 4]}, "class_names 0: expected text"),
    "a number in place of names": ({"class_names": 5}, "class_names 5: expected a list of names"),
    "half a character as a name": ({"class_names": ["a", "b", "c", "d", "\ud83d"]}, r"'\ud83d': expected text"),
    "a name without end": ({"class_names": [*"abcd", "e" * 10**6]}, "expected text of at most 1000 letters"),
    "too few names": ({"class_names": ["a"]}, "contradicts itself: 1 class name, but 5 classes"),
    "a huge image": ({"preprocessing.image_size": 10**9}, "image_size 1000000000: expected a whole number from 1 to"),
    "a negative image": ({"preprocessing.image_size": -5}, "image_size -5"),
    "an image as text": ({"preprocessing.image_size": "32"}, "image_size '32'"),
    "an image too small for the model": ({"preprocessing.image_size": 4}, "does not fit its own description"),
    "a network for a huge image": ({"description.image_size": 10**9}, "image_size 1000000000"),
    "a huge resize": ({"preprocessing.resize_size": 2 * 10**6}, "resize_size 2000000"),
    "a std of zero": ({"preprocessing.std": [0.1, 0.0, 0.1]}, "std [0.1, 0.0, 0.1]: expected 3 number(s)"),
    "a std that float32 takes for zero": ({"preprocessing.std": [1e-60] * 3}, "std [1e-60"),
    "a std of nan": ({"preprocessing.std": [math.nan] * 3}, "std [nan"),
    "a mean of infinity": ({"preprocessing.mean": [math.inf] * 3}, "mean [inf"),
    "a mean beyond floats": ({"preprocessing.mean": [10**400] * 3}, "mean [1000"),
    "a mean of two": ({"preprocessing.mean": [0.5, 0.5]}, "std [0.2, 0.25, 0.5]: expected 2 number(s)"),
    "a mean of two and a network for 3": ({"description.image_channels": 2}, "expected 2 number(s)"),
    "channels without end": (
        {"description.image_channels": 10**9},
        "image_channels 1000000000: expected a whole number",
    ),
    "no channel": ({"description.image_channels": 0}, "image_channels 0: expected a whole number from 1"),
    "channels as text": ({"description.image_channels": "1"}, "image_channels '1': expected a whole number"),
    "an unknown fit": ({"preprocessing.fit": "stretch"}, "fit 'stretch': expected pad"),
    "an unknown filter": ({"preprocessing.interpolation": ["bicubic"]}, "expected bilinear, bicubic, nearest"),
    "preprocessing of a part": ({"preprocessing": {"image_size": 32}}, "has no metadata 'resize_size'"),
    "a huge stride": ({"description.stem_stride_changed": {"blocks.0.0": [2, 10**9]}}, "changed 1000000000: expected"),
    "a stride of what has none": ({"description.stem_stride_changed": {"head": [2, 1]}}, "is not a convolution"),
    "an unknown model": ({"description.model_type": "\x1b[2J"}, r"unknown model '\x1b[2J'"),
    "a network from a hub": (
        {"description.model_type": "timm:x", "description.timm_name": "hf-hub:a/b"},
        "no such name",
    ),
    "an ensemble of nothing": ({"description.model_type": "ensemble"}, "unknown model 'timm:ensemble'"),
    "a thousand members": ({"description.members": ["vgg"] * 1000}, "expected at most 32 names"),
    "members that are not there": ({"description.members": ["vgg"] * 30}, "'members.0.features.0.weight' is missing"),
    "more than the file holds": ({"description.model_type": "vgg", "description.timm_name": "vgg16_bn"}, "is missing"),
    "less than the file holds": ({"description.stem_stride_changed": {}, "tensor": "x"}, "not described, first 'x'"),
    "deep nesting": ({"extra": json.loads('{"a":' * 100 + "1" + "}" * 100)}, "more than 8 levels"),
    "an epoch as text": ({"extra": {"epoch": "\n3"}}, "epoch '"),
    "a list": (["description"], "not a JSON object"),
    "nesting without end": ("[" * 10**5, "is not JSON"),
    "a number without end": ('{"description": ' + "9" * 10**4 + "}", "is not JSON"),
    "more than any file says": ('"' + "x" * 2**24 + '"', "bytes: at most 16777216 are read"),
}


@pytest.mark.parametrize("name", CRAFTED)
def test_crafted_metadata_gets_one_line_and_no_memory(tmp_path, name):
    file = tmp_path / "w.safetensors"
    save(file)
    change, said = CRAFTED[name]
    craft_metadata(file, change)
    before = peak_bytes()
    with pytest.raises(UserError) as caught:
        load_model(file)
    line = str(caught.value)
    assert line.startswith(f"weights file '{file}' ")
    assert said in line
    assert line.isprintable()
    assert len(line) < 500
    assert peak_bytes() - before < 2**28, "vgg16 has half a gigabyte"


def test_indices_that_the_image_size_asks_for_are_no_weights():
    # The tables of such a transformer grow with the fourth power of the image's side, its weights with the second.
    said = []
    for image_size in (32, 4096):
        description = Description("timm:beit_base_patch16_224", "beit_base_patch16_224", 5, image_size)
        with torch.device("meta"):
            state = rebuild_model(description).state_dict()
        said.append(tensor_mismatch(description, {name: tensor.shape for name, tensor in state.items()}))
    assert said[0] is None
    assert "GB of tables" in said[1]


def test_preprocess_resizes_crops_and_normalizes():
    pixels = np.random.default_rng(0).integers(0, 256, (48, 80, 3), dtype=np.uint8)
    image = Image.fromarray(pixels)
    found = preprocess({"preprocessing": PREPROCESSING})(image)
    # The oracle: Pillow's own resize and crop, the normalization written out.
    resized = image.resize((60, 36), Image.Resampling.BILINEAR).crop((14, 2, 46, 34))
    expected = (np.asarray(resized, dtype=np.float64) / 255 - PREPROCESSING.mean) / PREPROCESSING.std
    assert type(found) is torch.Tensor
    assert found.dtype == torch.float32
    grey_level = 1 / 255 / min(PREPROCESSING.std)  # Pillow and torchvision round differently
    torch.testing.assert_close(
        found.double(), torch.from_numpy(expected).permute(2, 0, 1), rtol=0, atol=1.01 * grey_level
    )


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic", "nearest"])
@pytest.mark.parametrize("resize_size", [None, 40])
def test_preprocess_is_what_the_evaluation_of_training_sees(interpolation, resize_size):
    values = replace(PREPROCESSING, resize_size=resize_size, interpolation=interpolation)
    pixels = np.random.default_rng(0).integers(0, 256, (48, 80, 3), dtype=np.uint8)
    expected = evaluation_transform(values)(torch.from_numpy(pixels).permute(2, 0, 1))
    assert torch.equal(preprocess({"preprocessing": values})(Image.fromarray(pixels)), expected)


def test_preprocess_turns_and_converts():
    values = Preprocessing(32, None, mean=(0.0,) * 3, std=(1.0,) * 3)
    grey = Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32), dtype=np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned: shown rotated by 90 degrees
    grey.info["exif"] = exif.tobytes()
    found = preprocess({"preprocessing": values})(grey)
    upright = np.rot90(np.asarray(grey), -1).astype(np.float32) / 255
    torch.testing.assert_close(found, torch.from_numpy(upright).expand(3, 32, 32))
