"""Images that are higher or wider than a square: geometry, augmentation, networks and what is written about them."""

from __future__ import annotations

import dataclasses
import json
import math

import numpy as np
import onnxruntime
import pytest
import timm
import torch
from exports import held_out, save_run
from made_data import train_loader
from PIL import Image
from torchvision.transforms.v2 import functional

from tests.kit import assert_same_but_rounding, call, new_model
from zerovision.delivery.activation_map import _as_map
from zerovision.delivery.evaluate import evaluate
from zerovision.delivery.predict import predict
from zerovision.models.dry_run import training_flops, without_data
from zerovision.models.timm_models import timm_size
from zerovision.models.weights_metadata import Preprocessing
from zerovision.training.config.command_line import parse_args
from zerovision.training.data import DataOptions, load_data
from zerovision.training.data.augment import evaluation_geometry

ARRAYS = DataOptions(image_size="16x24", augmentation="shift_flip")
COLOUR = [0.2, 0.4, 0.6]


def test_the_flag():
    for size, expected in {"224x448": "224x448", "224x224": 224, "224": 224, "0": 0}.items():
        assert parse_args(["--image-size", size])[0].image_size == expected


def of_torchvision(image: torch.Tensor, fit: str, height: int, width: int, share: float) -> torch.Tensor:
    """Resize with plain torchvision: whole; to cover the shape and its rim, then the centre; or between bars."""
    if fit == "squash":
        return functional.resize(image, [height, width], antialias=True)
    if fit == "crop":
        rim = int(height / share), int(width / share)
        scale = max(there / here for there, here in zip(rim, image.shape[1:], strict=True))
        covering = [max(int(side * scale + 1e-9), least) for side, least in zip(image.shape[1:], rim, strict=True)]
        return functional.center_crop(functional.resize(image, covering, antialias=True), [height, width])
    scale = min(height / image.shape[1], width / image.shape[2])
    inside = [max(round(side * scale), 1) for side in image.shape[1:]]
    bars = [there - here for there, here in zip((height, width), inside, strict=True)]
    padding = [bars[1] // 2, bars[0] // 2, bars[1] - bars[1] // 2, bars[0] - bars[0] // 2]
    fill = [round(255 * value) for value in COLOUR]
    return functional.pad(functional.resize(image, inside, antialias=True), padding, fill=fill)


@pytest.mark.parametrize("fit", ["crop", "pad", "squash"])
@pytest.mark.parametrize("shape", [(40, 96), (96, 40), (33, 35)])
def test_evaluation_is_torchvisions(fit, shape):
    height, width = shape
    resize_size = f"{int(height / 0.875)}x{int(width / 0.875)}" if fit == "crop" else None
    means, pads = (tuple(COLOUR), (1.0,) * 3), "pad" if fit == "pad" else ""
    preprocessing = Preprocessing(f"{height}x{width}", resize_size, *means, fit=pads)
    geometry = evaluation_geometry(preprocessing)
    for sides in [(50, 120), (120, 50), (80, 80), (45, 109), (20, 30), (7, 200), (200, 7), height, width]:
        sides = sides if isinstance(sides, tuple) else (sides, 70)
        image = torch.randint(0, 256, (3, *sides), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
        expected = of_torchvision(image, fit, height, width, 0.875)
        assert geometry(image).shape == (3, height, width)
        torch.testing.assert_close(geometry(image), expected, atol=1 if max(sides) > 20 * min(sides) else 0, rtol=0)


@pytest.mark.parametrize("padding", ["zeros", "reflect"])
def test_shifted_and_mirrored_images_are_windows(padding):
    """Of the padded image or its mirror image; the same in memory, one by one, and by a worker."""
    pair = load_data(dataclasses.replace(ARRAYS, shift_padding=padding, shift_pixels=3))
    assert pair.preprocessing.shape == (3, 16, 24)
    in_memory, by_worker = train_loader(pair, 8), train_loader(pair, 8, workers=1)
    batch, same = (next(loader.epoch(1)) for loader in (in_memory, by_worker))
    by_worker.close()
    assert torch.equal(batch.images, same.images)
    mean, std = (torch.tensor(getattr(pair.preprocessing, key)).view(3, 1, 1) for key in ("mean", "std"))
    seen = set()
    for image, index in zip(batch.images, batch.indices.tolist(), strict=True):
        assert torch.equal(image, pair.train[1, index][0])
        found = (255 * (image * std + mean)).round().byte().numpy()
        whole = pair.train.source.read(index).expand(3, -1, -1).numpy()
        mode = {"zeros": "constant", "reflect": "reflect"}[padding]
        whole = np.pad(whole, [(0, 0), (3, 3), (3, 3)], mode=mode)
        windows = [whole[:, top : top + 16, left : left + 24] for top in range(7) for left in range(7)]
        seen.add(
            next(n for n, w in enumerate([*windows, *(w[..., ::-1] for w in windows)]) if np.array_equal(w, found))
        )
    assert len(seen) > 4


def test_erasing_and_cutmix_reach_every_part():
    options = dataclasses.replace(
        ARRAYS, augmentation="none", random_erasing=1.0, random_erasing_mode="const", cutmix=1.0
    )
    pair = load_data(options)
    erased = torch.stack([(pair.train[0, index][0] == 0).all(0) for index in range(300)])
    assert erased.any(0).all(), "every pixel"
    assert 0.02 < erased.float().mean() < 1 / 3
    mixes = [pair.train.mixing.drawn(0, leaf, (16, 24)) for leaf in range(300)]
    areas = [(bottom - top) * (right - left) / (16 * 24) for _, (top, bottom, left, right) in mixes]
    assert [1 - mix.share for mix in mixes] == pytest.approx(areas)
    assert max(mix.box[1] for mix in mixes) == 16
    assert max(mix.box[3] for mix in mixes) == 24


def test_crops_keep_the_shape():
    """Of an image of the model's shape, a crop of all of the area is the image."""
    pair = load_data(DataOptions(data="fake", image_size="16x32", augmentation="crop_flip", crop_scale="1,1"))
    boxes = [pair.train._crop(draws)(160, 320) for draws in pair.train.draws(0, np.arange(200))]
    ratios = [math.log(box.width / box.height / 2) for box in boxes]
    assert -math.log(4 / 3) - 0.01 < min(ratios) < max(ratios) < math.log(4 / 3) + 0.01
    assert pair.train[0, 3][0].shape == (3, 16, 32)


def test_a_vision_transformer_is_timms():
    built = new_model("timm:vit_tiny_patch16_224", num_classes=5, image_size="32x64")
    oracle = timm.create_model("vit_tiny_patch16_224", num_classes=5, img_size=(32, 64))
    oracle.load_state_dict(built.module.state_dict())
    images = torch.rand(2, 3, 32, 64)
    assert torch.equal(built.module.eval()(images), oracle.eval()(images))
    assert built.description.image_size == "32x64"
    assert timm_size("vit_tiny_patch16_224", "32x64") == (32, 64)
    tokens = oracle.patch_embed(images)
    with_class = torch.cat([tokens[:, :1], tokens], 1)
    torch.testing.assert_close(_as_map(built.module, with_class), oracle.patch_embed.proj(images))


def test_operations_are_those_of_the_pixels():
    network = new_model("basic_cnn", num_classes=10, image_size="64x128").module
    counts = [training_flops(without_data(network), size) for size in ("64x128", "128x64", 64)]
    assert counts[0] == counts[1]
    assert counts[0] == pytest.approx(2 * counts[2], rel=0.01)


def test_a_trained_model_is_used_at_its_shape(tmp_path):
    torch.manual_seed(0)
    data = load_data(ARRAYS)
    built = new_model("basic_cnn", num_classes=10, image_size="16x24")
    run = save_run(tmp_path / "run", built, data, image_size="16x24")
    words = ("--format", "onnx", "--check-images", "8", "--output", tmp_path)
    assert call("export", run, *words)[0] == 0
    images, labels = held_out(data)
    with torch.no_grad():
        logits = built.module.eval()(images)
    session = onnxruntime.InferenceSession(tmp_path / "basic_cnn-fp32.onnx")
    found = session.run(["logits"], {"images": images.numpy()})[0]
    assert_same_but_rounding(found, logits)
    use = json.loads((tmp_path / "preprocessing.json").read_text())
    assert (use["image_size"], use["input"]["shape"]) == ("16x24", ["batch", 3, 16, 24])
    assert (use["resize_size"], use["interpolation"]) == (None, "bilinear")
    scores = evaluate(run, output=str(tmp_path / "scores"), flip=True, shift_pixels=2)
    assert scores["top1"] == pytest.approx((logits.argmax(1) == labels).float().mean().item())
    assert scores["loss"] == pytest.approx(torch.nn.functional.cross_entropy(logits, labels).item(), rel=1e-5)
    picture = tmp_path / "digit.png"
    pixels = data.val.source.read(0)[0].numpy()
    Image.fromarray(pixels).save(picture)
    (prediction,) = predict(run, [picture], top_k=1)
    assert prediction.labels[0] == data.class_names[int(logits[0].argmax())]
