"""`--decode numbers`: files of 16 bits, and of any number of channels, in a folder; in training and every later use."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from exports import held_out, save_run
from PIL import Image
from test_data_images import write_png
from torchvision.transforms.v2 import functional

from tests.kit import assert_same_but_rounding, new_model
from zerovision.delivery.evaluate import evaluate
from zerovision.delivery.predict import predict
from zerovision.training.base.errors import UserError
from zerovision.training.base.files import write_json
from zerovision.training.data import DataOptions, load_data
from zerovision.training.data.reading.files import Refused
from zerovision.training.data.reading.image_numbers import read_numbers

KINDS = [("uint16", 1), ("uint16", 5), ("float32", 16), ("int16", 3), ("uint8", 7)]


def write_folder(root, kind: str, channels: int) -> dict[str, torch.Tensor]:
    """Write two classes, grey ones also as PNG and TIFF; return the values by path, float32 [C, H, W] up to 1."""
    generator, expected = np.random.default_rng(5), {}
    for label, number in itertools.product("ab", range(6)):
        (root / label).mkdir(parents=True, exist_ok=True)
        path = root / label / f"{number}{('.npy', '.png', '.tif')[number % 3] if channels == 1 else '.npy'}"
        numbers = values = generator.random((18 + number, 24, channels), dtype=np.float32)
        if kind != "float32":
            numbers = (values * np.iinfo(kind).max).astype(kind)
            values = numbers / np.float32(np.iinfo(kind).max)
        if path.suffix == ".npy":
            np.save(path, numbers)
        else:
            Image.fromarray(numbers[..., 0]).save(path)
        expected[str(path)] = torch.from_numpy(values).permute(2, 0, 1)
    return expected


def options_of(root, **changes) -> DataOptions:
    return DataOptions(data=str(root), decode="numbers", image_size="16x24", val_fraction=0.3, **changes)


@pytest.mark.parametrize(("kind", "channels"), KINDS)
def test_not_one_bit_is_lost(tmp_path, kind, channels):
    expected = write_folder(tmp_path, kind, channels)
    pair = load_data(options_of(tmp_path, fit="squash"))
    seen = max(channels, 3)
    assert pair.preprocessing.shape == (seen, 16, 24)
    assert pair.preprocessing.values == kind
    mean, std = (torch.tensor(getattr(pair.preprocessing, key)).view(-1, 1, 1) for key in ("mean", "std"))
    for index in range(len(pair.val)):
        values = expected[pair.val.source.name(index)].expand(seen, -1, -1)
        found = functional.to_dtype(pair.val.source.read(index), torch.float32, scale=True)
        assert_same_but_rounding(found, values, 2**-23)  # a unit in the last place of 1
        resized = functional.resize(values, [16, 24], antialias=True)
        tolerance = 1 / 255 if kind == "uint8" else 1e-5  # bytes are rounded
        torch.testing.assert_close(pair.val[0, index][0] * std + mean, resized, rtol=0, atol=tolerance)
    every = torch.cat([values.flatten(1) for values in expected.values()], 1).mean(1)
    torch.testing.assert_close(mean.flatten(), every.expand(seen), rtol=0, atol=0.05)
    cropped = load_data(options_of(tmp_path))
    assert (cropped.augmentation, cropped.train[0, 1][0].shape) == ("crop_flip", (seen, 16, 24))


@pytest.mark.parametrize(("kind", "channels"), [("uint16", 1), ("float32", 16)])
def test_evaluation_and_prediction_read_them_alike(tmp_path, kind, channels):
    expected = write_folder(tmp_path / "data", kind, channels)
    data = load_data(options_of(tmp_path / "data"))
    torch.manual_seed(0)
    built = new_model("basic_cnn", num_classes=2, image_size="16x24", image_channels=max(channels, 3))
    used = {"data": str(tmp_path / "data"), "decode": "numbers", "val_fraction": 0.3, "image_size": "16x24"}
    run = save_run(tmp_path / "run", built, data)
    write_json(run / "config.json", used | {"model_type": "basic_cnn"})
    images, labels = held_out(data)
    with torch.no_grad():
        logits = built.module.eval()(images)
    loss = torch.nn.functional.cross_entropy(logits, labels)
    assert evaluate(run)["loss"] == pytest.approx(loss.item(), rel=1e-5)
    found = {each.image: max(each.probabilities) for each in predict(run, tmp_path / "data")}
    assert found.keys() == expected.keys()
    highest = dict(zip(map(data.val.source.name, range(len(images))), logits.softmax(1).amax(1).tolist(), strict=True))
    assert {path: found[path] for path in highest} == pytest.approx(highest, rel=1e-5)


BAD = {
    "a number": (np.float32(0.5), r"its shape is \[\], not \[height, width\]"),
    "four axes": (np.zeros((1, 8, 8, 1), np.uint16), r"its shape is \[1, 8, 8, 1\], not"),
    "no pixel": (np.zeros((0, 8), np.uint16), r"its shape is \[0, 8\], not"),
    "no supported type": (np.zeros((8, 8, 5), np.int64), "int64 numbers: use uint8"),
    "cut off": (None, "not a readable .npy file"),
}


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("place", ["a", "b"])
def test_a_bad_file_is_skipped_wherever_it_is(tmp_path, bad, place):
    """Also the first one of a part, by which the type of the numbers is known."""
    numbers, words = BAD[bad]
    for part in ("train", "val"):
        write_folder(tmp_path / part, "uint16", 5)
        file = tmp_path / part / place / "0.npy"
        file.write_bytes(b"\x93NUMPY") if numbers is None else np.save(file, numbers)
    pair = load_data(options_of(tmp_path, bad_images="skip:0.3"))
    assert (pair.preprocessing.values, pair.preprocessing.channels) == ("uint16", 5)
    with pytest.raises(UserError, match=words):
        load_data(options_of(tmp_path)).train.source.read(0 if place == "a" else 6)


def test_what_would_lose_bits_or_is_other_is_refused(tmp_path):
    write_folder(tmp_path, "uint16", 1)
    with pytest.raises(UserError, match="image files have 1"):
        load_data(dataclasses.replace(options_of(tmp_path, image_channels=5), decode="cpu"))
    deep = np.full((4, 4, 3), 300, np.uint16)
    files = {name: tmp_path / name for name in ("bytes.npy", "two.npy", "cut.npy", "deep.png")}
    np.save(files["bytes.npy"], deep[..., 0].astype(np.uint8))
    np.save(files["two.npy"], deep[..., :2])
    files["cut.npy"].write_bytes(b"\x93NUMPY")
    write_png(files["deep.png"], 4, 4, 16, 2, b"".join(b"\0" + row.astype(">u2").tobytes() for row in deep))
    for name, words in {
        "bytes.npy": "it has uint8 values, but the model takes uint16",
        "two.npy": r"its shape is \[4, 4, 2\], but the model takes",
        "cut.npy": "not a readable .npy file",
        "deep.png": "16-bit colors, which Pillow reads as 8-bit: save it as .npy",
    }.items():
        with pytest.raises(Refused, match=words):
            read_numbers(files[name].read_bytes(), "uint16", 3)
