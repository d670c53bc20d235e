"""Arrays of more than 8 bits, `--data npz:FILE`: one rule from numbers to pixels in training and every later use."""

from __future__ import annotations

import dataclasses
import io
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torchvision.transforms.v2.functional import to_dtype

from tests.kit import ELEMENTWISE, ROUNDING, assert_same_but_rounding, call, train
from zerovision.delivery.evaluate import evaluate
from zerovision.delivery.predict import predict
from zerovision.delivery.publish import write_model_card
from zerovision.models.weights_metadata import SMALLEST_STD
from zerovision.training.base.errors import UserError
from zerovision.training.checkpoint.weights import load_model, preprocess
from zerovision.training.config import TrainConfig
from zerovision.training.data import DataOptions, data_options, load_data
from zerovision.training.data.augment import evaluation_transform
from zerovision.training.data.loader import Loader
from zerovision.training.data.sampler import BatchPlan
from zerovision.training.messages import _augmented_sample

SIDE, TRAIN, CLASSES = 12, 40, 4
RECIPE = {"epochs": 2, "batch_size": 10, "learning_rate": 0.003}


def draw(kind: str, count: int, *shape: int) -> np.ndarray:
    """Noise whose level says the class; of 16 bits a small part of the range, as sensors have it."""
    generator = np.random.default_rng(count)
    levels = (np.arange(count) % CLASSES).reshape(-1, *[1] * (1 + len(shape)), 1)[:, 0]
    noise = generator.normal(0, 0.1, (count, *shape)) + 0.6 * levels.reshape(count, *[1] * len(shape))
    scaled = {"uint8": noise * 80 + 20, "uint16": noise * 900 + 300, "int16": noise * 800 - 900}.get(kind)
    if kind == ">u2":
        return draw("uint16", count, *shape).astype(kind)
    if scaled is None:
        return (noise / 3 + 0.2).clip(0, 1).astype(kind)
    limits = np.iinfo(kind)
    return scaled.round().clip(limits.min, limits.max).astype(kind)


def save(path: Path, kind: str, *channels: int, **changes: np.ndarray) -> str:
    arrays = {f"x_{part}": draw(kind, count, SIDE, SIDE, *channels) for part, count in (("train", TRAIN), ("test", 20))}
    labels = {f"y_{part}": np.arange(len(arrays[f"x_{part}"])) % CLASSES for part in ("train", "test")}
    np.savez(path, **arrays | labels | changes)
    return f"npz:{path}"


@pytest.mark.parametrize(("kind", "value"), [("uint8", 255), ("uint8", 77), ("uint16", 12345), ("float32", 1 / 3)])
def test_a_channel_of_one_value_is_as_in_training_for_every_use(tmp_path, kind, value):
    arrays = {f"x_{part}": draw(kind, count, SIDE, SIDE, 2) for part, count in (("train", TRAIN), ("test", 20))}
    for array in arrays.values():
        array[..., 1] = value
    data = load_data(DataOptions(save(tmp_path / "a.npz", kind, 2, **arrays), image_channels=2))
    for options in (data, load_data(DataOptions(save(tmp_path / "b.npz", kind), image_channels=1))):
        image, _ = options.val[0, 3]
        found = evaluation_transform(options.preprocessing)(options.val.source.read(3))
        torch.testing.assert_close(image, found, rtol=0, atol=0.05)  # of thousands that cancel out
        assert image.abs().max() < 100
    std = data.preprocessing.std
    assert std[0] > std[1] >= SMALLEST_STD


LARGEST = {"uint16": 65535, "int16": 32767, "float32": 1, "float64": 1, ">u2": 65535}
NAMES = {"float64": "float32", ">u2": "uint16"}


@pytest.mark.parametrize("kind", LARGEST)
@pytest.mark.parametrize(("channels", "asked"), [((), 0), ((), 1), ((5,), 0), ((3,), 1)])
def test_numbers_become_pixels_as_torchvision_scales_them(tmp_path, kind, channels, asked):
    name = NAMES.get(kind, kind)
    data = load_data(DataOptions(save(tmp_path / "a.npz", kind, *channels), image_channels=asked, mean=(0.4,) * 3))
    assert data.preprocessing.values == name
    numbers = draw(kind, TRAIN, SIDE, SIDE, *(channels or (1,)))
    pixels = numbers.astype(np.float64) / LARGEST[kind]
    if (channels, asked) == ((3,), 1):
        pixels = pixels @ np.array([[0.299], [0.587], [0.114]])
    mean, std = pixels.mean((0, 1, 2)), pixels.std((0, 1, 2))
    repeats = 3 if (channels, asked) == ((), 0) else 1
    np.testing.assert_allclose(data.preprocessing.mean, [*mean] * repeats, rtol=2e-4)
    np.testing.assert_allclose(data.preprocessing.std, [*std] * repeats, rtol=2e-4)
    transform, larger = (evaluation_transform(replace(data.preprocessing, image_size=size)) for size in (SIDE, 16))
    for index in (0, 3):
        expected = ((pixels[index] - mean) / std).transpose(2, 0, 1)
        image, label = data.train.__class__(data.train.source, data.preprocessing)[0, index]
        assert label == index % CLASSES
        np.testing.assert_allclose(image, np.broadcast_to(expected, image.shape), atol=2e-3)
        if asked == 0:
            raw = torch.from_numpy(numbers[index].astype(name)).permute(2, 0, 1).expand(image.shape[0], -1, -1)
            assert_same_but_rounding(transform(raw), image, ELEMENTWISE)
            assert torch.equal(larger(raw), larger(to_dtype(raw, torch.float32, scale=True)))


def test_bytes_and_the_same_images_in_16_bits_train_alike(tmp_path):
    """Also shifted, flipped and in another size: 257 times as much of 65535 is the same share."""
    bytes_given = {f"x_{part}": draw("uint8", count, SIDE, SIDE) for part, count in (("train", TRAIN), ("test", 20))}
    wide = {name: array.astype(np.uint16) * 257 for name, array in bytes_given.items()}
    narrow, deep = (
        load_data(DataOptions(save(tmp_path / f"{n}.npz", "uint8", **arrays), random_erasing=0.5))
        for n, arrays in enumerate((bytes_given, wide))
    )
    assert narrow.preprocessing.values == "uint8"
    assert deep.preprocessing.mean == pytest.approx(narrow.preprocessing.mean, abs=1e-4)
    for index in range(TRAIN):
        theirs, ours = (data.train[2, index][0] for data in (narrow, deep))
        torch.testing.assert_close(ours, theirs, atol=0.02, rtol=0)


@pytest.mark.parametrize("options", [{}, {"augmentation": "crop_flip"}, {"image_size": 16, "mixup": 0.4}])
def test_batches_are_those_of_single_images_and_of_a_later_start(tmp_path, monkeypatch, options):
    """All three ways to a batch: from the set on the device, from this process, and from the step of a resume."""
    data = load_data(DataOptions(save(tmp_path / "a.npz", "int16", 2), **options))
    plan = BatchPlan(TRAIN, 8, 1, 1, seed=0)
    whole = list(Loader(data.train, plan, 0).epoch(1))
    later = list(Loader(data.train, plan, 0).epoch(1, first_step=3))
    half = 4 * TRAIN * 2 * 18**2 // 2  # of what they take
    monkeypatch.setattr("zerovision.training.data.loader.MAX_BYTES", half)
    single = list(Loader(data.train, plan, 0).epoch(1))
    assert len(whole) == 5
    for batch, same in zip([*whole, *whole[3:]], [*single, *later], strict=True):
        assert torch.equal(batch.images, same.images)
    if "mixup" not in options:
        for batch in whole[:2]:
            keys = batch.draw_keys if len(batch.draw_keys) else batch.indices
            for image, key in zip(batch.images, keys, strict=True):
                assert torch.equal(image, data.train[1, int(key)][0])


def test_a_model_of_16_bits_is_resumed_evaluated_predicted_and_exported(tmp_path):
    data = save(tmp_path / "a.npz", "uint16")
    folder = train(tmp_path / "whole", data=data, **RECIPE | {"epochs": 10}, image_channels=1)
    parts = {"image_channels": 1, "schedule": "constant", "warmup_epochs": 0.0}
    both = [
        train(tmp_path / name, data=data, **RECIPE | {"epochs": epochs} | parts)
        for name, epochs in (("once", 2), ("twice", 1))
    ]
    train(tmp_path / "twice", data=data, resume="must", **RECIPE | parts)
    once, twice = (load_file(path / "model.safetensors") for path in both)
    assert all(torch.equal(tensor, twice[name]) for name, tensor in once.items())

    scores = evaluate(folder, output=tmp_path / "scores")
    with Image.open(tmp_path / "scores" / "worst" / "000.png") as worst:
        assert np.ptp(np.asarray(worst)) == 255  # what there is of 16 bits fills the picture
    module, metadata = load_model(folder / "model.safetensors")
    numbers = draw("uint16", 20, SIDE, SIDE)
    scaled = to_dtype(torch.from_numpy(numbers)[:, None], torch.float32, scale=True)
    mean, std = (getattr(metadata["preprocessing"], key)[0] for key in ("mean", "std"))
    with torch.no_grad():
        logits = module((scaled - mean) / std)
    right = (logits.argmax(1).numpy() == np.arange(20) % CLASSES).mean()
    assert scores["top1"] == pytest.approx(float(right)) == 1  # 8 bits of 16 would not tell the classes apart

    np.save(tmp_path / "image.npy", numbers[3])
    Image.fromarray(numbers[3]).save(tmp_path / "image.png")
    Image.fromarray(numbers[3]).save(tmp_path / "image.tif")
    expected = logits[3].softmax(0).numpy()
    for found in predict(folder, [tmp_path / f"image.{kind}" for kind in ("npy", "png", "tif")], top_k=CLASSES):
        told = dict(zip(found.labels, found.probabilities, strict=True))
        assert_same_but_rounding([told[str(n)] for n in range(CLASSES)], expected)

    loaded = load_data(DataOptions(data, image_channels=1))
    shown = _augmented_sample(SimpleNamespace(plan=BatchPlan(TRAIN, 8, 1, 1, seed=0), data=loaded))
    assert (shown.min(), shown.max()) == (0, 1)
    card = write_model_card(folder).read_text()
    assert "uint16 values divided by 65535" in card
    assert "zerovision predict PATH/OF/THIS/FOLDER image.npy" in card

    with pytest.raises(UserError, match="trained on uint16 values, but 'digits' has uint8"):
        evaluate(folder, "digits", output=None)
    with pytest.raises(UserError, match="trained on arrays of uint16"):
        preprocess(metadata)
    assert call("export", folder, "--output", tmp_path / "export", "--format", "onnx")[0] == 0
    use = json.loads((tmp_path / "export" / "preprocessing.json").read_text())
    assert use["values"] == "uint16"
    assert (use["divisor"], use["channels"], use["shrink_to"]) == (65535, None, None)
    session = onnxruntime.InferenceSession(tmp_path / "export" / "basic_cnn-fp32.onnx")
    images = ((numbers[3] / 65535 - use["mean"][0]) / use["std"][0]).astype(np.float32)[None, None]
    assert_same_but_rounding(session.run(["logits"], {"images": images})[0][0], logits[3], 10 * ROUNDING)


def test_floats_are_predicted_from_tiff_files_as_from_arrays(tmp_path):
    folder = train(tmp_path, data=save(tmp_path / "a.npz", "float32"), **RECIPE | {"epochs": 1})
    numbers = draw("float32", 20, SIDE, SIDE)[7]
    np.save(tmp_path / "0.npy", numbers)
    Image.fromarray(numbers).save(tmp_path / "1.tif")
    Image.fromarray((255 * numbers).astype(np.uint8)).save(tmp_path / "2.png")
    array, tiff, png = predict(folder, [tmp_path / name for name in ("0.npy", "1.tif", "2.png")])
    assert (array.labels, array.probabilities) == (tiff.labels, tiff.probabilities)
    assert array.probabilities
    assert "it has uint8 values, but the model takes float32" in png.error


def npy(array: np.ndarray) -> bytes:
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


PATTERN = np.arange(2 * SIDE * SIDE).reshape(SIDE, SIDE, 2)
REFUSED = {
    "bytes.npy": (npy(PATTERN.astype(np.uint8)), "it has uint8 values, but the model takes int16"),
    "floats.npy": (npy(PATTERN / 1.0), "it has floats from 0 to 287"),
    "colours.npy": (
        npy(np.zeros((4, 4, 3), np.int16)),
        r"its shape is \[4, 4, 3\], but the model takes \[height, width, 2\]",
    ),
    "two.npy": (npy(np.zeros((2, 4, 4, 2), np.int16)), r"its shape is \[2, 4, 4, 2\]"),
    "objects.npy": (npy(np.array([{}])), "not a readable .npy file"),
    "text.npy": (b"text", "not an image of a known format"),
    "archive.npy": (b"PK\x03\x04", "not an image of a known format"),
    "header.npy": (npy(np.zeros(3)).replace(b"'descr'", b"((((((("), "not a readable .npy file"),
    "huge.npy": (
        npy(np.zeros(3)).replace(b"(3,), }" + 14 * b" ", b"(99999999999999,), } "),
        "not a readable .npy file",
    ),
    "number.npy": (npy(np.int16(3)), r"its shape is \[\]"),
}


def test_arrays_are_predicted_and_others_are_one_line(tmp_path):
    """Of any number of channels, also from a folder."""
    folder = train(tmp_path, data=save(tmp_path / "a.npz", "int16", 2), **RECIPE | {"epochs": 1})
    (tmp_path / "images").mkdir()
    np.save(tmp_path / "images" / "0.npy", draw("int16", 20, SIDE, SIDE, 2)[0])
    for name, (content, _) in REFUSED.items():
        (tmp_path / "images" / name).write_bytes(content)
    found = {Path(one.image).name: one for one in predict(folder, [tmp_path / "images"])}
    assert found["0.npy"].labels
    assert not found["0.npy"].error
    for name, (_, message) in REFUSED.items():
        assert not found[name].labels
        with pytest.raises(ValueError, match=message):
            raise ValueError(found[name].error)


def test_pretrained_members_of_an_ensemble_bring_their_normalization_or_are_refused():
    vits = "timm:vit_tiny_patch16_224,timm:vit_small_patch16_224"
    config = TrainConfig(model_type="ensemble", ensemble_members=vits, pretrained=True)
    assert data_options(config).mean == (0.5,) * 3
    assert data_options(dataclasses.replace(config, pretrained=False)).mean is None
    always = dataclasses.replace(config, ensemble_members="mobilenet_finetuned,vgg", pretrained=False)
    assert data_options(always).mean == data_options(TrainConfig(model_type="mobilenet_finetuned")).mean != (0.5,) * 3
    with pytest.raises(UserError, match=r"--model-type ensemble:timm:vit\S+,mobilenet: their published weights were"):
        data_options(dataclasses.replace(config, ensemble_members="timm:vit_tiny_patch16_224,mobilenet"))
    mixed = dataclasses.replace(config, ensemble_members="timm:vit_tiny_patch16_224,mobilenet", pretrained=False)
    assert data_options(dataclasses.replace(mixed, weights="plain.pt")).mean is None, "a file that tells none"
