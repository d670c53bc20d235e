"""Images of other channels than RGB: how files and arrays are read, what they are trained, exported and planned as."""

from __future__ import annotations

import json
import pickle

import numpy as np
import onnxruntime
import pytest
import timm
import torch
from exports import save_run
from made_data import class_folders, of_files
from PIL import Image
from safetensors.torch import load_file
from timm.models import adapt_input_conv

from tests.kit import ROUNDING, assert_same_but_rounding, call, new_model, train
from zerovision.delivery.evaluate import evaluate
from zerovision.delivery.predict import predict
from zerovision.models import MODELS
from zerovision.models.build import rebuild_model
from zerovision.models.weights_metadata import Description
from zerovision.planning.machines import PlanSettings
from zerovision.planning.plan_command import job_of
from zerovision.planning.run_workload import workload_of
from zerovision.training.base.errors import UserError
from zerovision.training.checkpoint.weights import load_model
from zerovision.training.config import TrainConfig
from zerovision.training.data import DataOptions, load_data
from zerovision.training.data.augment import evaluation_transform
from zerovision.training.data.datasets import make_array_datasets
from zerovision.training.data.reading.decode import make_decoder
from zerovision.training.data.reading.sources import ArraySource, grey
from zerovision.training.data.sampler import BatchPlan
from zerovision.training.loop import seed_dropout
from zerovision.training.recipe.tuning import whiten_stem

GENERATOR = np.random.default_rng(0)
MODES = {1: "L", 3: "RGB", 4: "RGBA"}


@pytest.fixture(autouse=True)
def same_noise():
    """Draw the same noise in a test whatever ran before it in the same process."""
    GENERATOR.bit_generator.state = np.random.default_rng(0).bit_generator.state


def noise(*shape: int) -> np.ndarray:
    return GENERATOR.integers(0, 256, shape, dtype=np.uint8)


def save_arrays(path, channels: int, side: int = 12) -> str:
    labels = np.arange(30) % 10
    # By chance, no two pixels of this draw compete for a maximum of basic_cnn within rounding, as in most draws.
    x = np.random.default_rng(1).integers(0, 256, (30, side, side, channels), dtype=np.uint8)
    y = {"y_train": labels[:20], "y_test": labels[20:]}
    np.savez(path, x_train=x[:20], x_test=x[20:], **y)
    return f"npz:{path}"


# --- reading -----------------------------------------------------------------------------------------------------


FILES = {
    "grey.png": Image.fromarray(noise(40, 48)),
    "rgb.png": Image.fromarray(noise(40, 48, 3)),
    "rgba.png": Image.fromarray(noise(40, 48, 4)),
    "grey_and_alpha.png": Image.frombytes("LA", (48, 40), noise(40, 48, 2).tobytes()),
    "palette.png": Image.fromarray(noise(40, 48, 3)).quantize(16),
    "colour.jpg": Image.fromarray(noise(40, 48, 3)).resize((480, 400)),
    "grey.jpg": Image.fromarray(noise(40, 48)).resize((480, 400)),
    "cmyk.jpg": Image.frombytes("CMYK", (48, 40), noise(40, 48, 4).tobytes()),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("decoder", ["cpu", "exact"])
def test_files_are_read_as_pillow_converts_them(tmp_path, name, decoder):
    """Of a JPEG, what the decoder gives as RGB; transparency is on white unless it is a channel."""
    FILES[name].save(tmp_path / name)
    rgb, grey_levels, rgba = (
        of_files(make_decoder(decoder, 64, channels))(str(tmp_path / name)) for channels in (3, 1, 4)
    )
    with Image.open(tmp_path / name) as image:
        pixels = Image.fromarray(rgb)
        expected = (pixels if name.endswith("jpg") else image).convert("RGBA")
    assert (rgb.shape[2], grey_levels.shape[2], rgba.shape[2]) == (3, 1, 4)
    assert np.array_equal(grey_levels[:, :, 0], np.asarray(pixels.convert("L")))
    assert np.array_equal(rgba, np.asarray(expected))
    if name == "grey.png":
        assert np.array_equal(grey_levels[:, :, 0], np.asarray(FILES[name]))


@pytest.mark.parametrize("channels", [1, 4])
def test_parts_of_files_and_the_cache_have_these_pixels_too(tmp_path, channels):
    for folder in class_folders(tmp_path / "photos"):
        for number in range(3):
            Image.fromarray(noise(96, 80, 3)).save(folder / f"{number}.jpg", quality=90)
            Image.fromarray(noise(50, 40, 4)).save(folder / f"{number}.png")
    cached, plain = (
        load_data(
            DataOptions(
                str(tmp_path / "photos"), image_size=16, image_channels=channels, cache=cache, data_root=str(tmp_path)
            )
        )
        for cache in ("disk", "off")
    )
    assert plain.preprocessing.shape == (channels, 16, 16)
    source = pickle.loads(pickle.dumps(cached.train.source))  # as a worker process gets it
    for index in range(len(plain.train)):
        for reader in (cached.train, cached.train, plain.train):
            image, _ = reader[1, index]
            assert image.shape == (channels, 16, 16)
            assert torch.equal(image, plain.train[1, index][0])
        assert torch.equal(source.read(index), plain.train.source.read(index))
    if channels == 4:
        opaque, varied = (plain.train[0, index][0][3] for index in (0, 1))  # a JPEG, a PNG
        torch.testing.assert_close(opaque, torch.ones(16, 16))
        assert varied.unique().numel() > 10


def test_colours_of_arrays_become_the_grey_of_pillow():
    images = noise(5, 3, 20, 20)
    expected = [np.asarray(Image.fromarray(image.transpose(1, 2, 0)).convert("L")) for image in images]
    assert np.array_equal(grey(torch.from_numpy(images))[:, 0], np.stack(expected))


def test_channels_that_a_set_does_not_have_are_one_line(tmp_path):
    source = ArraySource(torch.zeros(2, 4, 8, 8, dtype=torch.uint8), torch.zeros(2))
    assert source.in_channels(0) is source.in_channels(4) is source
    options = DataOptions(save_arrays(tmp_path / "a.npz", 4), image_channels=3)
    with pytest.raises(UserError, match=r"image-channels 3: .* have 4 channel.* as 4 alone: change"):
        load_data(options)


# --- normalization and augmentation ------------------------------------------------------------------------------


def test_means_are_the_sets_own_or_those_of_the_weights(tmp_path):
    five = load_data(DataOptions(save_arrays(tmp_path / "a.npz", 5), mean=(0.485, 0.456, 0.406), std=(0.2, 0.2, 0.2)))
    pixels = five.train.source.images.double() / 255
    assert five.preprocessing.mean == pytest.approx(pixels.mean((0, 2, 3)).tolist(), abs=1e-4)
    assert five.preprocessing.std == pytest.approx(pixels.std((0, 2, 3), correction=0).tolist(), abs=1e-4)
    weights = {"mean": (0.4, 0.5, 0.9), "std": (0.2, 0.2, 0.5)}
    of_weights = load_data(DataOptions("digits", image_channels=1, **weights)).preprocessing
    assert (of_weights.mean, of_weights.std) == ((pytest.approx(0.6),), (pytest.approx(0.3),))
    grey_digits, rgb_digits = (load_data(DataOptions("digits", image_channels=n)).preprocessing for n in (1, 0))
    assert rgb_digits.mean == grey_digits.mean * 3
    for folder in class_folders(tmp_path / "photos"):
        Image.fromarray(noise(20, 20)).save(folder / "a.png")
    rgba = load_data(DataOptions(str(tmp_path / "photos"), image_channels=4)).preprocessing
    assert (rgba.mean, rgba.std) == ((0.485, 0.456, 0.406, 0.5), (0.229, 0.224, 0.225, 0.5))


@pytest.mark.parametrize("augmentation", ["shift_flip", "crop_flip"])
def test_every_channel_is_moved_and_erased_like_a_grey_image(augmentation):
    """Sets of arrays are augmented in whole batches or, with crops, image by image."""
    pixels, labels = torch.from_numpy(noise(20, 1, 16, 16)), torch.arange(20) % 2
    changes = {"random_erasing": 0.7, "random_erasing_mode": "const", "mean": (0.5,), "std": (0.25,)}
    options = DataOptions(augmentation=augmentation, **changes)
    one, five = (
        make_array_datasets(source, source, ["a", "b"], options, image_size=16).train
        for source in (ArraySource(pixels, labels, 1), ArraySource(pixels.expand(-1, 5, -1, -1), labels))
    )
    images = [torch.stack([dataset[3, index][0] for index in range(20)]) for dataset in (one, five)]
    assert (images[0].shape[1], images[1].shape[1]) == (1, 5)
    level = 1 / (255 * 0.25)  # by which kernels for resizing may differ
    torch.testing.assert_close(images[0].expand(-1, 5, -1, -1), images[1], atol=1.01 * level, rtol=0)
    assert (images[1] == 0).float().mean() > 0.02


# --- models and weights ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("channels", [1, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("model_type", [*MODELS, "timm:resnet18", "timm:vit_tiny_patch16_224", "timm:convnext_atto"])
def test_every_model_takes_them_and_its_description_says_so(model_type, channels):
    with torch.device("meta"):
        built = new_model(model_type, num_classes=5, image_size=64, image_channels=channels, loads_weights=False)
        assert built.module.eval()(torch.empty(2, channels, 64, 64)).shape == (2, 5)
        again = rebuild_model(Description.from_dict(json.loads(json.dumps(built.description.to_dict()))))
    shapes = {name: tensor.shape for name, tensor in again.state_dict().items()}
    assert shapes == {name: tensor.shape for name, tensor in built.module.state_dict().items()}
    assert built.description.image_channels == channels


def test_a_description_for_rgb_is_as_before():
    assert "image_channels" not in new_model("basic_cnn", num_classes=5, image_size=32).description.to_dict()


@pytest.mark.parametrize(("source", "target"), [(1, 3), (4, 3), (3, 1), (3, 4), (4, 1)])
def test_first_layers_of_files_are_adapted_as_timm_does_it(tmp_path, source, target):
    given = timm.create_model("test_resnet", num_classes=5, in_chans=source).state_dict()
    torch.save(given, tmp_path / "resnet")
    built = new_model(
        "timm:test_resnet", num_classes=5, image_size=64, image_channels=target, weights=str(tmp_path / "resnet")
    )
    expected = adapt_input_conv(target, given["conv1.0.weight"], base_chans=source)
    assert torch.equal(built.module.state_dict()["conv1.0.weight"], expected)
    words = {"num_classes": 5, "image_size": 32, "ensemble_members": "basic_cnn,cnn_lstm"}
    given = new_model("ensemble", image_channels=source, **words).module.state_dict()
    torch.save(given, tmp_path / "ensemble")
    found = new_model("ensemble", image_channels=target, weights=str(tmp_path / "ensemble"), **words)
    assert any("adapted to this model's input: members.0.blocks.0.0.weight" in note for note in found.notes)
    stems = {f"members.{number}.blocks.0.0.weight" for number in range(2)}
    for name, tensor in found.module.state_dict().items():
        was = given[name]
        assert torch.equal(tensor, adapt_input_conv(target, was, base_chans=source) if name in stems else was), name


@pytest.mark.parametrize("channels", [1, 2, 5])
def test_a_whitened_stem_of_airbench_fits_any_channels(tmp_path, channels):
    arrays = save_arrays(tmp_path / "a.npz", channels)
    data = load_data(DataOptions(arrays, image_channels=channels, augmentation="none"))
    built = new_model("airbench_small", num_classes=10, image_size=12, image_channels=channels)
    whiten_stem(built, data, computes=True)
    filters = min(24, 8 * channels)
    assert built.module.stem.weight.shape == (filters, channels, 2, 2)
    images = torch.stack([data.train[0, index][0] for index in range(20)])
    outputs = torch.nn.functional.conv2d(images, built.module.stem.weight)[:, : filters // 2].transpose(0, 1).flatten(1)
    torch.testing.assert_close(outputs.square().mean(1).sqrt(), torch.ones(filters // 2), atol=0.1, rtol=0)


# --- whole runs --------------------------------------------------------------------------------------------------


def test_a_step_on_arrays_of_5_channels_is_plain_pytorchs(tmp_path):
    """And the first images go to TensorBoard, which shows the first three channels."""
    data = save_arrays(tmp_path / "a.npz", 5)
    recipe = {"optimizer": "sgd", "learning_rate": 0.1, "momentum": 0.0, "weight_decay": 0.0, "warmup_epochs": 0.0}
    recipe |= {"schedule": "constant", "augmentation": "none", "label_smoothing": 0.0, "gradient_clipping": 0.0}
    folder = train(tmp_path, data=data, batch_size=20, tensorboard=True, **recipe)
    torch.manual_seed(0)
    module = new_model("basic_cnn", num_classes=10, image_size=12, image_channels=5).module.train()
    loaded = load_data(DataOptions(data, augmentation="none"))
    seed_dropout(0, 0, 0, torch.device("cpu"))
    order = BatchPlan(20, 20, 1, 1, 0).draw_keys(0).tolist()
    images = torch.stack([loaded.train[0, index][0] for index in order])
    loss = torch.nn.functional.cross_entropy(module(images), loaded.train.source.labels[order])
    loss.backward()
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    for name, tensor in load_file(folder / "model.safetensors").items():
        assert_same_but_rounding(tensor, module.state_dict()[name], 10 * ROUNDING, name)
    facts = json.loads((folder / "environment.json").read_text())
    assert facts["model"]["image_channels"] == 5
    Image.new("RGB", (12, 12)).save(tmp_path / "a.png")
    with pytest.raises(UserError, match=r"channels 5: image files have 1"):
        next(predict(folder, [tmp_path / "a.png"]))
    with pytest.raises(UserError, match=r"image-channels 5: the images have 1 channel"):
        evaluate(folder, "digits", output=None)
    scores = evaluate(folder, output=tmp_path / "scores")
    assert scores["samples"] == 10
    with Image.open(tmp_path / "scores" / "worst" / "000.png") as worst:
        assert worst.mode == "RGB"


def test_grey_digits_are_evaluated_predicted_and_exported(tmp_path):
    data = load_data(DataOptions(image_size=16, image_channels=1))
    torch.manual_seed(0)
    built = new_model("basic_cnn", num_classes=10, image_size=16, image_channels=1)
    folder = save_run(tmp_path / "run", built, data, image_channels=1)
    module = built.module.eval()
    with torch.no_grad():
        logits = module(torch.stack([data.val[0, index][0] for index in range(len(data.val))]))
    assert evaluate(folder, output=tmp_path / "scores")["top1"] == pytest.approx(
        float((logits.argmax(1) == data.val.source.labels).double().mean())
    )
    with Image.open(tmp_path / "scores" / "worst" / "000.png") as worst:
        assert worst.mode == "L"
    pixels = data.val.source.read(3)[0].numpy()
    for name, mode in MODES.items():
        Image.fromarray(pixels).convert(mode).save(tmp_path / f"{name}.png")
    for found in predict(folder, [tmp_path / f"{name}.png" for name in MODES], top_k=10):
        told = dict(zip(found.labels, found.probabilities, strict=True))
        assert_same_but_rounding([told[str(n)] for n in range(10)], logits[3].softmax(0))
    assert call("export", folder, "--output", tmp_path / "export", "--format", "onnx")[0] == 0
    use = json.loads((tmp_path / "export" / "preprocessing.json").read_text())
    assert use["input"]["shape"] == ["batch", 1, 16, 16]
    assert use["channels"] == "L"
    session = onnxruntime.InferenceSession(tmp_path / "export" / "basic_cnn-fp32.onnx")
    images = ((pixels / 255 - use["mean"][0]) / use["std"][0]).astype(np.float32)[None, None]
    assert_same_but_rounding(session.run(["logits"], {"images": images})[0][0], logits[3], 10 * ROUNDING)


FILES_OF_MORE = {
    ("rgba.png", 4): lambda level: np.dstack([noise(24, 24, 3), np.full((24, 24), level, np.uint8)]),
    ("deep.png", 1): lambda level: GENERATOR.integers(0, 300 * level, (24, 24), dtype=np.uint16),
    ("deep.tif", 1): lambda level: GENERATOR.integers(0, 300 * level, (24, 24), dtype=np.uint16),
}


@pytest.mark.parametrize(("kind", "channels"), FILES_OF_MORE)
def test_files_with_alpha_and_of_16_bits_are_trained_on_evaluated_and_predicted(tmp_path, kind, channels):
    """Classes differ in alpha, or in brightness, by which 16 bits become the nearest of 8."""
    for folder in class_folders(tmp_path / "photos"):
        for number in range(8):
            pixels = FILES_OF_MORE[kind, channels]({"a": 60, "b": 200}[folder.name])
            Image.fromarray(pixels).save(folder / f"{number}-{kind}")
    data = str(tmp_path / "photos")
    folder = train(tmp_path, data=data, image_channels=channels, image_size=16, epochs=6, batch_size=8)
    module, metadata = load_model(folder / "model.safetensors")
    transform, images, files = evaluation_transform(metadata["preprocessing"]), [], []
    for path in sorted((tmp_path / "photos" / "val").rglob(f"*-{kind}")):
        with Image.open(path) as image:
            raw = np.array(image)
        pixels = raw if raw.dtype == np.uint8 else np.rint(raw / 257).astype(np.uint8)
        images.append(transform(torch.from_numpy(np.atleast_3d(pixels)).permute(2, 0, 1)))
        files.append(path)
    with torch.no_grad():
        logits = module(torch.stack(images))
    labels = torch.tensor([path.parent.name == "b" for path in files]).long()
    scores = evaluate(folder, output=tmp_path / "scores")
    assert scores["loss"] == pytest.approx(torch.nn.functional.cross_entropy(logits, labels).item(), rel=ROUNDING)
    assert scores["top1"] == pytest.approx((logits.argmax(1) == labels).double().mean().item())
    for found, row in zip(predict(folder, files, top_k=2), logits.softmax(1), strict=True):
        told = dict(zip(found.labels, found.probabilities, strict=True))
        assert_same_but_rounding([told["a"], told["b"]], row)


# --- planning ----------------------------------------------------------------------------------------------------


def test_the_planner_counts_them(tmp_path):
    three, nine = (workload_of(TrainConfig(model_type="basic_cnn", image_channels=n), 10, 32) for n in (0, 9))
    assert nine.sizes.parameters - three.sizes.parameters == 6 * 32 * 9
    images = [one.activations(4, "fp32", "cpu", False, True).saved for one in (three, nine)]
    assert images[1] - images[0] == 4 * 4 * 6 * 32 * 32
    data = save_arrays(tmp_path / "a.npz", 5)
    job, _ = job_of(PlanSettings.read(["--model-type", "basic_cnn", f"--data={data}", "--gpu", "a100-80gb"]))
    assert job.workload.image_channels == 5
    assert job.workload.sizes.parameters == three.sizes.parameters + 2 * 32 * 9
    assert job_of(PlanSettings.read(["--model-type", "basic_cnn", "--gpu", "a100-80gb"]))[0].config.image_channels == 0
