"""The Python lines of README.md and docs/ that read a picture: run as they stand, they answer as `predict`."""

from __future__ import annotations

import functools
import json
import re
import shutil
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from exports import IMAGE_SIZE, lines_of, save_run
from PIL import Image

from tests.kit import assert_same_but_rounding, call, new_model
from zerovision.delivery.predict import predict
from zerovision.training.checkpoint.weights import preprocess, read_metadata
from zerovision.training.data import DataOptions, load_data
from zerovision.training.data.reading.image_numbers import ModelInput

# What a network that is as sensitive as ours makes of it; without AVX2 a tenth of the pixels is off, up to 1.1e-2.
ONE_LEVEL_HERE_AND_THERE = 2e-2
ORIENTATION = 0x0112  # of EXIF
SIDES = (300, 220)  # width and height of most pictures: shrunk to a quarter


def photograph(width: int, height: int, seed: int = 0) -> Image.Image:
    """Return smooth colours with edges."""
    draws = np.random.default_rng((width, height, seed))
    colours = Image.fromarray(draws.integers(0, 256, (6, 8, 3), dtype=np.uint8))
    return colours.resize((width, height), Image.Resampling.BICUBIC)


def make_pictures(folder: Path) -> list[str]:
    """Write what cameras, phones, detectors and drawing programs write, large enough to be shrunk."""
    turned = Image.Exif()
    turned[ORIENTATION] = 6
    alpha = photograph(*SIDES).convert("L")
    clear = photograph(*SIDES, 1)
    clear.putalpha(alpha)
    deep = (np.asarray(alpha).astype(np.uint16) * 257) ^ 0x55
    palette = photograph(*SIDES, 2).quantize(16)
    saved = {
        "clear.png": (clear, {}),
        "grey-alpha.png": (clear.convert("LA"), {}),
        "palette.png": (palette, {"transparency": 3}),
        "small-clear.png": (clear.resize((40, 35)), {}),
        "turned.jpg": (photograph(*SIDES, 3), {"exif": turned, "quality": 90}),
        "turned.png": (photograph(*SIDES, 4), {"exif": turned}),
        "deep.png": (Image.fromarray(deep), {}),
        "deep.tif": (Image.fromarray(deep), {}),
        "large.jpg": (photograph(640, 1021), {"quality": 90}),
        "grey.jpg": (alpha, {"quality": 90}),
        "cmyk.jpg": (photograph(*SIDES, 5).convert("CMYK"), {"quality": 90}),
        "edge.jpg": (photograph(4 * 2 * IMAGE_SIZE - 1, 200), {"quality": 90}),
        "small.jpg": (photograph(33, 47), {"quality": 90}),
        "wide.webp": (photograph(900, 90), {"lossless": True}),
    }
    for name, (image, options) in saved.items():
        image.save(folder / name, **options)
    return [str(folder / name) for name in saved]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory) -> list[str]:
    return make_pictures(tmp_path_factory.mktemp("pictures"))


def make_run(folder: Path, **options) -> Path:
    """Write a run on photographs with random weights that tell them apart: by large logits, and both classes."""
    root = folder / "data"
    for label in "ab":
        (root / label).mkdir(parents=True)
        for number in range(3):
            photograph(40, 40, number + 3 * (label == "b")).save(root / label / f"{number}.png")
    data = load_data(DataOptions(data=str(root), image_size=IMAGE_SIZE, **options))
    torch.manual_seed(1)
    built = new_model("basic_cnn", num_classes=2, image_size=IMAGE_SIZE)
    images = torch.stack([data.train[0, index][0] for index in range(len(data.train))])
    with torch.no_grad():
        for _ in range(30):  # BatchNorm learns the scale of its inputs
            built.module.train()(images)
        weight, bias = (built.module.get_parameter(name) for name in sorted(built.head_parameter_names, reverse=True))
        weight *= 20
        bias -= built.module.eval()(images).mean(0)
    run = save_run(folder / "run", built, data)
    values = json.loads((run / "config.json").read_text()) | {"data": str(root), "decode": options.get("decode", "cpu")}
    (run / "config.json").write_text(json.dumps(values))
    return run


KINDS = {"crop": {}, "squash": {"fit": "squash", "interpolation": "bicubic", "decode": "exact"}}


@pytest.fixture(scope="module", params=KINDS)
def run(request, tmp_path_factory) -> Path:
    return make_run(tmp_path_factory.mktemp(request.param), **KINDS[request.param])


# For all pictures: to optimize its graph for each would be most of the time.
kept_session = functools.cache(onnxruntime.InferenceSession)


def run_lines(code: str, picture: str, **files: Path) -> dict:
    """Run lines on a picture, with our files in place of those that they name."""
    code = re.sub(r'"photo\.\w+"', repr(picture), code)
    for ending, file in files.items():
        code, count = re.subn(rf'"logs/[^"]*{ending}"', repr(str(file)), code)
        assert count, ending
    names: dict = {"__name__": "page", "kept_session": kept_session}
    code = code.replace("onnxruntime.InferenceSession", "kept_session")
    exec(code, names)
    return names


def wanted_from(run: Path, pictures: list[str]) -> list[tuple[str, np.ndarray]]:
    """Return label and probabilities, by class, that `predict` gives."""
    found = list(predict(run, pictures, top_k=2))
    assert not [each.error for each in found if each.error]
    return [
        (each.label, np.array([dict(zip(each.labels, each.probabilities, strict=True))[name] for name in "ab"]))
        for each in found
    ]


def test_the_lines_of_the_python_guide(run, pictures):
    code = lines_of("zerovision.load_model Image.open")
    for picture, (label, probabilities) in zip(pictures, wanted_from(run, pictures), strict=True):
        names = run_lines(code, picture, safetensors=run / "model.safetensors")
        found = names["logits"].detach().softmax(1)[0]
        assert_same_but_rounding(found, probabilities, msg=picture)  # a batch of another size
        assert names["metadata"]["class_names"][found.argmax()] == label


def test_the_lines_for_onnxruntime_alone(run, pictures, tmp_path):
    assert call("export", run, "--format", "onnx", "--output", tmp_path)[0] == 0
    (file,), code = tmp_path.glob("*.onnx"), lines_of("preprocessing.json onnxruntime")
    reader = ModelInput(read_metadata(run / "model.safetensors")["preprocessing"])
    levels = 255 * torch.tensor(reader.preprocessing.std)[:, None, None]
    for picture, (label, probabilities) in zip(pictures, wanted_from(run, pictures), strict=True):
        names = run_lines(code, picture, json=tmp_path / "preprocessing.json", onnx=file)
        seen = torch.from_numpy(names["values"].transpose(2, 0, 1))
        off = ((seen - reader.read(picture)) * levels).abs()
        assert off.max() <= 1.01, picture  # Pillow rounds otherwise than PyTorch
        assert off.mean() <= 0.2, picture  # 0.02 with AVX2
        found = torch.from_numpy(names["logits"]).softmax(0)
        np.testing.assert_allclose(found, probabilities, atol=ONE_LEVEL_HERE_AND_THERE, err_msg=picture)
        assert names["use"]["class_names"][found.argmax()] == label


def test_the_lines_for_a_file_that_prepares_pictures(run, pictures, tmp_path):
    words = ("--format", "onnx", "--with-preprocessing", "--output", tmp_path)
    assert call("export", run, *words)[0] == 0
    (file,), code = tmp_path.glob("*.onnx"), lines_of("with-preprocessing.onnx")
    for picture, (label, probabilities) in zip(pictures, wanted_from(run, pictures), strict=True):
        names = run_lines(code, picture, onnx=file)
        found = names["probabilities"][0]
        np.testing.assert_allclose(found, probabilities, atol=ONE_LEVEL_HERE_AND_THERE, err_msg=picture)
        assert names["names"][names["classes"][0]] == label


def test_what_was_decoded_before_is_taken_as_it_is(run, pictures):
    """Its pixels are those of a file that loses nothing; of a JPEG those at full size are averaged."""
    reader = preprocess(metadata := read_metadata(run / "model.safetensors"))
    read = ModelInput(metadata["preprocessing"]).read
    levels = 255 * torch.tensor(metadata["preprocessing"].std)[:, None, None]
    for picture in pictures:
        with Image.open(picture) as image:
            image.load()
            off = ((reader(image) - read(picture)) * levels).abs()
            again = Image.open(picture)
            assert torch.equal(reader(again), reader(again)), "the file is read as often as one likes"
        assert off.mean() < (1.5 if picture.endswith("jpg") else 1e-3), picture


def test_weights_alone_are_read_as_the_run_decoded(run, pictures, tmp_path):
    alone = shutil.copy(run / "model.safetensors", tmp_path)
    for found, wanted in zip(wanted_from(Path(alone), pictures), wanted_from(run, pictures), strict=True):
        assert found[0] == wanted[0]
        assert found[1].tolist() == wanted[1].tolist()
