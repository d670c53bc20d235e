"""`--with-preprocessing`: exported files take pictures of any size and answer as `predict`."""

from __future__ import annotations

import json
import os
from types import SimpleNamespace

import numpy as np
import onnxruntime
import pytest
import torch
from exports import IMAGE_SIZE, lines_of, save_run
from PIL import Image
from torch import nn

from tests.kit import ELEMENTWISE, assert_same_but_rounding, call, new_model
from zerovision.delivery.calibration import PLAIN, Calibration, calibration_file
from zerovision.delivery.export import ExportRefused
from zerovision.delivery.export.comparison import compare_pictures
from zerovision.delivery.export.export_job import CheckImages, ExportJob
from zerovision.delivery.export.onnx_format import export_graph
from zerovision.delivery.export.pictures import FromPictures
from zerovision.delivery.predict import predict
from zerovision.delivery.settings import ExportSettings
from zerovision.models.weights_metadata import Preprocessing
from zerovision.training.base.errors import UserError
from zerovision.training.base.files import sha256_of
from zerovision.training.data import DataOptions, load_data
from zerovision.training.data.augment import evaluation_geometry, evaluation_transform
from zerovision.training.tasks.labels import OneLabel

RESIZES_BYTES = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
SIDES = [(1, 1), (30, 40), (48, 31), (32, 32), (9, 180), (640, 481), (2, 43), (31, 700), (1500, 1100)]
ORIENTATION = 0x0112  # of EXIF


def preprocessing(fit: str, filter_name: str = "bilinear", shape: tuple = (32, 36)) -> Preprocessing:
    size, resize_size = shape[0], shape[1] if fit == "crop" else None
    means, fit = ((0.5, 0.4, 0.3), (0.2, 0.25, 0.5)), "pad" if fit == "pad" else ""
    return Preprocessing(size, resize_size, *means, interpolation=filter_name, fit=fit)


def from_pictures(
    fit: str, filter_name: str = "bilinear", calibration: Calibration | None = None, shape: tuple = (32, 36)
) -> FromPictures:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))
    metadata = {"preprocessing": preprocessing(fit, filter_name, shape), "class_names": list("abcde"), "extra": {}}
    return FromPictures(network, metadata, calibration).eval()


@pytest.mark.parametrize("filter_name", ["bilinear", "bicubic"])
@pytest.mark.parametrize("fit", ["crop", "squash", "pad"])
@pytest.mark.parametrize("shape", [(32, 36), ("20x44", "25x50"), ("40x20", "40x25")])
def test_the_pixels_are_those_of_the_evaluation(fit, filter_name, shape):
    given = preprocessing(fit, filter_name, shape)
    module, geometry = from_pictures(fit, filter_name, shape=shape), evaluation_geometry(given)
    transform, draws = evaluation_transform(given), torch.Generator().manual_seed(0)
    differing, values = 0, 0
    for height, width in SIDES:
        pictures = torch.randint(0, 256, (2, height, width, 3), generator=draws).byte()
        channels_first = pictures.permute(0, 3, 1, 2)
        wanted = torch.stack([geometry(picture) for picture in channels_first]).permute(0, 2, 3, 1)
        off = (module.resized(pictures) - wanted).abs()
        assert off.max() <= 1, (height, width)
        differing, values = differing + int((off > 0).sum()), values + off.numel()
        if off.max() == 0:
            found, prepared = module.prepared(pictures), torch.stack([transform(each) for each in channels_first])
            assert_same_but_rounding(found, prepared, ELEMENTWISE)
    assert differing <= values * (1e-4 if RESIZES_BYTES else 0.5)


def test_a_wrong_pixel_and_a_wrong_answer_are_refused():
    module, draws = from_pictures("crop"), torch.Generator().manual_seed(0)
    pictures = [torch.randint(0, 256, (50 + number % 2, 70, 3), generator=draws).byte() for number in range(8)]
    transform = evaluation_transform(preprocessing("crop"))
    images = torch.stack([transform(picture.permute(2, 0, 1)) for picture in pictures])
    with torch.no_grad():
        logits = module.network(images)
    known = (logits.argmax(1), logits, "made up", OneLabel(logits.shape[1]))
    check = CheckImages(images, *known, picture=pictures.__getitem__)
    job = SimpleNamespace(module=module, check=check, settings=SimpleNamespace(batch_size=5))
    agreement = compare_pictures(lambda batch: module(batch)[0], job)
    assert agreement.difference < 1e-3
    assert agreement.file_top1 == 1
    assert compare_pictures(lambda batch: module(batch)[0].flip(1), job).difference > 1e-2
    module.mean += 2 / 255  # beside the level that some processors' resizing is off by, which is allowed
    with pytest.raises(ExportRefused, match=r"off by [23]\.?\d* of 255 levels"):
        compare_pictures(lambda batch: module(batch)[0], job)


def test_onnxruntime_takes_pictures_of_any_size():
    """The graph alone: shapes that its example did not have, and a class that is none."""
    calibration = Calibration(0.7, 0.3, PLAIN, {})
    module = from_pictures("crop", "bicubic", calibration)
    metadata = {"preprocessing": module.preprocessing, "class_names": list("abcde"), "extra": {}}
    job = ExportJob(ExportSettings(model="", format="onnx", with_preprocessing=True), module, metadata, {}, None, None)
    session = onnxruntime.InferenceSession(export_graph(job).SerializeToString())
    assert session.get_inputs()[0].shape == ["batch", "height", "width", 3]
    draws, classes = torch.Generator().manual_seed(0), set()
    for shape in ((1, 1, 1), (3, 40, 40), (2, 9, 180), (1, 301, 200), (1, 50, 1)):
        pictures = torch.randint(0, 256, (*shape, 3), generator=draws).byte()
        probabilities, numbers = session.run(["probabilities", "class"], {"pictures": pictures.numpy()})
        with torch.no_grad():
            wanted = (module.network(module.prepared(pictures)) / 0.7).softmax(1)
        np.testing.assert_allclose(probabilities, wanted, atol=1e-5)
        assert numbers.tolist() == [int(row.argmax()) if row.max() >= 0.3 else -1 for row in wanted]
        classes |= set(numbers.tolist())
    assert -1 in classes
    assert len(classes) > 1


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """JPEG files of several sizes in two classes, some turned by EXIF, and a run on them with a calibration."""
    root, draws = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for part in ("train", "val"):
        for number in range(8):
            folder = root / part / "ab"[number % 2]
            folder.mkdir(parents=True, exist_ok=True)
            colours = draws.integers(0, 256, (4, 5, 3), dtype=np.uint8)
            image = Image.fromarray(colours).resize((90 + 9 * number, 140 - 12 * number), Image.Resampling.BICUBIC)
            exif = Image.Exif()
            exif[ORIENTATION] = 1 + number
            image.save(folder / f"{number}.jpg", quality=95, exif=exif)
    data = load_data(DataOptions(data=str(root), image_size=IMAGE_SIZE))
    torch.manual_seed(1)
    built = new_model("basic_cnn", num_classes=2, image_size=IMAGE_SIZE)
    run = save_run(tmp_path_factory.mktemp("runs") / "photos", built, data)
    values = json.loads((run / "config.json").read_text()) | {"data": str(root)}
    (run / "config.json").write_text(json.dumps(values))
    weights, paths = run / "model.safetensors", sorted(str(path) for path in (root / "val").rglob("*.jpg"))
    calibration = {"temperature": 0.5, "threshold": 0.0, "flip": True, "shift_pixels": 0}
    calibration |= {"weights_sha256": sha256_of(weights)}
    calibration_file(weights).write_text(json.dumps(calibration))
    threshold = np.median([each.probabilities[0] for each in predict(run, paths, flip=True)])
    calibration_file(weights).write_text(json.dumps(calibration | {"threshold": float(threshold)}))
    return run, paths


@pytest.mark.slow
@pytest.mark.parametrize("format_name", ["onnx", "torch-export"])
def test_a_file_answers_as_predict_by_the_lines_of_the_guide(format_name, photos, tmp_path):
    run, paths = photos
    words = ("--format", format_name, "--with-preprocessing", "--output", tmp_path, "--max-accuracy-loss", "0")
    assert call("export", run, *words)[0] == 0
    assert len(os.listdir(tmp_path)) == 2, "the file and class_map.txt: all else is inside"
    ours = list(predict(run, paths, top_k=2, flip=True))
    assert {prediction.is_rejected for prediction in ours} == {False, True}
    file = next(path for path in tmp_path.iterdir() if path.stem.endswith("-with-preprocessing"))
    with pytest.raises(UserError, match="is an export"):
        predict(file, paths)
    code = lines_of("with-preprocessing.onnx").replace(
        "logs/runs/digits/export/mobilenet-fp32-with-preprocessing.onnx", str(file)
    )
    for path, prediction in zip(paths, ours, strict=True):
        names = {"__name__": "guide"}
        lines = code.replace("photo.jpg", path)
        if format_name == "torch-export":
            lines = lines.replace("onnxruntime.InferenceSession", "Session")
            names["Session"] = lambda path: SimpleNamespace(
                run=lambda _, given: [
                    each.detach().numpy() for each in torch.export.load(path).module()(torch.tensor(given["pictures"]))
                ],
                get_modelmeta=lambda: SimpleNamespace(
                    custom_metadata_map={"class_names": '["a", "b"]', "preprocessing": '{"shrink_to": 32}'}
                ),
            )
        exec(lines, names)
        found = dict(zip(names["names"], names["probabilities"][0].tolist(), strict=True))
        wanted = dict(zip(prediction.labels, prediction.probabilities, strict=True))
        assert found == pytest.approx(wanted, abs=2e-4 if RESIZES_BYTES else 0.05)
        chosen = int(names["classes"][0])
        assert prediction.label == ("none of these" if chosen < 0 else names["names"][chosen])


def test_a_filter_without_antialiasing_is_one_line():
    with pytest.raises(UserError, match="resized by nearest"):
        from_pictures("squash", "nearest")
